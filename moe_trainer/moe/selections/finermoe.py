"""FineRMoE: every expert computes one slice of the output.

The experts form a grid [slices, candidates, group_size] (ExpertGrid), the last dimension fastest. For every slice the
router selects the candidate group with the largest sum of logits and in it the experts with the largest logits; the
weights are one softmax over all selected experts. A token's output is the concatenation of its slices, each the
weighted sum of its experts' results.

Results have the width of a slice until they are combined. `SlicedPermutation` sums them by treating slice i of token t
as token t * slices + i.

Source: FineRMoE, arXiv 2603.13364.
Shape letters: T tokens, E experts, K selected experts per token, R routed tokens, W width of a slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from arguments.mechanisms.selection_kinds.finermoe import FINERMOE, ExpertGrid, expert_grid
from arguments.moe import MoEArgs
from moe_trainer.moe.selections.scores import wide_dtype
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    FusedTopK,
    SelectionContext,
    to_routing_map,
)
from moe_trainer.moe.selections.topk import TopKSelection
from moe_trainer.ops.permute import Permutation, PermuteMap


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


class SliceSelection(TopKSelection):
    """The best group of every slice, and its best experts; balancing losses count its choice."""

    declaration = FINERMOE

    has_own_counts = True

    def __init__(self, context: SelectionContext):
        moe = context.moe
        super().__init__(moe.moe_router_topk, context.make_scores(moe.moe_router_pre_softmax), context.cache_fn)
        self.grid = expert_grid(moe)

    @classmethod
    def build(cls, context: SelectionContext) -> Self:
        return cls(context)

    def keys(self, logits_TE: Tensor, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        if bias_E is None or self.scores.function != "softmax":
            return super().keys(logits_TE, scores_TE, bias_E)
        return logits_TE.to(wide_dtype(logits_TE)) + bias_E  # a bias of logits, not of shares

    def use_kernel(self, kernel: FusedTopK | None) -> None:
        """Ignore the kernel: none chooses in slices."""

    def select(self, keys_TE: Tensor) -> Tensor:
        return choose_slices(keys_TE, self.grid, self.topk)

    def counted(self, logits_TE: Tensor, choice: Choice | None) -> Tensor | None:
        return to_routing_map(choose_slices(logits_TE, self.grid, self.topk), logits_TE)

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        return None  # sums over groups decide, too


def make_selection(context: SelectionContext) -> ExpertSelection:
    return SliceSelection.build(context)


@dataclass(frozen=True)
class SlicedRoutes:
    """Maps of routed tokens to tokens and to slices of tokens."""

    tokens: PermuteMap
    slices: PermuteMap

    @property
    def counts_E(self) -> Tensor:  # noqa: N802 - as PermuteMap.counts_E
        return self.tokens.counts_E


class SlicedPermutation(Permutation):
    """Sorts tokens by expert and combines slices.

    Args:
        slices: slices of a token.
        experts_per_slice: experts that compute the same slice.
        first: the expert of the first column of a routing map.
        inner: permutation of full tokens; its maps must be PermuteMaps.
    """

    takes_order = False  # slices are identified by column

    def __init__(self, slices: int, experts_per_slice: int, first: int = 0, inner: Permutation | None = None):
        self.slices, self.experts_per_slice, self.first = slices, experts_per_slice, first
        self.inner = inner or Permutation()

    def permute(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, num_rows: int | None = None
    ) -> tuple[Tensor, Tensor, SlicedRoutes]:
        """Sort tokens by expert; columns must be in the order of the experts."""
        x_RH, probs_R, routes = self.inner.permute(x_TH, probs_TE, routing_TE, num_rows=num_rows)
        slice_R = (routes.cell_R % routing_TE.shape[1] + self.first) // self.experts_per_slice
        target_R = routes.token_R * self.slices + slice_R
        # token order is also slice order; rows that nothing takes come after the last token, or before the first
        num_targets = routes.num_tokens * self.slices
        position_R = torch.arange(target_R.shape[0], device=target_R.device)
        target_by_token_R = target_R[routes.row_R].masked_fill_(position_R >= routes.offsets_T[-1], num_targets)
        targets = torch.arange(num_targets + 1, dtype=target_R.dtype, device=target_R.device)
        offsets = torch.searchsorted(target_by_token_R, targets)
        slice_routes = replace(routes, token_R=target_R, offsets_T=offsets, num_tokens=num_targets)
        return x_RH, probs_R, SlicedRoutes(routes, slice_routes)

    def unpermute(self, y_RW: Tensor, routes: SlicedRoutes) -> Tensor:
        """Sum the results of each slice to [T, slices * W]; slices without results are zero."""
        return self.inner.unpermute(y_RW, routes.slices).view(routes.tokens.num_tokens, -1)

    def widen(self, y_RW: Tensor, counts_e: Sequence[int] | Tensor) -> Tensor:
        """Return [R, slices * W] with every result in its slice; rows beyond the counts may be anything finite."""
        ends_e = torch.as_tensor(counts_e, device=y_RW.device).cumsum(0)
        row_R = torch.arange(y_RW.shape[0], device=y_RW.device)
        expert_R = torch.searchsorted(ends_e, row_R, right=True).clamp_(max=ends_e.shape[0] - 1) + self.first
        wide_RSW = y_RW.new_zeros(y_RW.shape[0], self.slices, y_RW.shape[1])
        return wide_RSW.index_put((row_R, expert_R // self.experts_per_slice), y_RW).flatten(1)


def make_permutation(moe: MoEArgs, first: int, inner: Permutation) -> SlicedPermutation:
    """Return what sorts the tokens of a model; see SlicedPermutation."""
    slices = expert_grid(moe).slices
    return SlicedPermutation(slices, moe.expert_count // slices, first, inner)
