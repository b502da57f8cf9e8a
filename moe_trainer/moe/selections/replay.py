"""Experts from outside (--moe-enable-routing-replay), which training/routing_replay.py sets before a forward pass.

Shape letters: T tokens, E experts, K top-k.
"""

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.replay import REPLAY
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    FusedTopK,
    RoutingInputs,
    SelectionContext,
    to_routing_map,
)
from moe_trainer.moe.selections.topk import TopKSelection


@torch.no_grad()
def order_given_experts(given_TK: Tensor, chosen_TK: Tensor, scores_TE: Tensor) -> Tensor:
    """Return given experts, best first, as top-k returns them: sums over K then round alike.

    Args:
        given_TK: experts in any order; -1 in the rows of tokens whose experts are not given.
        chosen_TK: experts of those tokens.
        scores_TE: scores that top-k orders.
    """
    order_TK = scores_TE.gather(1, given_TK.clamp(min=0)).argsort(dim=1, descending=True, stable=True)
    return torch.where(given_TK[:, :1] < 0, chosen_TK, given_TK.gather(1, order_TK))


class ReplaySelection(ExpertSelection):
    """Top-k that takes the experts that are given instead.

    Args:
        plain: chooses for tokens whose experts are not given, and weighs.
        name: of the router.
        free: `plain` or its kernel, for passes without given experts.
    """

    declaration = REPLAY

    def __init__(self, plain: TopKSelection, name: str, free: ExpertSelection):
        self.plain, self.name, self.free = plain, name, free

    @classmethod
    def build(cls, context: SelectionContext) -> "ReplaySelection":
        plain = TopKSelection.build(context)
        return cls(plain, context.name, plain)

    def with_kernel(self, kernel: FusedTopK | None) -> ExpertSelection:
        return ReplaySelection(self.plain, self.name, self.plain.with_kernel(kernel))

    def preselect(self, logits_TE: Tensor) -> Choice | None:
        return self.free.preselect(logits_TE)

    def route(self, logits_TE: Tensor, choice: Choice | None, inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
        plain = self.plain
        given_TK = plain.cache_fn(lambda: inputs.given_TK)
        if given_TK is None:
            return self.free.route(logits_TE, choice, inputs)
        if len(given_TK) != len(logits_TE):
            raise ValueError(
                f"{self.name}: experts of {len(given_TK)} tokens are given, and {len(logits_TE)} tokens are routed"
            )
        scores_TE = plain.scores.score(logits_TE)
        keys_TE = plain.keys(logits_TE, scores_TE, inputs.expert_bias_E)
        own_TK = plain.choose_by(keys_TE) if choice is None else choice.chosen_TK
        chosen_TK = plain.cache_fn(lambda: order_given_experts(given_TK, own_TK, keys_TE))
        routing_TE = to_routing_map(chosen_TK, logits_TE)
        return plain.scores.weigh(logits_TE, scores_TE, chosen_TK, routing_TE), routing_TE

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        return self.plain.margin(logits_TE, expert_bias_E)


def make_selection(context: SelectionContext) -> ExpertSelection:
    return ReplaySelection.build(context)
