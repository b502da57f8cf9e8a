"""FineRMoE: experts that are narrow on both sides, each making one slice of the output.

The experts are laid out as [slices, candidates, group_size] (ExpertGrid), the last fastest. For every slice of the
output the router takes the candidate group whose logits have the largest sum, and in it the experts with the largest
logits; the weights are one softmax over all that were chosen. A token's output is its slices side by side, each the
weighted sum of its experts'.

A row that comes out of an expert is as wide as a slice. Rows stay so until they are at home: an all-to-all brings
back a slice for every pair of token and expert. `SlicedPermutation` then adds them up, by treating every slice of
every token as a token of its own: the rows of token t and slice i are those of "token" t * slices + i, and its sums,
laid out one after the other, are the whole tokens.

Source: FineRMoE, arXiv 2603.13364. Shape letters: T tokens, E experts, K chosen of a token, R rows, W width of a slice.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arguments.moe import ExpertGrid
from moe_trainer.ops.permute import Permutation, PermuteMap, unpermute


@torch.no_grad()
def choose_slices(logits_TE: Tensor, grid: ExpertGrid, topk: int) -> Tensor:
    """The experts of every token, topk / slices of them for each slice. Returns: indices_TK int64, slice after slice.

    The first of equal groups wins. Sums are taken in fp32 at least.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    groups = wide_TE.view(-1, grid.slices, grid.candidates, grid.group_size)
    winner = groups.sum(-1).argmax(-1)[..., None, None]
    members = (
        groups.gather(2, winner.expand(-1, -1, 1, grid.group_size)).squeeze(2).topk(topk // grid.slices, dim=-1)[1]
    )
    slices = torch.arange(grid.slices, device=logits_TE.device)[:, None]
    return ((slices * grid.candidates + winner.squeeze(-1)) * grid.group_size + members).flatten(1)


@dataclass(frozen=True)
class SlicedRoutes:
    """Where rows come from (`tokens`), and of which slice of which token they are a part (`slices`)."""

    tokens: PermuteMap
    slices: PermuteMap

    @property
    def counts_E(self) -> Tensor:
        """Rows of each expert."""
        return self.tokens.counts_E


class SlicedPermutation(Permutation):
    """Whole tokens into expert order; slices back, side by side.

    experts_of_slice: how many experts make the same slice. first: the expert of the first column of a routing map.
    """

    takes_order = False  # it tells slices by the columns

    def __init__(self, slices: int, experts_of_slice: int, first: int = 0):
        self.slices, self.experts_of_slice, self.first = slices, experts_of_slice, first

    def permute(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, expert_E: None = None, num_rows: int | None = None
    ) -> tuple[Tensor, Tensor, SlicedRoutes]:
        """As Permutation.permute, with columns in the order of the experts."""
        x_RH, probs_R, routes = super().permute(x_TH, probs_TE, routing_TE, num_rows=num_rows)
        slice_R = (routes.cell_R % routing_TE.shape[1] + self.first) // self.experts_of_slice
        place_R = routes.token_R * self.slices + slice_R
        # in token order rows are in the order of their slices, too
        num_places = routes.num_tokens * self.slices
        offsets = torch.searchsorted(place_R[routes.row_R], torch.arange(num_places + 1, device=place_R.device))
        return (
            x_RH,
            probs_R,
            SlicedRoutes(routes, replace(routes, token_R=place_R, offsets_T=offsets, num_tokens=num_places)),
        )

    def unpermute(self, y_RW: Tensor, routes: SlicedRoutes) -> Tensor:
        """Sum the rows of each slice. Returns: [T, slices * W]; slices without rows get zeros."""
        return unpermute(y_RW, routes.slices).view(routes.tokens.num_tokens, -1)
