"""Collectives on a Group: the one file that calls torch.distributed to communicate.

A group of one rank costs nothing: the input comes back (or is copied into the output) and no communicator exists.
With `async_op=True` every tensor collective returns a work object with `wait()`; the caller keeps the tensors alive
until then. Tensors must be contiguous. Messages between two members are in p2p.py.

Every call is recorded in the group's trace (trace.py) and raises CommunicationError, which names operation, group and place,
when another rank has ended, is stuck, or the group's timeout has passed.

The last part is differentiable: collectives on the rows of activations, each of which runs its mirror image in backward
(all-to-all with the split sizes exchanged; all-gather and reduce-scatter each other). Ranks may have different numbers
of rows, none included; every rank calls them all the same, or its peers would wait for ever. Several tensors
that travel together go through one call: their backward is one node too, so no two ranks can disagree about its order.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group
from moe_trainer.parallel.trace import TracedWork, communicate

_OPS = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
)

# torch 2.13 renamed these two; older versions have only the second spelling
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _run(
    group: Group,
    operation: str,
    x: Tensor | None,
    launch: Callable[..., Any],
    *args: Any,
    async_op: bool = False,
    **kwargs: Any,
) -> TracedWork | None:
    """Run a collective of torch.distributed as a call of the group's trace; see trace.communicate. Those of tensors can be async."""
    if x is not None:
        kwargs["async_op"] = async_op
    return communicate(
        group.trace, group.name, group.ranks, operation, x, async_op, launch, *args, group=group.handle, **kwargs
    )


class CompletedWork:
    """The work object of a collective that had nothing to do."""

    def wait(self) -> bool:
        return True


def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` in place over the group ("sum", "max", "min", "avg").

    Returns: x; with async_op the work object.
    """
    if group.size == 1:
        return CompletedWork() if async_op else x
    work = _run(group, "all_reduce", x, dist.all_reduce, x, op=_OPS[op], async_op=async_op)
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
        return CompletedWork() if async_op else out
    work = _run(group, "all_gather", x, _all_gather_flat, out, x, async_op=async_op)
    return work if async_op else out


def reduce_scatter_flat(out: Tensor, x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` over the group and keep this rank's part in `out`.

    Shapes: x [n * group.size], out [n]; out may be this rank's slice of x.
    Returns: out; with async_op the work object.
    """
    assert x.numel() == out.numel() * group.size, (
        f"reduce_scatter: x {x.numel()}, out {out.numel()}, {group.size} ranks"
    )
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return CompletedWork() if async_op else out
    work = _run(group, "reduce_scatter", x, _reduce_scatter_flat, out, x, op=_OPS[op], async_op=async_op)
    return work if async_op else out


def all_to_all_flat(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Any:
    """Send the i-th equal part of `x` to member i; `out` holds what they sent, in group order.

    Returns: out; with async_op the work object.
    """
    assert out.numel() == x.numel() and x.numel() % group.size == 0, f"all_to_all: {x.numel()} over {group.size} ranks"
    if group.size == 1:
        out.copy_(x)
        return CompletedWork() if async_op else out
    work = _run(group, "all_to_all", x, dist.all_to_all_single, out, x, async_op=async_op)
    return work if async_op else out


def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Overwrite `x` with that of the group's member number `src`."""
    if group.size == 1:
        return CompletedWork() if async_op else x
    work = _run(group, "broadcast", x, dist.broadcast, x, src=group.ranks[src], async_op=async_op)
    return work if async_op else x


def barrier(group: Group) -> None:
    """Wait until every member has arrived."""
    if group.size > 1:
        _run(group, "barrier", None, dist.barrier)


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """Return the picklable object of the group's member number `src`."""
    if group.size == 1:
        return obj
    box = [obj]
    _run(group, "broadcast_object", None, dist.broadcast_object_list, box, src=group.ranks[src])
    return box[0]


def all_gather_object(obj: Any, group: Group) -> list:
    """Return every member's picklable object, in group order."""
    if group.size == 1:
        return [obj]
    box = [None] * group.size
    _run(group, "all_gather_object", None, dist.all_gather_object, box, obj)
    return box


def gather_object(obj: Any, group: Group, dst: int = 0) -> list | None:
    """Collect every member's picklable object, in group order, on member number `dst`; the others get None."""
    if group.size == 1:
        return [obj]
    box = [None] * group.size if group.rank == dst else None
    _run(group, "gather_object", None, dist.gather_object, obj, box, dst=group.ranks[dst])
    return box


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, send, receive, *tensors):
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _exchange_rows(tensors, send, receive, group)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, *_exchange_rows(grads, ctx.receive, ctx.send, ctx.group)


