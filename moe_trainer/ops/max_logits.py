"""Largest attention logit of every head: an extra pass over the scores, for attention kernels that do not return it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_trainer.ops.block_attention import QUERY_TILE, QUERY_TILE_CUDA, BlockMask, PositionRange


@torch.no_grad()
def max_logits_per_head(
    q_SBND: Tensor,
    k_KBGD: Tensor,
    scale: float,
    block_mask: BlockMask,
    mine: Sequence[PositionRange],
    mask: Tensor | None = None,
) -> Tensor:
    """Return the maximum of scale * (q . k) over all queries and their visible keys, fp32 [N]; -inf without.

    Costs one more matmul of queries and keys.

    Args:
        mine: positions of the queries, in order; keys are those of the full sequence.
        mask: bool [1 or B, 1, K, K], True = visible; replaces the causal rule.
    """
    n = q_SBND.shape[2] // k_KBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    k_BGDK = k_KBGD.to(wide).permute(1, 2, 3, 0)
    peaks = torch.full((q_SBND.shape[2],), float("-inf"), device=q_SBND.device)
    everything, row, tile = PositionRange(0, k_KBGD.shape[0]), 0, QUERY_TILE_CUDA if q_SBND.is_cuda else QUERY_TILE
    for run in mine:
        for start in range(run.start, run.stop, tile):
            queries = PositionRange(start, min(start + tile, run.stop))
            q_BGnSD = q_SBND[row : row + queries.size].to(wide).permute(1, 2, 0, 3).unflatten(1, (-1, n))
            row += queries.size
            keys = everything if mask is not None else block_mask.clip(queries, everything)
            if keys is None:
                continue
            scores = (q_BGnSD.flatten(2, 3) @ k_BGDK[..., keys.start : keys.stop]).unflatten(2, (n, -1)).flatten(
                1, 2
            ) * scale
            for hidden in _hidden(block_mask, queries, keys, mask, scores.device):
                scores = scores.masked_fill(hidden, float("-inf"))
            peaks = torch.maximum(peaks, scores.amax(dim=(0, 2, 3)).float())
    return peaks


def _hidden(
    block_mask: BlockMask, queries: PositionRange, keys: PositionRange, mask: Tensor | None, device: torch.device
) -> list[Tensor]:
    """Return bool masks [1 or B, 1, S, K], True = hidden."""
    hidden_masks: list[Tensor | None] = (
        [] if mask is None else [~mask[:, :, queries.start : queries.stop, keys.start : keys.stop]]
    )
    if mask is None or block_mask.left >= 0:
        hidden_masks.append(block_mask.hidden(queries, keys, device))
    return [hidden for hidden in hidden_masks if hidden is not None]
