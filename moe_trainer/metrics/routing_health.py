"""Routing statistics of each MoE layer, computed from a table of loads, under the names of metrics.jsonl.

    layers              the MoE layers, counted from 0, then multi-token-prediction layers. All lists have this order
    tokens_per_expert   per layer, tokens that chose each expert in this iteration (global batch), before drops
    load_max_over_mean  of the fullest expert; 1 is balanced, num_experts / topk is the worst
    load_entropy        entropy of the loads over its maximum log(num_experts); 1 is balanced
    dead_experts        experts that no token chose
    drop_rate           fraction of the chosen (token, expert) pairs that were dropped
    MOVED_RATES         fraction of those pairs that another rank than the expert's computed
    bias_drift          largest distance of an expert bias from the mean bias, after the update; 0 without expert bias
    rank_max_over_mean  of the fullest expert-parallel rank, of all tokens that it computes; 1 without expert
                        parallelism
    UNMOVED_MAXIMA      the same if every rank computed the tokens of its own experts
    straggler_cost      one number: relative increase of the iteration's compute time because every layer waits for its
                        fullest rank, the sum over layers of
                        (rank_max_over_mean - 1) * fraction of the layer's routed experts in the model's FLOPs
    between_ranks       only with expert parallelism: {"ranks_per_row": ..., "tokens": [[...], ...]}. A row has the
                        tokens that so many expert-parallel ranks sent to each rank, or to as many neighbors; sums over
                        layers, microbatches and expert-parallel groups, after drops, with padding

MOVED_RATES and UNMOVED_MAXIMA are the names that placements of experts give (arguments/mechanisms/placements.py).
straggler_cost is estimated from sums over the iteration. Single microbatches are less even than their sum, so it is a
lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from arguments.mechanisms.placements import MOVED_RATES, UNMOVED_MAXIMA

MEAN, COLD, HOT = (247, 247, 247), (33, 102, 172), (178, 24, 43)  # as in page/dashboard.js
PER_LAYER = (
    "load_max_over_mean",
    "load_entropy",
    "dead_experts",
    "drop_rate",
    *MOVED_RATES,
    "bias_drift",
    "rank_max_over_mean",
    *UNMOVED_MAXIMA,
)


def routing_health(
    table: Tensor, expert_ranks: int, layer_share: float, between_ranks: Tensor | None = None
) -> dict[str, object]:
    """Return the routing statistics of the tables of moe/expert_loads.py.

    `layer_share` is the fraction of one layer's routed experts in the model's FLOPs. Shapes: table fp64 [layers,
    experts + 4 + expert_ranks]; the columns behind the experts are drops, tokens that another rank computed, bias
    drift, 1 for an MoE layer, and loads of ranks. between_ranks fp64 [rows, rows].
    """
    num_experts = table.shape[1] - 4 - expert_ranks
    table = table.cpu()
    layers = [index for index, row in enumerate(table[:, num_experts + 3].tolist()) if row > 0.5]
    rows = table[layers]
    loads_LE = rows[:, :num_experts]
    chosen_L = loads_LE.sum(1).clamp(min=1.0)
    share_LE = loads_LE / chosen_L[:, None]
    entropy_L = -(share_LE * share_LE.clamp(min=1e-300).log()).sum(1) / math.log(max(num_experts, 2))
    ranks_LR = loads_LE.reshape(len(layers), expert_ranks, num_experts // expert_ranks).sum(2)
    fullest_L, fullest_before_L = (
        loads_LR.amax(1) * expert_ranks / chosen_L for loads_LR in (rows[:, num_experts + 4 :], ranks_LR)
    )
    health: dict[str, object] = {
        "layers": layers,
        "load_max_over_mean": (share_LE.amax(1) * num_experts).tolist(),
        "load_entropy": entropy_L.tolist(),
        "dead_experts": (loads_LE == 0).sum(1).tolist(),
        "drop_rate": (rows[:, num_experts] / chosen_L).tolist(),
        **dict.fromkeys(MOVED_RATES, (rows[:, num_experts + 1] / chosen_L).tolist()),
        "bias_drift": rows[:, num_experts + 2].tolist(),
        "rank_max_over_mean": fullest_L.tolist(),
        **dict.fromkeys(UNMOVED_MAXIMA, fullest_before_L.tolist()),
        "straggler_cost": float((fullest_L - 1.0).clamp(min=0.0).sum()) * layer_share,
        "tokens_per_expert": _as_integers(loads_LE),
    }
    if between_ranks is not None:
        ranks_per_row = expert_ranks // len(between_ranks)
        health["between_ranks"] = {"ranks_per_row": ranks_per_row, "tokens": _as_integers(between_ranks)}
    return health


def _as_integers(counts: Tensor) -> list[list[int]]:
    return [[int(count) for count in row] for row in counts.tolist()]


def heat_map(loads: Sequence[Sequence[int]], cell: int = 8) -> Tensor:
    """Return an image of tokens_per_expert, one row per layer and one column per expert.

    White is the layer's mean, red is above it, blue is below it, saturated at four times and at a quarter; black is
    no token.

    Returns:
        uint8 [3, layers * cell, experts * cell].
    """
    loads_LE = torch.tensor(loads, dtype=torch.float64)
    ratio_LE = loads_LE / loads_LE.mean(1, keepdim=True).clamp(min=1e-9)
    log_ratio_LE = (ratio_LE.clamp(min=1e-9).log2() / 2).clamp(-1.0, 1.0)
    mean_C, cold_C, hot_C = (torch.tensor(color, dtype=torch.float64)[:, None, None] for color in (MEAN, COLD, HOT))
    color_CLE = mean_C + (torch.where(log_ratio_LE < 0, cold_C, hot_C) - mean_C) * log_ratio_LE.abs()
    color_CLE = torch.where(loads_LE == 0, 0.0, color_CLE).round().to(torch.uint8)
    return color_CLE.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