class PendingAllToAll:
    """Rows on their way between start_all_to_all and finish_all_to_all; in backward their gradients, the other way."""

    def __init__(self, tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], group: Group):
        self.sent = [x.contiguous() for x in tensors]  # kept until they have arrived
        self.outs = tuple(x.new_empty(sum(receive), *x.shape[1:]) for x in tensors)
        self.works = [
            _run(group, "all_to_all", x, dist.all_to_all_single, out, x, list(receive), list(send), async_op=True)
            for out, x in zip(self.outs, self.sent)
        ]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        self.sent = self.works = ()
        return self.outs


def _exchange_rows(
    tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], group: Group
) -> tuple[Tensor, ...]:
    return PendingAllToAll(tensors, send, receive, group).wait()


def all_to_all(group: Group, send: Sequence[int], receive: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send rows [sum(send[:i]), sum(send[:i + 1])) of every tensor to member i. Differentiable.

    Shapes: tensors [sum(send), ...]; receive[i] rows come from member i. Returns: tensors [sum(receive), ...], group order.
    """
    for x in tensors:
        assert x.shape[0] == sum(send), f"all_to_all: {x.shape[0]} rows, but {sum(send)} are to be sent"
    if group.size == 1:
        return tensors
    return _AllToAll.apply(group, tuple(send), tuple(receive), *tensors)


class AllToAllHandle:
    """One exchange that is started and finished by two calls: split sizes, and what is under way at the moment."""

    def __init__(self, group: Group, send: Sequence[int], receive: Sequence[int]):
        self.group, self.send, self.receive = group, tuple(send), tuple(receive)
        self.flight: PendingAllToAll | None = None


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, journey, *tensors):
        ctx.journey = journey
        journey.flight = PendingAllToAll(tensors, journey.send, journey.receive, journey.group)
        return journey.flight.outs

    @staticmethod
    def backward(ctx, *grads):
        flight, ctx.journey.flight = ctx.journey.flight, None
        return None, *flight.wait()  # started by _FinishAllToAll; `grads` are what was sent


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, journey, *tensors):
        ctx.journey = journey
        journey.flight.wait()
        journey.flight = None
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        journey = ctx.journey
        journey.flight = PendingAllToAll(grads, journey.receive, journey.send, journey.group)
        return None, *grads


def start_all_to_all(
    group: Group, send: Sequence[int], receive: Sequence[int], *tensors: Tensor
) -> tuple[AllToAllHandle, tuple[Tensor, ...]]:
    """Begin what all_to_all does, and return at once. Give all that is returned to finish_all_to_all, and nothing else; what is
    computed between the two calls runs beside the exchange, and so does its backward. Differentiable.
    """
    journey = AllToAllHandle(group, send, receive)
    if group.size == 1:
        return journey, tensors
    return journey, _StartAllToAll.apply(journey, *tensors)


def finish_all_to_all(journey: AllToAllHandle, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Wait for the rows. Returns: as all_to_all."""
    if journey.group.size == 1:
        return tuple(tensors)
    return _FinishAllToAll.apply(journey, *tensors)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _gather_rows(x, sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return _scatter_rows(grad, ctx.sizes, ctx.group), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return _scatter_rows(x, sizes, group)

    @staticmethod
    def backward(ctx, grad):
        return _gather_rows(grad, ctx.sizes, ctx.group), None, None


def _gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    longest = max(sizes)
    mine = x.contiguous()
    if x.shape[0] < longest:
        mine = x.new_zeros(longest, *x.shape[1:])
        mine[: x.shape[0]] = x
    out = x.new_empty(longest * group.size, *x.shape[1:])
    if out.numel():
        _run(group, "all_gather", mine, _all_gather_flat, out, mine)
    if min(sizes) == longest:
        return out
    return torch.cat([part[:size] for part, size in zip(out.split(longest), sizes)])


def _scatter_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    longest = max(sizes)
    if min(sizes) == longest:
        padded = x.contiguous()
    else:
        padded = x.new_zeros(longest * group.size, *x.shape[1:])
        for place, part in zip(padded.split(longest), x.split(list(sizes))):
            place[: part.shape[0]] = part
    out = x.new_empty(longest, *x.shape[1:])
    if out.numel():
        _run(group, "reduce_scatter", padded, _reduce_scatter_flat, out, padded)
    return out[: sizes[group.rank]]


def all_gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Concatenate every member's rows, in group order. Differentiable: backward sums each row over the members.

    Shapes: x [sizes[group.rank], ...]. Returns: [sum(sizes), ...].
    """
    assert x.shape[0] == sizes[group.rank], f"all_gather_rows: {x.shape[0]} rows, {sizes[group.rank]} announced"
    return x if group.size == 1 else _AllGatherRows.apply(x, tuple(sizes), group)


def reduce_scatter_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Sum rows over the members and keep this one's part. Differentiable: backward concatenates.

    Shapes: x [sum(sizes), ...]. Returns: [sizes[group.rank], ...].
    """
    assert x.shape[0] == sum(sizes), f"reduce_scatter_rows: {x.shape[0]} rows, {sum(sizes)} announced"
    return x if group.size == 1 else _ReduceScatterRows.apply(x, tuple(sizes), group)
