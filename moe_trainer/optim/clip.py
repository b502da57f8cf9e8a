"""Norms and zero counts of flat tensors that are sharded over ranks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import Group

# An fp32 sum of ten million squares has a relative error of 4e-4; sums of 4096, added in fp64, less than 1e-7 at the
# same speed.
_CHUNK_NUMEL = 4096


@torch.no_grad()
def square_sum(tensors: Iterable[Tensor], library: FusedLibrary | None = None) -> Tensor | None:
    """Compute the sum of squares of flat tensors, taken from the iterable one at a time.

    Args:
        library: computes the norms of the tensors that it takes.

    Returns:
        fp64 scalar on the device of the first tensor (others may be on the host); None if there are none.
    """
    partial: list[Tensor] = []
    of_library: list[Tensor] = []
    for x in tensors:
        x = x.detach().flatten()
        if library is not None and library.takes(x):
            of_library.append(x)
            continue
        if x.dtype != torch.float32:
            x = x.float()
        num_chunked = x.numel() // _CHUNK_NUMEL * _CHUNK_NUMEL
        if num_chunked:
            partial.append(torch.linalg.vector_norm(x[:num_chunked].view(-1, _CHUNK_NUMEL), dim=1))
        if num_chunked < x.numel():
            partial.append(torch.linalg.vector_norm(x[num_chunked:]).view(1))
    if library is not None and of_library:
        partial += library.norms(of_library)
    partial = [part.to(partial[0].device) for part in partial]
    return torch.cat(partial).double().square_().sum() if partial else None


@torch.no_grad()
def zero_count(tensors: Iterable[Tensor]) -> Tensor | None:
    """Count the elements that are exactly zero, as an int64 scalar; None if there are no tensors."""
    counts = [x.numel() - torch.count_nonzero(x) for x in tensors]
    return torch.stack(counts).sum() if counts else None


def sum_over_ranks(value: Tensor | None, group: Group, device: torch.device) -> float:
    """Sum a scalar over a group in fp64; None counts as zero. Collective; the same number on every rank."""
    value = torch.zeros((), dtype=torch.float64, device=device) if value is None else value.double()
    return float(collectives.all_reduce(value, group))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips a gradient of this norm to max_norm: 1 if it is smaller or max_norm is 0."""
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
