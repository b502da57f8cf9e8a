"""Tokens per expert and layer of an iteration, and between expert-parallel ranks (--moe-per-layer-logging)."""

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState

MAX_RANK_ROWS = 64  # of the table of tokens between ranks, so that records and pages stay small with many ranks
EXTRA_COLUMNS = ("dropped", "moved", "bias_drift", "is_moe")


@torch.no_grad()
def collect_expert_loads(
    chunks, ps: ParallelState, num_experts: int, num_layers: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """Read and reset the layers' counts; call it before `collect_moe_metrics`, which resets the drops.

    Collective over the world, including pipeline stages without experts. `num_layers` is that of the full model with
    MTP layers.

    Returns:
        Two tables, fp64 and equal on all ranks.
        [num_layers, num_experts + 4 + ep]: tokens of the global batch that chose each expert, before drops and padding;
        (token, expert) pairs that were dropped, and those that another rank than the expert's computed; largest
        deviation of an expert bias from the mean; 1 for MoE layers; load of each rank of ep as it has computed, before
        drops. Dense layers are 0.
        [ep, ep]: tokens that each rank of ep has sent to each, itself included, in all layers and groups of ep; after
        drops, with padding. Of more than MAX_RANK_ROWS ranks, a row and a column are of several neighbors.
        None without expert parallelism.
    """
    first_rank, num_rows = num_experts + len(EXTRA_COLUMNS), 0 if ps.ep.size == 1 else _num_rank_rows(ps.ep.size)
    every = torch.zeros(num_layers + num_rows, first_rank + ps.ep.size, dtype=torch.float64, device=device)
    table, between_ranks = every[:num_layers], every[num_layers:, :num_rows]  # one table, one message
    for chunk in chunks:
        for layer in chunk.moe_layers():
            router, row = layer.router, table[layer.layer_number - 1]
            row[:num_experts] = router.tokens_per_expert
            row[num_experts] = router.dropped
            row[first_rank:] = router.tokens_per_expert.view(ps.ep.size, -1).sum(1)
            moved_2P = layer.placement.moved_tokens_2P
            if moved_2P is not None:
                by_host_P, by_owner_P = moved_2P / ps.tp_ep.size  # equal on the ranks of tp_ep
                row[num_experts + 1] = by_host_P.sum()
                row[first_rank:] += by_host_P - by_owner_P
                moved_2P.zero_()
            if layer.sent_tokens_P is not None:
                row_of_rank = between_ranks[ps.ep.rank * num_rows // ps.ep.size]
                row_of_rank += layer.sent_tokens_P.view(num_rows, -1).sum(1)
                layer.sent_tokens_P.zero_()
            bias_E = router.selection.balancing_bias(router.expert_bias)
            if bias_E is not None:
                bias_E = bias_E.double()
                row[num_experts + 2] = (bias_E - bias_E.mean()).abs().max()
            row[num_experts + 3].fill_(1.0)  # an assignment would copy from the host and wait
            router.tokens_per_expert.zero_()
    all_reduce(every, ps.tp_dp_cp)
    table[:, num_experts + 2 : first_rank] /= ps.tp_dp_cp.size  # the same on all of these ranks
    all_reduce(every, ps.pp)
    return table, between_ranks if num_rows else None


def _num_rank_rows(ranks: int) -> int:
    """Return the largest number of equal blocks of ranks up to MAX_RANK_ROWS."""
    return next(rows for rows in range(min(ranks, MAX_RANK_ROWS), 0, -1) if ranks % rows == 0)
