"""The top-k of scores or of logits, of the best groups of experts, with or without a bias. Ties are torch.topk's.

Shape letters: T tokens, E experts, K top-k.
"""

from functools import partial

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.topk import TOPK
from moe_trainer.moe.dispatch.base import CacheFn, no_cache
from moe_trainer.moe.selections.fused import FusedSelection
from moe_trainer.moe.selections.groups import ExpertGroups, make_groups
from moe_trainer.moe.selections.margin import compute_routing_margin
from moe_trainer.moe.selections.scores import Scores, make_scores
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    FusedTopK,
    RoutingInputs,
    ScoredSelection,
    SelectionContext,
    to_routing_map,
)


class TopKSelection(ScoredSelection):
    """The experts of the best scores; an expert bias takes part in the choice only."""

    declaration = TOPK

    def __init__(self, topk: int, scores: Scores, cache_fn: CacheFn = no_cache, groups: ExpertGroups | None = None):
        super().__init__(topk, scores, cache_fn)
        self.groups = groups

    @classmethod
    def build(cls, context: SelectionContext) -> "TopKSelection":
        moe, topk = context.moe, context.moe.moe_router_topk
        scores = context.make_scores(moe.moe_router_pre_softmax)
        groups = make_groups(
            topk, moe.moe_router_num_groups, moe.moe_router_group_topk, moe.moe_router_group_score_topk
        )
        by_logits = scores.function == "softmax" and groups is None and not moe.moe_router_enable_expert_bias
        return (LogitSelection if by_logits else TopKSelection)(topk, scores, context.cache_fn, groups)

    def keys(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return what orders the experts."""
        return scores_TE if bias_E is None else self.scores.add_bias(logits_TE, scores_TE, bias_E)

    @torch.no_grad()
    def select(self, keys_TE: Tensor) -> Tensor:
        """Return chosen_TK, the best first."""
        if self.groups is not None:
            keys_TE = self.groups.mask_to_best(keys_TE)[1]
        return keys_TE.topk(self.topk, dim=-1)[1]

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        return self.choose_by(self.keys(logits_TE, scores_TE, inputs.expert_bias_E))

    def choose_by(self, keys_TE: Tensor) -> Tensor:
        """Return chosen_TK by `keys`; the second pass of a recomputed region returns that of the first."""
        return self.cache_fn(lambda: self.select(keys_TE))

    def with_kernel(self, kernel: FusedTopK | None) -> ExpertSelection:
        if kernel is None or not self.scores.has_kernel:
            return self
        scores, groups = self.scores, self.groups
        options = {
            "topk": self.topk,
            "use_pre_softmax": scores.pre_softmax,
            "num_groups": None if groups is None else groups.number,
            "group_topk": None if groups is None else groups.topk,
            "scaling_factor": scores.factor,
            "score_function": scores.function,
        }
        return FusedSelection(self, partial(kernel, **options), self.cache_fn)

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        return compute_routing_margin(logits_TE, self.topk, self.scores.function, self.groups, expert_bias_E)


class LogitSelection(TopKSelection):
    """The experts of the largest logits, which the balancing losses of a softmax count, too."""

    def preselect(self, logits_TE: Tensor) -> Choice | None:
        chosen_TK = self.choose_by(logits_TE)
        return Choice(chosen_TK, to_routing_map(chosen_TK, logits_TE))


def score_topk(
    logits_TE: Tensor,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select top-k experts per token and weigh them: what fused kernels compute, in plain torch.

    Args:
        logits_TE: router logits.
        topk: experts per token.
        score_function: softmax, sigmoid or sqrtsoftplus.
        pre_softmax: softmax over all experts before selection.
        num_groups: number of expert groups.
        group_topk: groups per token.
        group_score_topk: experts whose scores sum to that of their group; None: topk // group_topk.
        scaling_factor: factor of the weights.
        expert_bias_E: bias of the selection; weights come from unbiased scores.

    Returns:
        probs_TE in the dtype of the logits, zero if not selected; routing_TE bool.
    """
    groups = make_groups(topk, num_groups, group_topk, group_score_topk)
    selection = TopKSelection(topk, make_scores(score_function, pre_softmax, scaling_factor), groups=groups)
    return selection.route(logits_TE, None, RoutingInputs(expert_bias_E=expert_bias_E))


def make_selection(context: SelectionContext) -> ExpertSelection:
    return TopKSelection.build(context)
