"""Parameters that torch's fully_shard has cut over data-parallel ranks: which part of them this rank holds."""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def held_part(x: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter or its gradient, as live flat storage, and where it lies: elements [start, stop) of the
    whole tensor, flattened. A plain tensor is its own part.

    Only cuts along the first dimension are such a range; it is what fully_shard does unless told otherwise.
    """
    if not isinstance(x, DTensor):
        flat = x.detach().view(-1)
        return flat, 0, flat.numel()
    assert all(not isinstance(p, Shard) or p.dim == 0 for p in x.placements), f"cut along another dimension: {x.placements}"
    flat = x.detach().to_local().view(-1)
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    start = offset[0] * math.prod(x.shape[1:]) if flat.numel() else 0
    return flat, start, start + flat.numel()
