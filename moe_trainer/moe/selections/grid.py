"""FineRMoE's choice: in every slice of the grid of experts the best group, and in it the best experts.

The layer's other parts are in moe/finermoe.py.
Shape letters: T tokens, E experts, K selected experts per token.
"""

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.grid import GRID
from arguments.moe import ExpertGrid
from moe_trainer.moe.selections.scores import wide_dtype
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    FusedTopK,
    SelectionContext,
    to_routing_map,
)
from moe_trainer.moe.selections.topk import TopKSelection


@torch.no_grad()
def choose_slices(logits_TE: Tensor, grid: ExpertGrid, topk: int) -> Tensor:
    """Return indices_TK (int64) of topk / slices experts per slice, ordered by slice."""
    wide_TE = logits_TE.to(wide_dtype(logits_TE))
    groups = wide_TE.view(-1, grid.slices, grid.candidates, grid.group_size)
    winner = groups.sum(-1).argmax(-1)[..., None, None]
    members = (
        groups.gather(2, winner.expand(-1, -1, 1, grid.group_size)).squeeze(2).topk(topk // grid.slices, dim=-1)[1]
    )
    slices = torch.arange(grid.slices, device=logits_TE.device)[:, None]
    return ((slices * grid.candidates + winner.squeeze(-1)) * grid.group_size + members).flatten(1)


class GridSelection(TopKSelection):
    """Slices of a grid; balancing losses count its choice."""

    declaration = GRID

    has_own_counts = True

    def __init__(self, context: SelectionContext):
        moe = context.moe
        assert moe.finermoe is not None
        super().__init__(moe.moe_router_topk, context.make_scores(moe.moe_router_pre_softmax), context.cache_fn)
        self.grid = moe.finermoe

    @classmethod
    def build(cls, context: SelectionContext) -> "GridSelection":
        return cls(context)

    def keys(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        if bias_E is None or self.scores.function != "softmax":
            return super().keys(logits_TE, scores_TE, bias_E)
        return logits_TE.to(wide_dtype(logits_TE)) + bias_E  # a bias of logits, not of shares

    def with_kernel(self, kernel: FusedTopK | None) -> ExpertSelection:
        return self  # no kernel chooses in slices

    def select(self, keys_TE: Tensor) -> Tensor:
        return choose_slices(keys_TE, self.grid, self.topk)

    def counted(self, logits_TE: Tensor, choice: Choice | None) -> Tensor | None:
        return to_routing_map(choose_slices(logits_TE, self.grid, self.topk), logits_TE)

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        return None  # sums over groups decide, too


def make_selection(context: SelectionContext) -> ExpertSelection:
    return GridSelection.build(context)
