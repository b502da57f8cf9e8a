"""Collectives on a Group. Point-to-point messages are in p2p.py.

In a group of one rank every collective returns its input (or copies it to the output); no communicator exists.
With `async_op=True` a tensor collective returns a work object with `wait()`; the caller keeps the tensors alive until
then. Tensors must be contiguous. Every call is recorded in the group's trace (trace.py) and raises CommunicationError
if a peer has exited or hangs.

all_to_all, all_gather_rows and reduce_scatter_rows are differentiable. Ranks may have different numbers of rows,
including none, but every rank must make the call. Tensors that are exchanged together use one call, so that all ranks
run their backward in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_trainer.parallel.state import Group, communicate

_OPS = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
)

# torch 2.13 renamed these two
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveWork(Protocol):
    """Work object of a collective that may be in flight."""

    def wait(self) -> object: ...


class CompletedWork:
    """Work object of a collective in a group of one rank."""

    def wait(self) -> bool:
        return True


def _run(
    group: Group,
    operation: str,
    out: Tensor,
    x: Tensor,
    launch: Callable[..., Any],
    *args: Any,
    async_op: bool,
    **kw: Any,
) -> Any:
    """Run a torch.distributed collective from `x` to `out`; return `out`, or the work object with async_op."""
    if group.size == 1:
        if out is not x and out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return CompletedWork() if async_op else out
    work = communicate(group, operation, x, async_op, launch, *args, group=group.handle, async_op=async_op, **kw)
    return work if async_op else out


def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce `x` in place ("sum", "max", "min", "avg"); return it, or the work object with async_op."""
    return _run(group, "all_reduce", x, x, dist.all_reduce, x, op=_OPS[op], async_op=async_op)


