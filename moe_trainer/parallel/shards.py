"""This rank's data-parallel shards of a parameter: plain, sharded by FSDP, or quantized.

The values of a quantized parameter are those of the optimizer's main parameter (optim/quantized_params.py).
"""

import math
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shards(x: Tensor) -> list[tuple[Tensor, int, int]]:
    """Return flat views of this rank's shards, each with its range [start, stop) in the flattened full tensor.

    There is one shard (possibly empty) if dimension 0 is sharded, and one per index of dimension 0 if dimension 1 is.
    """
    if not isinstance(x, DTensor):
        local = x.detach()
        return [(local.view(-1), 0, local.numel())]
    dims = [p.dim for p in x.placements if isinstance(p, Shard)]
    assert len(dims) == 1 and dims[0] in (0, 1), f"sharded along another dimension than 0 or 1: {x.placements}"
    local = _to_local(x)
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if dims == [0]:
        start = offset[0] * math.prod(x.shape[1:]) if local.numel() else 0
        return [(local.view(-1), start, start + local.numel())]
    first = offset[1] * math.prod(x.shape[2:])
    starts = (index * math.prod(x.shape[1:]) + first for index in range(x.shape[0]))
    return [
        (shard.view(-1), start, start + shard.numel()) for shard, start in zip(local.unbind(0), starts, strict=True)
    ]


def shards_to_save(x: Tensor) -> list[tuple[Tensor, int, int, Callable[[int, int], Tensor] | None]]:
    """Return shards as local_shards, each with a function that reads a range of it if no storage holds its values."""
    source = _master_source(x)
    return [(*shard, None) for shard in local_shards(x)] if source is None else source.shards_to_save()


def shards_to_load(x: Tensor) -> list[tuple[Tensor, int, int]]:
    """Return shards as local_shards, to be overwritten before the optimizer's after_load."""
    source = _master_source(x)
    return local_shards(x) if source is None else source.shards_to_load()


def _master_source(x: Tensor) -> Any:
    stored_weight = getattr(x, "stored_weight", None)
    return None if stored_weight is None else stored_weight.main_param_owner


def _to_local(x: DTensor) -> Tensor:
    return cast(DTensor, x.detach()).to_local()


def shard_at(x: Tensor, start: int) -> Tensor:
    """Return the local shard that starts at element `start` of the full tensor."""
    if isinstance(x, DTensor) and any(isinstance(p, Shard) and p.dim == 1 for p in x.placements):
        return _to_local(x)[start // math.prod(x.shape[1:])].view(-1)  # faster than a search among the local shards
    ((shard, shard_start, _),) = local_shards(x)
    assert shard_start == start, f"the local shard starts at element {shard_start}, not {start}"
    return shard


def full_tensor(x: Tensor) -> Tensor:
    """Gather a parameter or its gradient. Collective over the ranks that hold shards."""
    source = _master_source(x)
    if source is not None:
        return source.full_tensor()
    return cast(DTensor, x.detach()).full_tensor() if isinstance(x, DTensor) else x.detach()
