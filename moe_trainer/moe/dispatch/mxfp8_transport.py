"""Tokens and gradients sent in MXFP8 (--moe-dispatch-fwd-dtype, --moe-combine-bwd-dtype).

Rounding is defined without ranks: every dispatched token is rounded, and every gradient that combine sends to the
experts, also those that stay on their rank. Each token is rounded by itself (quantization/mxfp8_rowwise.py), so the
numbers equal those of one process, which rounds without sending. The gradient of rounding is the identity. The
opposite directions (results of experts, gradients of tokens) are terms of a sum over a token's experts and are sent
in high precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import (
    AllToAllExchange,
    all_gather_rows,
    apply_mapping,
    reduce_scatter_rows,
    start_exchange,
)
from moe_trainer.parallel.state import Group
from moe_trainer.quantization.mxfp8_rowwise import TORCH_ROW_CASTS, RowCasts

Payload = Tensor | tuple[Tensor, Tensor]
"""What a library sends: tokens, or the tables of mxfp8_rowwise.RowCasts.split."""


@dataclass(frozen=True)
class Mxfp8Transport:
    """Which tensors are rounded, and how: dispatched tokens, gradients that combine sends to the experts."""

    dispatch: bool = False
    gradients: bool = False
    casts: RowCasts = TORCH_ROW_CASTS

    def round_tokens(self, x: Tensor) -> Tensor:
        """Round dispatched tokens where nothing is sent."""
        return RoundToMxfp8.apply(x, self.casts, True, False) if self.dispatch else x

    def round_gradients(self, y: Tensor) -> Tensor:
        """Return the experts' results; round their gradients where nothing is sent."""
        return RoundToMxfp8.apply(y, self.casts, False, True) if self.gradients else y

    def to_payload(self, x_RH: Tensor, is_rounded: bool) -> Payload:
        """Return what a library sends for tokens."""
        return self.casts.split(x_RH) if is_rounded else x_RH

    def from_payload(self, payload: Payload, dtype: torch.dtype) -> Tensor:
        """Return the tokens of what a library has received."""
        return payload if isinstance(payload, Tensor) else self.casts.join(*payload, dtype)


HIGH_PRECISION = Mxfp8Transport()


def placeholder(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the tokens' shape while they are in flight; without data if they are rounded."""
    if isinstance(payload, Tensor):
        return payload
    return torch.zeros(1, dtype=dtype, device=payload[0].device).expand(payload[0].shape)


class RoundToMxfp8(torch.autograd.Function):
    """Round tokens in forward, in backward, or both."""

    @staticmethod
    def forward(ctx, x_RH: Tensor, casts: RowCasts, in_forward: bool, in_backward: bool) -> Tensor:
        ctx.casts, ctx.in_backward = casts, in_backward
        return casts.round(x_RH) if in_forward else x_RH.view_as(x_RH)

    @staticmethod
    def backward(ctx, grad_RH: Tensor):
        return ctx.casts.round(grad_RH) if ctx.in_backward else grad_RH, None, None, None


class PackedExchange(AllToAllExchange):
    """An all-to-all whose first tensor is packed to MXFP8 in forward, in backward, or both."""

    def __init__(
        self,
        group: Group,
        send: Sequence[int],
        receive: Sequence[int],
        casts: RowCasts,
        *,
        forward: bool,
        backward: bool,
    ):
        super().__init__(group, send, receive)
        self._casts, self._is_packed = casts, (forward, backward)
        self._width, self._dtype = 0, torch.float32  # of the first tensor

    def start(self, tensors: Sequence[Tensor], is_backward: bool) -> None:
        """Start to send the tensors."""
        x_RH, *others = tensors
        self._width, self._dtype = x_RH.shape[1], x_RH.dtype
        super().start((self._casts.pack(x_RH) if self._is_packed[is_backward] else x_RH, *others), is_backward)

    def wait(self, is_backward: bool) -> tuple[Tensor, ...]:
        """Wait for the received tensors."""
        x_RH, *others = super().wait(is_backward)
        if self._is_packed[is_backward]:
            x_RH = self._casts.unpack(x_RH, self._width, self._dtype)
        return x_RH, *others

    def placeholders(self) -> tuple[Tensor, ...]:
        """Return tensors of the received shapes; the packed one without data."""
        x_RH, *others = super().placeholders()
        if self._is_packed[False]:
            x_RH = torch.zeros(1, dtype=self._dtype, device=x_RH.device).expand(x_RH.shape[0], self._width)
        return x_RH, *others


def start_token_exchange(
    group: Group,
    send: Sequence[int],
    receive: Sequence[int],
    *tensors: Tensor,
    casts: RowCasts = TORCH_ROW_CASTS,
    round_forward: bool = False,
    round_backward: bool = False,
) -> tuple[AllToAllExchange, tuple[Tensor, ...]]:
    """Start an all-to-all of tokens [R, H], in MXFP8 where they are rounded, and of further tensors. Differentiable.

    A group of one rounds without sending.

    Args:
        group: ranks that exchange tokens.
        send: tokens to each rank.
        receive: tokens from each rank.
        *tensors: the tensors to send.
        casts: how rows are rounded.
        round_forward: round the first tensor.
        round_backward: round its gradient.

    Returns:
        The inputs of collectives.finish_exchange. The tensors must not be read before it.
    """
    exchange = AllToAllExchange(group, send, receive)
    if round_forward or round_backward:
        exchange = PackedExchange(group, send, receive, casts, forward=round_forward, backward=round_backward)
        if group.size == 1:
            tensors = RoundToMxfp8.apply(tensors[0], casts, round_forward, round_backward), *tensors[1:]
    return exchange, start_exchange(exchange, *tensors)


def _gather_packed(x_RH: Tensor, group: Group, sizes: Sequence[int], casts: RowCasts) -> Tensor:
    return casts.unpack(all_gather_rows(casts.pack(x_RH), sizes, group), x_RH.shape[1], x_RH.dtype)


def _reduce_scatter(x_RH: Tensor, group: Group, sizes: Sequence[int], casts: RowCasts) -> Tensor:
    return reduce_scatter_rows(x_RH, sizes, group)


def gather_tokens(x_RH: Tensor, sizes: Sequence[int], group: Group, mxfp8: Mxfp8Transport) -> Tensor:
    """Gather tokens as collectives.all_gather_rows, packed if they are rounded already. Differentiable."""
    if mxfp8.dispatch:
        return apply_mapping(_gather_packed, _reduce_scatter, x_RH, group, sizes, mxfp8.casts)
    return all_gather_rows(x_RH, sizes, group)


def reduce_scatter_tokens(y_RH: Tensor, sizes: Sequence[int], group: Group, mxfp8: Mxfp8Transport) -> Tensor:
    """Sum as collectives.reduce_scatter_rows; backward gathers packed gradients if they are rounded already."""
    if mxfp8.gradients:
        return apply_mapping(_reduce_scatter, _gather_packed, y_RH, group, sizes, mxfp8.casts)
    return reduce_scatter_rows(y_RH, sizes, group)
