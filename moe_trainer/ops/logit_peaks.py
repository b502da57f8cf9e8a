"""The largest attention logit of every head: a pass over the scores, tile by tile, beside attention kernels that do not tell."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trainer.ops.block_attention import QUERY_TILE, QUERY_TILE_CUDA, Rule, Run


@torch.no_grad()
def largest_logits(q_SBND: Tensor, k_KBGD: Tensor, scale: float, rule: Rule, mine: Sequence[Run], mask: Tensor | None = None) -> Tensor:
    """max over all queries and the keys that they see of scale * (q . k), fp32 [N]; -inf where there are none.

    mine: the positions of the queries, in their order; keys are those of the whole sequence. mask: bool [1 or B, 1, K, K], True = seen;
    replaces the causal rule. Costs the product of queries and keys once more.
    """
    n = q_SBND.shape[2] // k_KBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    k_BGDK = k_KBGD.to(wide).permute(1, 2, 3, 0)
    peaks = torch.full((q_SBND.shape[2],), float("-inf"), device=q_SBND.device)
    everything, row, tile = Run(0, k_KBGD.shape[0]), 0, QUERY_TILE_CUDA if q_SBND.is_cuda else QUERY_TILE
    for run in mine:
        for start in range(run.start, run.stop, tile):
            queries = Run(start, min(start + tile, run.stop))
            q_BGnSD = q_SBND[row:row + queries.size].to(wide).permute(1, 2, 0, 3).unflatten(1, (-1, n))
            row += queries.size
            keys = everything if mask is not None else rule.clip(queries, everything)
            if keys is None:
                continue
            scores = (q_BGnSD.flatten(2, 3) @ k_BGDK[..., keys.start:keys.stop]).unflatten(2, (n, -1)).flatten(1, 2) * scale
            for hidden in _hidden(rule, queries, keys, mask, scores.device):
                scores = scores.masked_fill(hidden, float("-inf"))
            peaks = torch.maximum(peaks, scores.amax(dim=(0, 2, 3)).float())
    return peaks


def _hidden(rule: Rule, queries: Run, keys: Run, mask: Tensor | None, device: torch.device) -> list[Tensor]:
    """Bool [1 or B, 1, S, K], True = not seen."""
    found = [] if mask is None else [~mask[:, :, queries.start:queries.stop, keys.start:keys.stop]]
    if mask is None or rule.left >= 0:
        found.append(rule.hidden(queries, keys, device))
    return [hidden for hidden in found if hidden is not None]