def all_gather_flat(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Any:
    """All-gather flat tensors into `out`; return it, or the work object with async_op.

    Shapes: x [n], out [n * group.size]; x may be this rank's slice of out.
    """
    assert out.numel() == x.numel() * group.size, f"all_gather: out {out.numel()}, x {x.numel()}, {group.size} ranks"
    return _run(group, "all_gather", out, x, _all_gather_flat, out, x, async_op=async_op)


def reduce_scatter_flat(out: Tensor, x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Any:
    """Reduce-scatter flat tensors into `out`; return it, or the work object with async_op.

    Shapes: x [n * group.size], out [n]; out may be this rank's slice of x.
    """
    assert x.numel() == out.numel() * group.size, (
        f"reduce_scatter: x {x.numel()}, out {out.numel()}, {group.size} ranks"
    )
    return _run(group, "reduce_scatter", out, x, _reduce_scatter_flat, out, x, op=_OPS[op], async_op=async_op)


def all_to_all_flat(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Any:
    """All-to-all of equal splits of `x` into `out`; return it, or the work object with async_op."""
    assert out.numel() == x.numel() and x.numel() % group.size == 0, f"all_to_all: {x.numel()} over {group.size} ranks"
    return _run(group, "all_to_all", out, x, dist.all_to_all_single, out, x, async_op=async_op)


def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Any:
    """Broadcast `x` in place from group rank `src`."""
    return _run(group, "broadcast", x, x, dist.broadcast, x, src=group.ranks[src], async_op=async_op)


def barrier(group: Group) -> None:
    if group.size > 1:
        communicate(group, "barrier", None, False, dist.barrier, group=group.handle)


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """Return the picklable object of group rank `src`."""
    if group.size == 1:
        return obj
    objects, root = [obj], group.ranks[src]
    launch = dist.broadcast_object_list
    communicate(group, "broadcast_object", None, False, launch, objects, src=root, group=group.handle)
    return objects[0]


def all_gather_object(obj: Any, group: Group) -> list:
    """Return every rank's picklable object, in group order."""
    if group.size == 1:
        return [obj]
    objects = [None] * group.size
    communicate(group, "all_gather_object", None, False, dist.all_gather_object, objects, obj, group=group.handle)
    return objects


def gather_object(obj: Any, group: Group, dst: int = 0) -> list | None:
    """Return every rank's picklable object, in group order, on group rank `dst`; None on the others."""
    if group.size == 1:
        return [obj]
    objects = [None] * group.size if group.rank == dst else None
    communicate(
        group, "gather_object", None, False, dist.gather_object, obj, objects, dst=group.ranks[dst], group=group.handle
    )
    return objects


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, send, receive, *tensors):
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return PendingAllToAll(tensors, send, receive, group).wait()

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, *PendingAllToAll(grads, ctx.receive, ctx.send, ctx.group).wait()


class PendingAllToAll:
    """An asynchronous all-to-all of rows: its buffers and work objects. `send` and `receive` are rows per rank."""

    def __init__(self, tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int], group: Group):
        self.sent: Sequence[Tensor] = [x.contiguous() for x in tensors]  # alive until the exchange has finished
        self.outs = tuple(x.new_empty(sum(receive), *x.shape[1:]) for x in tensors)
        self.works: Sequence[Any] = [
            _run(group, "all_to_all", out, x, dist.all_to_all_single, out, x, list(receive), list(send), async_op=True)
            for out, x in zip(self.outs, self.sent)
        ]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        self.sent = self.works = ()
        return self.outs


def all_to_all(group: Group, send: Sequence[int], receive: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """All-to-all of rows with split sizes `send` and `receive`. Differentiable.

    Shapes: tensors [sum(send), ...] -> [sum(receive), ...], in group order.
    """
    for x in tensors:
        assert x.shape[0] == sum(send), f"all_to_all: {x.shape[0]} rows, split sizes sum to {sum(send)}"
    if group.size == 1:
        return tensors
    return _AllToAll.apply(group, tuple(send), tuple(receive), *tensors)


class Exchange(ABC):
    """Communication between start_exchange and finish_exchange: of tensors in forward, of their gradients in backward.

    Attributes:
        is_local: nothing is sent, and the tensors are returned as they are.
    """

    is_local = False

    @abstractmethod
    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        """Start to send tensors, or gradients in the opposite direction."""

    @abstractmethod
    def wait(self, is_backward: bool) -> tuple[Tensor, ...]:
        """Return what has been received."""

    @abstractmethod
    def placeholders(self) -> tuple[Tensor, ...]:
        """Return tensors of the shapes that are being received in forward; they must not be read."""


class AllToAllExchange(Exchange):
    """An asynchronous all-to-all in forward, and that of the gradients in backward.

    Attributes:
        pending: what is in flight: an exchange between `start` and `wait`.
    """

    def __init__(self, group: Group, send: Sequence[int], receive: Sequence[int]):
        self.group, self._sizes = group, (tuple(send), tuple(receive))
        self.is_local = group.size == 1
        self.pending: list[PendingAllToAll] = []

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        sizes = self._sizes[::-1] if is_backward else self._sizes
        self.pending.append(PendingAllToAll(tensors, *sizes, self.group))

    def wait(self, is_backward: bool) -> tuple[Tensor, ...]:
        return self.pending.pop().wait()

    def placeholders(self) -> tuple[Tensor, ...]:
        return self.pending[-1].outs


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange = exchange
        exchange.start(tensors, False)
        return exchange.placeholders()

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.exchange.wait(True)  # _FinishExchange.backward has sent the gradients


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *_):
        ctx.exchange = exchange
        return tuple(x.view_as(x) for x in exchange.wait(False))

    @staticmethod
    def backward(ctx, *grads):
        ctx.exchange.start(grads, True)
        return None, *grads


def start_exchange(exchange: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Start an exchange; return the inputs of finish_exchange, which must not be read before it. Differentiable.

    Computation between the two calls overlaps the exchange, and its backward overlaps that of the gradients.
    """
    return tensors if exchange.is_local else _StartExchange.apply(exchange, *tensors)


def finish_exchange(exchange: Exchange, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Wait for the tensors of start_exchange and return them."""
    return tuple(tensors) if exchange.is_local else _FinishExchange.apply(exchange, *tensors)


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward_fn, backward_fn, x, group, *args):
        ctx.backward_fn, ctx.group, ctx.args = backward_fn, group, args
        return forward_fn(x, group, *args)

    @staticmethod
    def backward(ctx, grad):
        return None, None, ctx.backward_fn(grad, ctx.group, *ctx.args), None, *(None for _ in ctx.args)


def apply_mapping(
    forward_fn: Callable[..., Tensor], backward_fn: Callable[..., Tensor], x: Tensor, group: Group, *args: Any
) -> Tensor:
    """Return `forward_fn(x, group, *args)`, with the gradient `backward_fn(grad, group, *args)`; `x` on one rank."""
    return x if group.size == 1 else _Mapping.apply(forward_fn, backward_fn, x, group, *args)


def _gather_rows(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    max_size = max(sizes)
    padded = x.contiguous()
    if x.shape[0] < max_size:
        padded = x.new_zeros(max_size, *x.shape[1:])
        padded[: x.shape[0]] = x
    out = x.new_empty(max_size * group.size, *x.shape[1:])
    if out.numel():
        all_gather_flat(out, padded, group)
    if min(sizes) == max_size:
        return out
    return torch.cat([shard[:size] for shard, size in zip(out.split(max_size), sizes)])


def _scatter_rows(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    max_size = max(sizes)
    if min(sizes) == max_size:
        padded = x.contiguous()
    else:
        padded = x.new_zeros(max_size * group.size, *x.shape[1:])
        for target, shard in zip(padded.split(max_size), x.split(list(sizes))):
            target[: shard.shape[0]] = shard
    out = x.new_empty(max_size, *x.shape[1:])
    if out.numel():
        reduce_scatter_flat(out, padded, group)
    return out[: sizes[group.rank]]


def all_gather_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """All-gather rows, with sizes that may differ between ranks. Backward: reduce-scatter.

    Shapes: [sizes[group.rank], ...] -> [sum(sizes), ...].
    """
    assert x.shape[0] == sizes[group.rank], f"all_gather_rows: {x.shape[0]} rows, expected {sizes[group.rank]}"
    return apply_mapping(_gather_rows, _scatter_rows, x, group, tuple(sizes))


def reduce_scatter_rows(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    """Reduce-scatter rows, with sizes that may differ between ranks. Backward: all-gather.

    Shapes: [sum(sizes), ...] -> [sizes[group.rank], ...].
    """
    assert x.shape[0] == sum(sizes), f"reduce_scatter_rows: {x.shape[0]} rows, expected {sum(sizes)}"
    return apply_mapping(_scatter_rows, _gather_rows, x, group, tuple(sizes))
