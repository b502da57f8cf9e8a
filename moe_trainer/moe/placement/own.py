"""Every rank computes the tokens of its own experts. This is also the base of the other placements.

Shape letters: T local tokens, E experts, V columns of the routing that is dispatched: for every rank of ep as many as
it can compute, its own experts first; e what a rank computes. P ranks of ep, R received tokens, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from arguments.mechanisms.placement_kinds.declaration import PlacementDeclaration
from arguments.mechanisms.placement_kinds.own import OWN
from arguments.moe import MoEArgs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.moe.dispatch.base import CacheFn, KnownCounts, TokenDispatcher
from moe_trainer.parallel.state import ParallelState

Counts = Sequence[int] | Tensor
RunExperts = Callable[[Tensor, tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True, eq=False)
class OwnWeights:
    """The weights that a rank's experts compute with in one pass: its own."""

    def counts(self, tokens_per_expert_e: Counts) -> Counts:
        """Return the token counts of what has weights."""
        return tokens_per_expert_e

    def run(
        self, run_experts: RunExperts, x_RH: Tensor, tensors: tuple[Tensor, ...], activations: ActivationPolicy
    ) -> Tensor:
        """Return what the experts make of the tokens.

        Args:
            run_experts: computes with stacks of weights and biases.
            x_RH: tokens.
            tensors: stacks of the rank's own experts.
            activations: policy of the experts.
        """
        return run_experts(x_RH, tensors)


OWN_WEIGHTS = OwnWeights()


@dataclass(frozen=True)
class PlacedRouting:
    """Routing of this rank's tokens over the columns that are dispatched.

    Attributes:
        probs_TV, routing_TV: probabilities and routing.
        known: what the host knows of the counts.
        expert_V: the expert of each column, None if they are the experts in order.
        plan: what `ExpertPlacement.weights` needs.
    """

    probs_TV: Tensor
    routing_TV: Tensor
    known: KnownCounts | None
    expert_V: Tensor | None = None
    plan: Any = None


class ExpertPlacement:
    """Which ranks compute an expert's tokens.

    Attributes:
        moved_tokens_2P: routed tokens of all ranks of tp_ep that another rank than the expert's has computed since the
            last read, by the rank of ep that computed them and by the one whose expert it is; int64 on the device. None
            if there are no such tokens.
    """

    declaration: ClassVar[PlacementDeclaration] = OWN
    moved_tokens_2P: Tensor | None = None

    def set_dispatcher(self, dispatcher: TokenDispatcher, device: torch.device) -> None:
        """Prepare for a dispatcher."""
        return

    def place(
        self,
        probs_TE: Tensor,
        routing_TE: Tensor,
        known: KnownCounts | None,
        *,
        counts_on_device: bool,
        is_training: bool,
        cache_fn: CacheFn,
    ) -> PlacedRouting:
        """Choose the ranks that compute this rank's tokens.

        Args:
            probs_TE: routing probabilities.
            routing_TE: routing map.
            known: what is known of the counts before routing.
            counts_on_device: the host must not read counts.
            is_training: moved tokens are counted.
            cache_fn: wraps decisions.
        """
        return PlacedRouting(probs_TE, routing_TE, known)

    def weights(self, plan: Any, is_saving: bool) -> OwnWeights:
        """Return the weights of one pass.

        Args:
            plan: PlacedRouting.plan.
            is_saving: what the experts save stays until backward.
        """
        return OWN_WEIGHTS


def make_placement(_moe: MoEArgs, _ps: ParallelState) -> ExpertPlacement:
    """Build it for a layer."""
    return ExpertPlacement()
