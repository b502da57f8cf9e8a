"""Experts that compute in a buffer of a fixed size (--moe-expert-rank-capacity-factor; see budget.py)."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.paged_stash import StashGroup
from moe_trainer.moe.dispatch.base import DispatchState, TokenDispatcher
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.moe.receive.policy import ReceivePolicy


class FixedBuffer(ReceivePolicy):
    """Receives tokens into a buffer that has the size of its budget."""

    def __init__(self, budget: ReceiveBudget):
        self.budget, self.budgets = budget, (budget,)

    def set_dispatcher(self, dispatcher: TokenDispatcher, experts: Any, device: torch.device) -> str | None:
        problem = self._why_host_counts(dispatcher, experts)
        self.budget.allows_device_counts = problem is None
        if problem is None:
            self.budget.allocate_flag(device)
        return problem

    def _why_host_counts(self, dispatcher: TokenDispatcher, experts: Any) -> str | None:
        return dispatcher.fixed_buffer_problem or experts.why_host_counts()

    @property
    def has_device_counts(self) -> bool:
        return self.budget.allows_device_counts

    @property
    def counts_on_device(self) -> bool:
        return self.budget.counts_on_device

    def fixed_buffer(self, num_tokens: int, experts: Any) -> tuple[int | None, int]:
        if not self.budget.counts_on_device:
            return None, 1
        # cached, because a larger microbatch may have come when a region is recomputed
        size = experts.activations.cached_for_recompute(lambda: self.budget.fixed_size(num_tokens))
        return size, experts.pad_multiple

    def run(
        self, experts: Any, state: DispatchState, num_tokens: int, weights: Any
    ) -> tuple[Tensor, StashGroup | None]:
        x_RH, probs_R, counts_e = state.x_RH, state.probs_R, weights.counts(state.tokens_per_expert_e)
        activations = experts.activations
        if isinstance(counts_e, Tensor):
            if not activations.is_recomputing:
                self.budget.note_overflow(state.overflow)
            with self._stash_scope(experts, x_RH.shape[0], counts_e.sum(0, keepdim=True)) as group:
                return experts(x_RH, probs_R, counts_e, weights=weights), group
        num_received = x_RH.shape[0]
        needed = max(num_received, state.fixed_size if self.budget.allows_device_counts else 0)
        # cached, because the budget may have grown when a region is recomputed
        size = activations.cached_for_recompute(lambda: self.budget.size_for(num_tokens, needed))
        with self._stash_scope(experts, size, num_received) as group:
            y_CH = experts(
                pad_to_buffer(x_RH, size), pad_to_buffer(probs_R, size), counts_e, size - num_received, weights
            )
            return y_CH[:num_received], group

    def _stash_scope(
        self, experts: Any, buffer_size: int, num_used: int | Tensor
    ) -> AbstractContextManager[StashGroup | None]:
        """Return the scope in which the experts run; arguments as of ActivationPolicy.stash_scope."""
        return contextlib.nullcontext()


class StashedBuffer(FixedBuffer):
    """Stores the used tokens of its buffers in pages until backward (--moe-paged-stash; memory/paged_stash.py)."""

    def _why_host_counts(self, dispatcher: TokenDispatcher, experts: Any) -> str | None:
        return super()._why_host_counts(dispatcher, experts) or experts.activations.stash.why_host_counts()

    def _stash_scope(
        self, experts: Any, buffer_size: int, num_used: int | Tensor
    ) -> AbstractContextManager[StashGroup | None]:
        return experts.activations.stash_scope(buffer_size, num_used, self.budget.balanced_size)


class _PadToBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R: Tensor, size: int) -> Tensor:
        ctx.num_received = x_R.shape[0]
        out_C = x_R.new_empty(size, *x_R.shape[1:])
        out_C[: ctx.num_received] = x_R
        out_C[ctx.num_received :].zero_()  # GEMMs may include the padding, whose results must stay finite
        return out_C

    @staticmethod
    def backward(ctx, grad_C: Tensor):
        return grad_C[: ctx.num_received], None


def pad_to_buffer(x_R: Tensor, size: int) -> Tensor:
    """Copy received tokens to the start of a zero-padded buffer. Shapes: x_R [R, ...] -> [C, ...]."""
    return _PadToBuffer.apply(x_R, size)
