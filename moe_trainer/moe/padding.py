"""Rows of experts in multiples that quantised products take: by routing (--moe-router-padding-for-quantization), or by rows of zeros."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trainer.memory.host_read import integer_tensor


@torch.no_grad()
def pad_routing(routing_TE: Tensor, multiple: int) -> Tensor:
    """Send further tokens to every expert until it gets a multiple of tokens of this rank, or all of them: the first ones that it
    does not have yet. Their probability stays zero, so they add nothing to a result or to a gradient.

    They do take part in maxima of quantised blocks that lie along the rows, as in Megatron-Core.
    """
    missing_E = -routing_TE.sum(0) % multiple
    free_TE = ~routing_TE
    return routing_TE | (free_TE & (free_TE.cumsum(0) <= missing_E))


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R: Tensor, place_R: Tensor, rows: int) -> Tensor:
        ctx.place_R = place_R
        return x_R.new_zeros(rows, *x_R.shape[1:]).index_copy_(0, place_R, x_R)

    @staticmethod
    def backward(ctx, grad_P: Tensor):
        return grad_P.index_select(0, ctx.place_R), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_P: Tensor, place_R: Tensor) -> Tensor:
        ctx.place_R, ctx.rows = place_R, y_P.shape[0]
        return y_P.index_select(0, place_R)

    @staticmethod
    def backward(ctx, grad_R: Tensor):
        return grad_R.new_zeros(ctx.rows, *grad_R.shape[1:]).index_copy_(0, ctx.place_R, grad_R), None


class RowPadding:
    """Rows sorted by expert, each expert's filled up with zeros to a multiple, and back. Both are differentiable.

    counts: with padding, host integers; experts without rows stay without.
    """

    def __init__(self, counts: Sequence[int], multiple: int, device: torch.device):
        self.counts = [-(-count // multiple) * multiple for count in counts]
        self._place_R = None
        if self.counts != list(counts):
            ends = [*itertools.accumulate(padded - own for own, padded in zip(counts, self.counts))]
            own_e, shift_e = integer_tensor([*counts, 0, *ends[:-1]], device).view(2, -1)
            rows = sum(counts)
            self._place_R = torch.arange(rows, device=device) + shift_e.repeat_interleave(own_e, output_size=rows)

    def pad(self, x_R: Tensor) -> Tensor:
        """Shapes: x_R [R, ...] -> [P, ...]; itself where nothing is missing."""
        return x_R if self._place_R is None else _Pad.apply(x_R, self._place_R, sum(self.counts))

    def unpad(self, y_P: Tensor) -> Tensor:
        """Shapes: y_P [P, ...] -> [R, ...]."""
        return y_P if self._place_R is None else _Unpad.apply(y_P, self._place_R)
