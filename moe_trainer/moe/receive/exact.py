"""Experts that compute in buffers as long as what they receive."""

from typing import Any

from torch import Tensor

from moe_trainer.memory.paged_stash import StashGroup
from moe_trainer.moe.dispatch.base import DispatchState
from moe_trainer.moe.receive.policy import ReceivePolicy


class ExactBuffer(ReceivePolicy):
    """Receives tokens into a buffer as long as they are."""

    def run(
        self, experts: Any, state: DispatchState, num_tokens: int, weights: Any
    ) -> tuple[Tensor, StashGroup | None]:
        counts_e = weights.counts(state.tokens_per_expert_e)
        return experts(state.x_RH, state.probs_R, counts_e, weights=weights), None
