"""Routing health: what a table of loads says about each MoE layer, under the names of metrics.jsonl.

    layers              the MoE layers, counted from 0; multi-token-prediction layers follow the decoder's. All lists are in this order
    tokens_per_expert   per layer, tokens that chose each expert in this iteration (global batch), before drops
    load_max_over_mean  of the fullest expert; 1 is balanced, num_experts / topk the worst
    load_entropy        entropy of the loads over its largest value log(num_experts); 1 is balanced
    dead_experts        experts that no token chose
    drop_rate           share of the chosen (token, expert) pairs that were dropped
    clone_rate          share of those pairs that clones of hot experts computed on other ranks (--moe-clone-hot-experts)
    bias_drift          largest distance of an expert bias from their mean, after this iteration's update; 0 without expert bias
    rank_max_over_mean  of the fullest expert-parallel rank; 1 without expert parallelism
    straggler_cost      one number: by which share of itself the iteration's arithmetic is longer because every layer waits for its fullest
                        rank, sum over layers of (rank_max_over_mean - 1) * share of the layer's routed experts in the model's FLOPs

straggler_cost is an expectation from sums over the iteration: single microbatches are less even than their sum, so it is a lower bound;
and hot experts that --moe-clone-hot-experts evens out count as if they had stayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MEAN, COLD, HOT = (247, 247, 247), (33, 102, 172), (178, 24, 43)  # as in page/dashboard.js
PER_LAYER = ("load_max_over_mean", "load_entropy", "dead_experts", "drop_rate", "clone_rate", "bias_drift", "rank_max_over_mean")


def routing_health(table: Tensor, expert_ranks: int, layer_share: float) -> dict[str, object]:
    """Describe a table of moe/health.py: fp64 [layers, experts + 4], the last columns drops, clones' rows, bias drift, is this an MoE layer.

    expert_ranks: size of expert parallelism. layer_share: of one layer's routed experts in the model's FLOPs.
    """
    num_experts = table.shape[1] - 4
    table = table.cpu()
    layers = [index for index, row in enumerate(table[:, -1].tolist()) if row > 0.5]
    rows = table[layers]
    loads_LE = rows[:, :num_experts]
    chosen_L = loads_LE.sum(1).clamp(min=1.0)
    share_LE = loads_LE / chosen_L[:, None]
    entropy_L = -(share_LE * share_LE.clamp(min=1e-300).log()).sum(1) / math.log(max(num_experts, 2))
    ranks_LR = loads_LE.reshape(len(layers), expert_ranks, num_experts // expert_ranks).sum(2)
    fullest_L = ranks_LR.amax(1) * expert_ranks / chosen_L
    return {
        "layers": layers,
        "load_max_over_mean": (share_LE.amax(1) * num_experts).tolist(),
        "load_entropy": entropy_L.tolist(),
        "dead_experts": (loads_LE == 0).sum(1).tolist(),
        "drop_rate": (rows[:, num_experts] / chosen_L).tolist(),
        "clone_rate": (rows[:, num_experts + 1] / chosen_L).tolist(),
        "bias_drift": rows[:, num_experts + 2].tolist(),
        "rank_max_over_mean": fullest_L.tolist(),
        "straggler_cost": float((fullest_L - 1.0).clamp(min=0.0).sum()) * layer_share,
        "tokens_per_expert": [[int(count) for count in row] for row in loads_LE.tolist()],
    }


def heat_map(loads: Sequence[Sequence[int]], cell: int = 8) -> Tensor:
    """A picture of tokens_per_expert, layers downwards, experts to the right: white at a layer's mean, red above and blue below it, full
    at four times and at a quarter; black where no token came.

    Returns: uint8 [3, layers * cell, experts * cell].
    """
    loads_LE = torch.tensor(loads, dtype=torch.float64)
    ratio_LE = loads_LE / loads_LE.mean(1, keepdim=True).clamp(min=1e-9)
    far_LE = (ratio_LE.clamp(min=1e-9).log2() / 2).clamp(-1.0, 1.0)
    mean_C, cold_C, hot_C = (torch.tensor(colour, dtype=torch.float64)[:, None, None] for colour in (MEAN, COLD, HOT))
    colour_CLE = mean_C + (torch.where(far_LE < 0, cold_C, hot_C) - mean_C) * far_LE.abs()
    colour_CLE = torch.where(loads_LE == 0, 0.0, colour_CLE).round().to(torch.uint8)
    return colour_CLE.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
