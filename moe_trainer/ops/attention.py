"""Scaled dot-product attention over [S, B, N, D] tensors.

torch's fused kernel does the work; this file fits it to the layout (heads in the third dimension, moved by view), to
grouped queries, to values narrower than keys (latent attention), and to masks. The fused CPU kernel wants equal widths
for keys and values, so narrower values are padded with zeros, which costs less than the unfused path.

Shapes: S queries, B sequences, N query heads, G key-value heads, D key width, E value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sliding_window_mask(length: int, left: int, device: torch.device | str = "cpu") -> Tensor:
    """Causal bool mask [length, length], True = visible: key j for query i when i - left <= j <= i.

    left < 0 means no limit.
    """
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return visible.triu_(-left) if left >= 0 else visible


def attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, visible: Tensor | None = None,
              dropout_p: float = 0.0) -> Tensor:
    """softmax(scale * q k^T + mask) v.

    visible: None for causal, or a bool mask broadcastable to [B, N, S, S], True = may be attended to.
    Returns: [S, B, N * E], contiguous.
    """
    seq_len, batch, heads, width = q_SBND.shape
    value_width = v_SBGE.shape[-1]
    if value_width < width:
        v_SBGE = F.pad(v_SBGE, (0, width - value_width))
    o_BNSE = F.scaled_dot_product_attention(
        q_SBND.permute(1, 2, 0, 3), k_SBGD.permute(1, 2, 0, 3), v_SBGE.permute(1, 2, 0, 3), attn_mask=visible,
        dropout_p=dropout_p, is_causal=visible is None, scale=scale, enable_gqa=k_SBGD.shape[2] != heads)
    if value_width < width:
        o_BNSE = o_BNSE[..., :value_width]
    return o_BNSE.permute(2, 0, 1, 3).reshape(seq_len, batch, heads * value_width)
