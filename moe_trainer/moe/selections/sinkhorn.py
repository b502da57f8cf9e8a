"""Sinkhorn routing (--moe-router-load-balancing-type sinkhorn): logits are normalized over tokens and experts.

Shape letters: T tokens, E experts, K top-k.
"""

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.sinkhorn import SINKHORN
from moe_trainer.moe.dispatch.base import CacheFn, no_cache
from moe_trainer.moe.selections.scores import wide_dtype
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    RoutingInputs,
    SelectionContext,
    to_routing_map,
)

ROUNDS_PER_CHECK = 8  # rounds on a device between the host's checks of convergence


def sinkhorn(
    cost_TE: Tensor, tolerance: float = 1e-4, max_rounds: int = 1000, rounds_per_check: int | None = None
) -> Tensor:
    """Scale exp(cost) so that all tokens have the same total and all experts have the same total.

    Source: Sinkhorn's iteration, stopped when the column factors change by less than `tolerance` on average. The
    tolerance is absolute, so large factors would never converge in fp32: hence `max_rounds`.

    Args:
        cost_TE: logits.
        tolerance: bound of the mean change.
        max_rounds: bound of the iteration.
        rounds_per_check: rounds between checks, for which the host waits; rounds after convergence change nothing.
            None: 1 on a CPU, ROUNDS_PER_CHECK on a device.
    """
    rounds_per_check = rounds_per_check or (ROUNDS_PER_CHECK if cost_TE.is_cuda else 1)
    cost_TE = torch.exp(cost_TE)
    rows_T = torch.ones(cost_TE.shape[0], device=cost_TE.device, dtype=cost_TE.dtype)
    cols_E = torch.ones(cost_TE.shape[1], device=cost_TE.device, dtype=cost_TE.dtype)
    eps, converged = 1e-8, None
    for iteration in range(1, max_rounds + 1):
        next_rows_T = (1.0 / rows_T.numel()) / ((cols_E * cost_TE).sum(1) + eps)
        next_cols_E = (1.0 / cols_E.numel()) / ((next_rows_T.unsqueeze(1) * cost_TE).sum(0) + eps)
        has_converged = (cols_E - next_cols_E).abs().mean() <= tolerance
        if converged is None:
            rows_T, cols_E, converged = next_rows_T, next_cols_E, has_converged
        else:
            rows_T, cols_E, converged = (
                torch.where(converged, rows_T, next_rows_T),
                torch.where(converged, cols_E, next_cols_E),
                converged | has_converged,
            )
        if iteration % rounds_per_check == 0:
            if converged.item():
                break
            converged = None
    return cols_E * cost_TE * rows_T.unsqueeze(1)


def sinkhorn_topk(logits_TE: Tensor, topk: int, balance: bool, cache_fn: CacheFn = no_cache) -> tuple[Tensor, Tensor]:
    """Select experts by Sinkhorn-normalized logits; weigh them by sigmoid (top-1) or softmax (top-k).

    Args:
        logits_TE: router logits.
        topk: experts per token.
        balance: normalize; evaluation selects by the weights themselves.
        cache_fn: wraps the selection.

    Returns:
        probs_TE and routing_TE.
    """
    wide = wide_dtype(logits_TE)
    if topk == 1:
        scores_TE = torch.sigmoid(logits_TE)
    else:
        scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide).to(logits_TE.dtype)
    with torch.no_grad():
        indices_TK = cache_fn(lambda: (sinkhorn(logits_TE.to(wide)) if balance else scores_TE).topk(topk, dim=1)[1])
        routing_TE = to_routing_map(indices_TK, logits_TE)
    return scores_TE * routing_TE, routing_TE


class SinkhornSelection(ExpertSelection):
    """Sinkhorn routing; evaluation does not balance."""

    declaration = SINKHORN

    def __init__(self, context: SelectionContext):
        self.topk, self.cache_fn = context.moe.moe_router_topk, context.cache_fn

    def route(self, logits_TE: Tensor, choice: Choice | None, inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
        return sinkhorn_topk(logits_TE, self.topk, balance=inputs.training, cache_fn=self.cache_fn)


def make_selection(context: SelectionContext) -> ExpertSelection:
    return SinkhornSelection(context)
