"""Attention of one query per sequence to the keys and values of a cache, and from a cache of latents.

The work is memory-bound, so scores are plain matmuls; the softmax is fp32 or wider.

Shapes: T sequences with one query each, K positions of the cache, N query heads, G key-value groups, D and E widths of
a key and a value.
"""

import torch
from torch import Tensor

from moe_trainer.ops.absorbed_mla import Latents, attend, wide


def attend_to_keys(
    q_TND: Tensor, k_TKGD: Tensor, v_TKGE: Tensor, scale: float, visible_TK: Tensor, sink_N: Tensor | None = None
) -> Tensor:
    """Return the output [T, N, E] in the dtype of q.

    Args:
        visible_TK: True where a query sees a key; at least one in every row.
        sink_N: score of every head's extra key with the value zero.
    """
    q_TGRD = q_TND.unflatten(1, (k_TKGD.shape[2], -1))
    scores_TGRK = wide(torch.matmul(q_TGRD, k_TKGD.permute(0, 2, 3, 1))) * scale
    scores_TGRK = scores_TGRK.masked_fill(~visible_TK[:, None, None], float("-inf"))
    weights_TGRK = torch.softmax(scores_TGRK, -1)
    if sink_N is not None:
        weights_TGRK = weights_TGRK * _share_of_keys(torch.logsumexp(scores_TGRK, -1).flatten(1), sink_N).view(
            *weights_TGRK.shape[:3], 1
        )
    return torch.matmul(weights_TGRK.to(v_TKGE.dtype), v_TKGE.transpose(1, 2)).flatten(1, 2)


def attend_to_latents(
    q_TND: Tensor,
    latents_TKW: Tensor,
    weight_NFR: Tensor,
    scale: float,
    visible_TK: Tensor,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Return the same from latents with their rotated key, by the up-projection of ops/absorbed_mla.py."""
    num_keys = latents_TKW.shape[1]
    first_T1 = torch.arange(len(q_TND), device=q_TND.device).unsqueeze(1) * num_keys
    numbers_TK = torch.where(visible_TK, torch.arange(num_keys, device=q_TND.device) + first_T1, -1).to(torch.int32)
    out_TNE, lse_TN = attend(q_TND, Latents(latents_TKW.flatten(0, 1), weight_NFR, scale), numbers_TK)
    return out_TNE if sink_N is None else (out_TNE * _share_of_keys(lse_TN, sink_N).unsqueeze(-1)).to(q_TND.dtype)


def _share_of_keys(lse_TN: Tensor, sink_N: Tensor) -> Tensor:
    """Return the part of the softmax that is not the sink's."""
    return torch.sigmoid(lse_TN - sink_N)
