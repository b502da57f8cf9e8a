"""Attention blocks by torch's flash kernels, which return the log-sum-exp and accept that of all keys in backward.

They serve full blocks and square causal blocks, without dropout. On CUDA they need half precision and key widths up to
256; narrower values are padded with zeros. torch's own context parallelism calls the same operators.

Shapes: B sequences, N query heads, G key-value heads, S queries, K keys, D key width, E value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_LENGTH = 256  # shorter blocks are faster in plain matmuls
CUDA_WIDTH = 256


def can_run(q_BNSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> bool:
    """Return whether the kernels support these tensors and are faster."""
    if v_BGKE.shape[3] > q_BNSD.shape[3]:
        return False
    if q_BNSD.device.type == "cpu":
        return min(q_BNSD.shape[2], k_BGKD.shape[2]) >= CPU_LENGTH
    return (
        q_BNSD.device.type == "cuda"
        and q_BNSD.dtype in (torch.bfloat16, torch.float16)
        and q_BNSD.shape[3] <= CUDA_WIDTH
        and q_BNSD.shape[3] % 8 == 0
        and torch.cuda.get_device_capability(q_BNSD.device)[0] >= 8
    )


def flash_block(q_BNSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend to the keys of one block.

    Returns:
        out [B, N, S, E] in the dtype of v, and its log-sum-exp [B, N, S], fp32 or wider.
    """
    width = v_BGKE.shape[3]
    v = pad_width(v_BGKE, q_BNSD.shape[3])
    if q_BNSD.device.type == "cpu":
        k, v = (_repeat(x, q_BNSD.shape[1]) for x in (k_BGKD, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BNSD, k, v, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSD, k_BGKD, v, 0.0, causal, scale=scale)
    return out[..., :width], lse


def flash_block_backward(
    grad_BNSE: Tensor,
    q_BNSD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BNSE: Tensor,
    lse_BNS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one block's gradients of q, k and v; `out` and `lse` are those of all keys."""
    width = v_BGKE.shape[3]
    grad, v, out = (pad_width(x, q_BNSD.shape[3]) for x in (grad_BNSE, v_BGKE, out_BNSE))
    lse = lse_BNS.contiguous()
    if q_BNSD.device.type == "cpu":
        heads, groups = q_BNSD.shape[1], k_BGKD.shape[1]
        k, v = (_repeat(x, heads) for x in (k_BGKD, v))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BNSD, k, v, out, lse, 0.0, causal, scale=scale
        )
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(2) for x in (grad_k, grad_v))
    else:
        no_dropout = torch.empty(0, dtype=torch.int64, device=q_BNSD.device)
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q_BNSD,
            k_BGKD,
            v,
            out,
            lse,
            None,
            None,
            q_BNSD.shape[2],
            k_BGKD.shape[2],
            0.0,
            causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
    return grad_q, grad_k, grad_v[..., :width]


def pad_width(x: Tensor, width: int) -> Tensor:
    """Return x with zeros up to a width of the last dimension."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _repeat(x_BGKD: Tensor, heads: int) -> Tensor:
    return x_BGKD if x_BGKD.shape[1] == heads else x_BGKD.repeat_interleave(heads // x_BGKD.shape[1], 1)
