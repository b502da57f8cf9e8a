"""Tokens in MXFP8 on their way to the experts, and gradients on theirs (--moe-dispatch-fwd-dtype, --moe-combine-bwd-dtype).

What is rounded is defined without ranks: every row that is dispatched, and every row of the gradient that combine passes back to the
experts, also of those that stay where they are. A row is rounded by itself (ops/mx_rows.py), so the numbers are those of one process,
which has nothing to send and rounds all the same (`Rounded`). Gradients of rounding are those of doing nothing. The ways back, results of
experts and gradients of tokens, are sums over a token's experts to be: they travel in high precision.

An exchange is that of collectives.start_all_to_all: two nodes, between which rows are under way. What stands in between for rows that
travel as bytes has their shape and one element; nobody may read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_trainer.ops.mx_rows import pack, rounded, unpack
from moe_trainer.parallel.collectives import (
    InFlight,
    all_gather_rows,
    finish_all_to_all,
    reduce_scatter_rows,
    start_all_to_all,
)
from moe_trainer.parallel.state import Group


@dataclass(frozen=True)
class EightBits:
    """Which rows are rounded: those that are dispatched, gradients that come back to the experts."""

    dispatch: bool = False
    gradients: bool = False

    def dispatched(self, x: Tensor) -> Tensor:
        """Rows of tokens as experts see them, where nothing travels."""
        return Rounded.apply(x, True, False) if self.dispatch else x

    def combined(self, y: Tensor) -> Tensor:
        """Results of experts, whose gradient is rounded, where nothing travels."""
        return Rounded.apply(y, False, True) if self.gradients else y


class Rounded(torch.autograd.Function):
    """Rows rounded in forward, or in backward; otherwise themselves."""

    @staticmethod
    def forward(ctx, x_RH: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward_too = backward
        return rounded(x_RH) if forward else x_RH.view_as(x_RH)

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        return rounded(grad_RH) if ctx.backward_too else grad_RH, None, None


class BytesJourney:
    """One exchange over a group: rows by member, and which way rows travel as bytes. The first tensor is rounded; others go as they are."""

    def __init__(self, group: Group, send: Sequence[int], receive: Sequence[int], *, forward: bool, backward: bool):
        self.group, self.sizes, self.as_bytes = group, (tuple(send), tuple(receive)), (forward, backward)
        self.shape = 0, torch.float32
        self.flight: InFlight | None = None

    def leave(self, tensors: Sequence[Tensor], back: bool) -> None:
        """Send the tensors off."""
        x_RH, *others = tensors
        self.shape = x_RH.shape[1], x_RH.dtype
        sizes = self.sizes[::-1] if back else self.sizes
        self.flight = InFlight((pack(x_RH) if self.as_bytes[back] else x_RH, *others), *sizes, self.group)

    def arrive(self, back: bool) -> tuple[Tensor, ...]:
        """Wait for them."""
        (x_RH, *others), self.flight = self.flight.wait(), None
        return unpack(x_RH, *self.shape) if self.as_bytes[back] else x_RH, *others

    def stand_in(self) -> tuple[Tensor, ...]:
        """What stands for tensors that are on their way there."""
        x_RH, *others = self.flight.outs
        if self.as_bytes[False]:
            x_RH = torch.zeros(1, dtype=self.shape[1], device=x_RH.device).expand(x_RH.shape[0], self.shape[0])
        return x_RH, *others


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, journey, *tensors):
        ctx.journey = journey
        journey.leave(tensors, False)
        return journey.stand_in()

    @staticmethod
    def backward(ctx, *_):
        return None, *ctx.journey.arrive(True)  # _Finish has sent the gradients


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, journey, *_):
        ctx.journey = journey
        return tuple(x.view_as(x) for x in journey.arrive(False))

    @staticmethod
    def backward(ctx, *grads):
        ctx.journey.leave(grads, True)
        return None, *grads


def start_rows(group: Group, send: Sequence[int], receive: Sequence[int], *tensors: Tensor, forward: bool = False,
               backward: bool = False) -> tuple[Any, tuple[Tensor, ...]]:
    """As collectives.start_all_to_all, with the rows of the first tensor [R, H] rounded on their way there, or their gradients on the way
    back; in a group of one, too. Give all that is returned to `finish_rows`, and let nobody read it. Differentiable."""
    if not (forward or backward):
        return start_all_to_all(group, send, receive, *tensors)
    if group.size == 1:
        return None, (Rounded.apply(tensors[0], forward, backward), *tensors[1:])
    journey = BytesJourney(group, send, receive, forward=forward, backward=backward)
    return journey, _Start.apply(journey, *tensors)


def finish_rows(journey: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As collectives.finish_all_to_all."""
    if journey is None:
        return tuple(tensors)
    return _Finish.apply(journey, *tensors) if isinstance(journey, BytesJourney) else finish_all_to_all(journey, tensors)


class _GatherBytes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RH, sizes, group):
        ctx.plan = sizes, group
        return unpack(all_gather_rows(pack(x_RH), sizes, group), x_RH.shape[1], x_RH.dtype)

    @staticmethod
    def backward(ctx, grad_RH):
        return reduce_scatter_rows(grad_RH, *ctx.plan), None, None


class _ScatterForBytes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, sizes, group):
        ctx.plan = sizes, group
        return reduce_scatter_rows(y_RH, sizes, group)

    @staticmethod
    def backward(ctx, grad_RH):
        return unpack(all_gather_rows(pack(grad_RH), *ctx.plan), grad_RH.shape[1], grad_RH.dtype), None, None


def gather_rows(x_RH: Tensor, sizes: Sequence[int], group: Group, as_bytes: bool) -> Tensor:
    """As collectives.all_gather_rows, of rows that are rounded already if they are to travel as bytes. Differentiable."""
    return _GatherBytes.apply(x_RH, sizes, group) if as_bytes and group.size > 1 else all_gather_rows(x_RH, sizes, group)


def scatter_rows(y_RH: Tensor, sizes: Sequence[int], group: Group, as_bytes: bool) -> Tensor:
    """As collectives.reduce_scatter_rows; as_bytes: the gradients that are gathered in backward, which are rounded already."""
    return _ScatterForBytes.apply(y_RH, sizes, group) if as_bytes and group.size > 1 else reduce_scatter_rows(y_RH, sizes, group)
