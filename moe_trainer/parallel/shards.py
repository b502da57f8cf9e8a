"""Parameters that torch's fully_shard has cut over data-parallel ranks: which part of them this rank holds."""

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def held_part(x: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter or its gradient, as live flat storage, and where it lies: elements [start, stop) of the
    whole tensor, flattened. A plain tensor is its own part.

    Only cuts along the first dimension (or the next, where that is 1) are such a range.
    """
    if not isinstance(x, DTensor):
        flat = x.detach().view(-1)
        return flat, 0, flat.numel()
    dim = max((placement.dim for placement in x.placements if isinstance(placement, Shard)), default=0)
    assert math.prod(x.shape[:dim]) == 1, f"shape {tuple(x.shape)} cut as {x.placements} is no range of elements"
    flat = x.detach().to_local().view(-1)
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    start = offset[dim] * math.prod(x.shape[dim + 1:]) if flat.numel() else 0
    return flat, start, start + flat.numel()


def whole(x: Tensor) -> Tensor:
    """All of a parameter or its gradient, on every rank that holds a part. Collective over those; a plain tensor is whole."""
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
