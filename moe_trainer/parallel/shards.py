"""Which part of a parameter this rank holds, and how to get at its values.

A plain parameter is its own storage. torch's fully_shard cuts parameters over data-parallel ranks. A weight that is stored in 8 bits has
its values with the optimizer, which gives them in parts, too (`stored.home`, optim/fp8_params.py). Whoever saves, loads or exports
parameters comes here.
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shards(x: Tensor) -> list[tuple[Tensor, int, int]]:
    """This rank's part of a parameter or its gradient: live flat storage, and where it lies, elements [start, stop) of the whole
    tensor, flattened. A plain tensor is its own part.

    One entry where the first dimension is cut (maybe an empty one), one per index of the first where the second is.
    """
    local = x.detach()
    if not isinstance(x, DTensor):
        return [(local.view(-1), 0, local.numel())]
    cut = [p.dim for p in x.placements if isinstance(p, Shard)]
    assert len(cut) == 1 and cut[0] in (0, 1), f"cut along other dimensions than the first or second: {x.placements}"
    local = local.to_local()
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if cut == [0]:
        start = offset[0] * math.prod(x.shape[1:]) if local.numel() else 0
        return [(local.view(-1), start, start + local.numel())]
    first = offset[1] * math.prod(x.shape[2:])
    starts = (index * math.prod(x.shape[1:]) + first for index in range(x.shape[0]))
    return [(part.view(-1), start, start + part.numel()) for part, start in zip(local.unbind(0), starts, strict=True)]


def shards_to_save(x: Tensor) -> list[tuple[Tensor, int, int, Callable[[int, int], Tensor] | None]]:
    """As local_shards, to be read only. The last item reads a range of a part where no storage has the values; the first has only shape and
    type then."""
    home = _home(x)
    return [(*part, None) for part in local_shards(x)] if home is None else home.shards_to_save()


def shards_to_load(x: Tensor) -> list[tuple[Tensor, int, int]]:
    """As local_shards, to be overwritten in place before the optimizer's after_load."""
    home = _home(x)
    return local_shards(x) if home is None else home.shards_to_load()


def _home(x: Tensor):
    stored = getattr(x, "fp8_weight", None)
    return None if stored is None else stored.home


def shard_at(x: Tensor, start: int) -> Tensor:
    """The held part that begins at element `start` of the whole tensor."""
    if isinstance(x, DTensor) and any(isinstance(p, Shard) and p.dim == 1 for p in x.placements):
        return x.detach().to_local()[start // math.prod(x.shape[1:])].view(-1)  # not by a search among as many parts
    ((part, begin, _),) = local_shards(x)
    assert begin == start, f"the part held begins at element {begin}, not {start}"
    return part


def full_tensor(x: Tensor) -> Tensor:
    """All of a parameter or its gradient, on every rank that holds a part. Collective over those; a plain tensor is whole."""
    home = _home(x)
    if home is not None:
        return home.full_tensor()
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
