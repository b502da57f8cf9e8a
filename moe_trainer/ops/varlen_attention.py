"""Causal attention within packed sequences by torch's flash kernels for variable lengths (torch.nn.attention.varlen).

No score between sequences is computed. For CUDA in half precision and key widths up to 256; narrower values are padded
with zeros.

Shapes: T tokens of all sequences, N query heads, G key-value heads, D key width, E value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from moe_trainer.ops.flash_attention import CUDA_WIDTH


def can_run(q_TND: Tensor, v_TGE: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return (
        q_TND.device.type == "cuda"
        and q_TND.dtype in (torch.bfloat16, torch.float16)
        and v_TGE.shape[2] <= q_TND.shape[2] <= CUDA_WIDTH
        and q_TND.shape[2] % 8 == 0
        and torch.cuda.get_device_capability(q_TND.device)[0] >= 8
    )


def varlen_attention(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    left: int = -1,
) -> Tensor:
    """Return [T, N, E].

    Args:
        q_TND: queries.
        k_TGD: keys.
        v_TGE: values.
        cu_seqlens: cumulative lengths from 0 to T, int32 on the device.
        max_seqlen: the largest length.
        scale: of the scores.
        left: query i sees keys i - left .. i of its sequence; negative for all up to i.
    """
    width = v_TGE.shape[2]
    v_TGD = v_TGE if width == q_TND.shape[2] else F.pad(v_TGE, (0, q_TND.shape[2] - width))
    out_TND = varlen.varlen_attn(
        q_TND,
        k_TGD,
        v_TGD,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(max(left, -1), 0),
        enable_gqa=k_TGD.shape[1] != q_TND.shape[1],
    )
    return out_TND[..., :width]
