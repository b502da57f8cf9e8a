"""Padding of tokens per expert for quantized GEMMs: by routing (--moe-router-padding-for-quantization) or zeros."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trainer.memory.host_read import integer_tensor


def unpadded(routing_TE: Tensor) -> Tensor:
    """Return the routing as it is."""
    return routing_TE


@torch.no_grad()
def pad_routing(routing_TE: Tensor, multiple: int) -> Tensor:
    """Route further tokens of this rank, the first ones, to every expert until their number is a multiple.

    Their probability is zero. As in Megatron-Core they affect the scales of quantized blocks along the token dimension.
    """
    missing_E = -routing_TE.sum(0) % multiple
    free_TE = ~routing_TE
    return routing_TE | (free_TE & (free_TE.cumsum(0) <= missing_E))


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R: Tensor, index_R: Tensor, num_padded: int) -> Tensor:
        ctx.index_R = index_R
        return x_R.new_zeros(num_padded, *x_R.shape[1:]).index_copy_(0, index_R, x_R)

    @staticmethod
    def backward(ctx, grad_P: Tensor):
        return grad_P.index_select(0, ctx.index_R), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_P: Tensor, index_R: Tensor) -> Tensor:
        ctx.index_R, ctx.num_padded = index_R, y_P.shape[0]
        return y_P.index_select(0, index_R)

    @staticmethod
    def backward(ctx, grad_R: Tensor):
        return grad_R.new_zeros(ctx.num_padded, *grad_R.shape[1:]).index_copy_(0, ctx.index_R, grad_R), None


class TokenPadding:
    """Zero padding of tokens sorted by expert to a multiple per expert, and its inverse. Differentiable.

    Attributes:
        counts: tokens per expert with padding, on the host; 0 stays 0.
    """

    def __init__(self, counts: Sequence[int], multiple: int, device: torch.device):
        self.counts = [-(-count // multiple) * multiple for count in counts]
        self._index_R = None
        if self.counts != list(counts):
            ends = [*itertools.accumulate(padded - count for count, padded in zip(counts, self.counts))]
            counts_e, shift_e = integer_tensor([*counts, 0, *ends[:-1]], device).view(2, -1)
            total = sum(counts)
            self._index_R = torch.arange(total, device=device) + shift_e.repeat_interleave(counts_e, output_size=total)

    def pad(self, x_R: Tensor) -> Tensor:
        """Pad [R, ...] to [P, ...]."""
        return x_R if self._index_R is None else _Pad.apply(x_R, self._index_R, sum(self.counts))

    def unpad(self, y_P: Tensor) -> Tensor:
        """Select [R, ...] from [P, ...]."""
        return y_P if self._index_R is None else _Unpad.apply(y_P, self._index_R)
