"""Where the tokens of an iteration went, expert by expert and layer by layer (--moe-per-layer-logging).

Counted is what the router chose, before anything is dropped or padded. Every rank counts its own tokens; one
reduction an iteration adds them up.
"""

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.state import ParallelState

EXTRA_COLUMNS = ("dropped", "cloned", "bias_drift", "is_moe")


@torch.no_grad()
def collect_expert_loads(
    chunks, ps: ParallelState, num_experts: int, num_layers: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Read and reset the routers' counts of this iteration; read their drops, so call it before `collect_moe_metrics` forgets these.

    Called on every rank, also where a pipeline stage has no experts. num_layers: of the whole model, with
    multi-token-prediction layers.
    Returns: fp64 [num_layers, num_experts + 4], the same on every rank: tokens that chose each expert, in the global
    batch; pairs of token and expert that were dropped, and that clones of hot experts took over; how far the bias of
    an expert is from the mean one; 1 for MoE layers (rows of others are 0).
    Communication: this table over tp_dp_cp, then over pp; nothing on one rank.
    """
    table = torch.zeros(num_layers, num_experts + len(EXTRA_COLUMNS), dtype=torch.float64, device=device)
    for chunk in chunks:
        for layer in chunk.moe_layers():
            router, row = layer.router, table[layer.layer_number - 1]
            row[:num_experts] = router.tokens_per_expert
            row[num_experts] = router.dropped
            row[num_experts + 1] = layer.num_cloned_tokens / ps.tp_ep.size  # whose ranks all know the whole plan
            layer.num_cloned_tokens = 0
            bias_E = router.expert_bias if router.quantile is None else router.quantile.bias_E
            if bias_E is not None:
                bias_E = bias_E.double()
                row[num_experts + 2] = (bias_E - bias_E.mean()).abs().max()
            row[num_experts + 3] = 1.0
            router.tokens_per_expert.zero_()
    all_reduce(table, ps.tp_dp_cp)
    table[:, num_experts + 2 :] /= ps.tp_dp_cp.size  # the same on all of these ranks
    return all_reduce(table, ps.pp)
