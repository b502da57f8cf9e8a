"""Collectives on a Group: the one file that calls torch.distributed to communicate.

A group of one rank costs nothing: the input comes back (or is copied into the output) and no communicator exists.
With `async_op=True` every tensor collective returns a work object with `wait()`; the caller keeps the tensors alive
until then. Tensors must be contiguous.
"""

from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group

_OPS = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
)

# torch 2.13 renamed these two; older versions have only the second spelling
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Done:
    """The work object of a collective that had nothing to do."""

    def wait(self) -> bool:
        return True


def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` in place over the group ("sum", "max", "min", "avg").

    Returns: x; with async_op the work object.
    """
    if group.size == 1:
        return Done() if async_op else x
    work = dist.all_reduce(x, op=_OPS[op], group=group.handle, async_op=async_op)
    return work if async_op else x


def all_gather_flat(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Any:
    """Concatenate every rank's flat `x` into `out`, in group order.

    Shapes: x [n], out [n * group.size]; x may be this rank's slice of out.
    Returns: out; with async_op the work object.
    """
    assert out.numel() == x.numel() * group.size, f"all_gather: out {out.numel()}, x {x.numel()}, {group.size} ranks"
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done() if async_op else out
    work = _all_gather_flat(out, x, group=group.handle, async_op=async_op)
    return work if async_op else out


def reduce_scatter_flat(out: Tensor, x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` over the group and keep this rank's part in `out`.

    Shapes: x [n * group.size], out [n]; out may be this rank's slice of x.
    Returns: out; with async_op the work object.
    """
    assert x.numel() == out.numel() * group.size, f"reduce_scatter: x {x.numel()}, out {out.numel()}, {group.size} ranks"
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done() if async_op else out
    work = _reduce_scatter_flat(out, x, op=_OPS[op], group=group.handle, async_op=async_op)
    return work if async_op else out


def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Overwrite `x` with that of the group's member number `src`."""
    if group.size == 1:
        return Done() if async_op else x
    work = dist.broadcast(x, src=group.ranks[src], group=group.handle, async_op=async_op)
    return work if async_op else x


def barrier(group: Group) -> None:
    """Wait until every member has arrived."""
    if group.size > 1:
        dist.barrier(group=group.handle)


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """Return the picklable object of the group's member number `src`."""
    if group.size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=group.ranks[src], group=group.handle)
    return box[0]


def all_gather_object(obj: Any, group: Group) -> list:
    """Return every member's picklable object, in group order."""
    if group.size == 1:
        return [obj]
    box = [None] * group.size
    dist.all_gather_object(box, obj, group=group.handle)
    return box
