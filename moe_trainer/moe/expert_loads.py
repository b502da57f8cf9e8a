"""Tokens per expert and layer of an iteration, before drops and padding (--moe-per-layer-logging)."""

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState

EXTRA_COLUMNS = ("dropped", "cloned", "bias_drift", "is_moe")


@torch.no_grad()
def collect_expert_loads(
    chunks, ps: ParallelState, num_experts: int, num_layers: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Read and reset the routers' counts; call it before `collect_moe_metrics`, which resets the drops.

    Collective over the world, including pipeline stages without experts. `num_layers` is that of the full model with
    MTP layers.

    Returns:
        fp64 [num_layers, num_experts + 4 + ep], equal on all ranks: tokens of the global batch that chose each expert;
        (token, expert) pairs that were dropped, and those that clones computed; largest deviation of an expert bias
        from the mean; 1 for MoE layers; load of each rank of ep with its clones, before drops. Dense layers are 0.
    """
    first_rank = num_experts + len(EXTRA_COLUMNS)
    table = torch.zeros(num_layers, first_rank + ps.ep.size, dtype=torch.float64, device=device)
    for chunk in chunks:
        for layer in chunk.moe_layers():
            router, row = layer.router, table[layer.layer_number - 1]
            row[:num_experts] = router.tokens_per_expert
            row[num_experts] = router.dropped
            row[first_rank:] = router.tokens_per_expert.view(ps.ep.size, -1).sum(1)
            if layer.cloned_tokens_2P is not None:
                by_host_P, by_owner_P = layer.cloned_tokens_2P / ps.tp_ep.size  # equal on the ranks of tp_ep
                row[num_experts + 1] = by_host_P.sum()
                row[first_rank:] += by_host_P - by_owner_P
                layer.cloned_tokens_2P.zero_()
            bias_E = router.expert_bias if router.quantile is None else router.quantile.bias_E
            if bias_E is not None:
                bias_E = bias_E.double()
                row[num_experts + 2] = (bias_E - bias_E.mean()).abs().max()
            row[num_experts + 3] = 1.0
            router.tokens_per_expert.zero_()
    all_reduce(table, ps.tp_dp_cp)
    table[:, num_experts + 2 : first_rank] /= ps.tp_dp_cp.size  # the same on all of these ranks
    return all_reduce(table, ps.pp)
