"""SparseMixer's weights of two chosen experts (--moe-router-sparsemixer-jitter).

Shape letters: T tokens, E experts, K top-k.
"""

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.sparsemixer import SPARSEMIXER
from moe_trainer.moe.selections.scores import SharesOfChosen, wide_dtype
from moe_trainer.moe.selections.selection import ExpertSelection, SelectionContext
from moe_trainer.moe.selections.topk import LogitSelection


class SparseMixer(SharesOfChosen):
    """Shares as SparseMixer computes them, of two chosen experts; see `sparsemixer_weights`."""

    has_kernel = False

    def __init__(self, jitter: float, factor: float | None = None):
        super().__init__(factor)
        self.jitter = jitter

    def weigh(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, routing_TE: Tensor) -> Tensor:
        return self._to_table(logits_TE, chosen_TK, sparsemixer_weights(logits_TE, chosen_TK, self.jitter))


def sparsemixer_weights(logits_TE: Tensor, chosen_TK: Tensor, jitter: float) -> Tensor:
    """Return the weights of the chosen experts, the best first, [T, 2] in fp32 or wider.

    An expert's weight is its share of a softmax over the experts that are left, the better one being taken away, and
    whose logits l are near its own logit m: (m - l) / max(|l|, m) <= 2 * jitter.

    Source: "GRIN: GRadient-INformed MoE", section 2 (arXiv 2409.12136), in the form without sampling, which
    `transformers` computes in evaluation. Sampling and its estimate of the gradient are not here: the choice of experts
    has no gradient, as with a softmax.
    """
    wide_TE = logits_TE.to(wide_dtype(logits_TE))
    weights, is_left_TE = [], torch.ones_like(logits_TE, dtype=torch.bool)
    for chosen_T1 in chosen_TK.split(1, dim=1):
        with torch.no_grad():  # in the dtype of the logits, as the library decides it
            best_T1 = logits_TE.gather(1, chosen_T1)
            distance_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
            is_near_TE = is_left_TE & ~(distance_TE > 2 * jitter)  # 0 / 0 is near
            is_left_TE = is_left_TE.scatter(1, chosen_T1, False)
        weights.append(torch.softmax(wide_TE.masked_fill(~is_near_TE, float("-inf")), dim=-1).gather(1, chosen_T1))
    return torch.cat(weights, dim=1)


class SparseMixerSelection(LogitSelection):
    """The two experts of the largest logits, with SparseMixer's weights."""

    declaration = SPARSEMIXER


def make_selection(context: SelectionContext) -> ExpertSelection:
    moe = context.moe
    assert moe.moe_router_sparsemixer_jitter is not None
    scores = SparseMixer(moe.moe_router_sparsemixer_jitter, moe.moe_router_topk_scaling_factor)
    return SparseMixerSelection(moe.moe_router_topk, scores, context.cache_fn)
