"""What the MoE layers of a model count in an iteration, and update at its end."""

from collections.abc import Sequence
from typing import Any

import torch

from arguments import Arguments
from moe_trainer.moe.balancing import collect_moe_metrics, reset_iteration, start_iteration, update_biases
from moe_trainer.moe.dispatch.select import close_dispatchers
from moe_trainer.moe.expert_loads import collect_expert_loads
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import Participant, StepMetrics


class ExpertBalance(Participant):
    """Balancing losses, expert biases and loads of the experts."""

    def __init__(self, chunks: Sequence[Any], args: Arguments, ps: ParallelState, device: torch.device):
        self._chunks, self._moe, self._ps, self._device = chunks, args.moe, ps, device
        self._num_layers = args.model.num_layers + (args.model.mtp_num_layers or 0)
        self._is_frozen = args.model.dsa_indexer_warmup or args.model.lora_dim is not None

    def begin_step(self, iteration: int) -> None:
        start_iteration(self._chunks)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        chunks, moe, ps, device = self._chunks, self._moe, self._ps, self._device
        details: dict[str, Any] = {}
        update_biases(chunks, ps, frozen=self._is_frozen)
        if moe.num_experts and moe.moe_per_layer_logging:
            details["loads"], details["between_ranks"] = collect_expert_loads(
                chunks, ps, moe.num_experts, self._num_layers, device
            )
        balance = collect_moe_metrics(chunks, ps, num_microbatches, moe, self._num_layers, device)
        details["dropped_tokens"], details["per_layer"] = balance.dropped_tokens, balance.per_layer
        return StepMetrics(balance.losses, details)

    def discard(self) -> None:
        reset_iteration(self._chunks)

    def close(self) -> None:
        close_dispatchers(self._chunks)
