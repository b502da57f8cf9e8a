"""Attention within packed sequences by torch's flash kernels for variable lengths (torch.nn.attention.varlen).

No score between sequences is computed. For CUDA in half precision and key widths up to 256; narrower values are padded
with zeros. Blocks of context-parallel ranks call the kernels' operators, whose backward takes the output and the
log-sum-exp of all keys.

Shapes: T tokens of all sequences, U those of their keys, N query heads, G key-value heads, D key width, E value width.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen

from moe_trainer.ops.flash_attention import CUDA_WIDTH, pad_width


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
    v_TGD = pad_width(v_TGE, q_TND.shape[2])
    grouped: dict[str, Any] = {}
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # torch 2.11 takes fewer key heads without it
        grouped["enable_gqa"] = k_TGD.shape[1] != q_TND.shape[1]
    out_TND: Tensor = varlen.varlen_attn(  # type: ignore[assignment]  # a tuple only where return_aux asks for it
        q_TND,
        k_TGD,
        v_TGD,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(max(left, -1), 0),
        **grouped,
    )
    return out_TND[..., :width]


class Borders(NamedTuple):
    """Where sequences begin and end in a tensor of tokens.

    Attributes:
        cu_seqlens: cumulative lengths from 0, int32 on the device.
        max_seqlen: the largest length.
    """

    cu_seqlens: Tensor
    max_seqlen: int


class KeyBlock(NamedTuple):
    """A part of the keys of every sequence.

    Attributes:
        queries: of the sequences.
        keys: of the same sequences.
        scale: of the scores.
        causal: query i sees keys up to i, which are as many as the queries; otherwise all.
        left: with `causal`, how many earlier keys it sees; negative for all.
    """

    queries: Borders
    keys: Borders
    scale: float
    causal: bool
    left: int

    def arguments(self) -> tuple[Tensor, Tensor, int, int, float, bool]:
        """Return what both operators take after their tensors: borders, dropout, and whether the mask is causal."""
        lengths = self.queries.max_seqlen, self.keys.max_seqlen
        return self.queries.cu_seqlens, self.keys.cu_seqlens, *lengths, 0.0, self.causal and self.left < 0

    def options(self) -> dict[str, Any]:
        """Return the options of both operators."""
        window = {"window_size_left": self.left, "window_size_right": 0} if self.causal and self.left >= 0 else {}
        return {"scale": self.scale, **window}


def varlen_block(q_TND: Tensor, k_UGD: Tensor, v_UGE: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attend to a part of the keys of every sequence.

    Args:
        q_TND: queries.
        k_UGD: keys of the block.
        v_UGE: values of the block.

    Returns:
        out [T, N, E] in the dtype of v, and its log-sum-exp [N, T], fp32.
    """
    out_TND, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
        q_TND,
        k_UGD,
        pad_width(v_UGE, q_TND.shape[2]),
        *block.arguments(),
        False,
        **block.options(),
    )
    return out_TND[..., : v_UGE.shape[2]], lse_NT


def varlen_block_backward(
    grad_TNE: Tensor,
    q_TND: Tensor,
    k_UGD: Tensor,
    v_UGE: Tensor,
    out_TNE: Tensor,
    lse_NT: Tensor,
    block: KeyBlock,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `varlen_block`; `out` and `lse` are those of all keys."""
    width = v_UGE.shape[2]
    grad, v, out = (pad_width(x, q_TND.shape[2]) for x in (grad_TNE, v_UGE, out_TNE))
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_TND.device)
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        grad,
        q_TND,
        k_UGD,
        v,
        out,
        lse_NT.contiguous(),
        *block.arguments(),
        no_dropout,
        no_dropout,
        **block.options(),
    )
    return grad_q, grad_k, grad_v[..., :width]
