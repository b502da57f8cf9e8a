"""Scaled dot-product attention over [S, B, N, D] tensors.

A static rule chooses one of two implementations:

* torch's scaled_dot_product_attention, which chooses a kernel unless one is named, with values padded to the width of
  keys where they are narrower (latent attention);
* for causal sequences up to BLOCKED_MAX_LENGTH on a CPU, batched matmuls over blocks of queries that save their
  probabilities. The fused CPU kernel takes 1.3 (fp32) to 3 times (bf16) as long at S 256, 8/4 heads of 32: its tiles
  are too small for matrix units.

Shapes: S positions, B sequences, N query heads, G key-value heads (n = N / G queries each), D key width, E value width.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_trainer.ops.block_sizes import BLOCKED_MAX_LENGTH, QUERY_BLOCK


def sliding_window_mask(length: int, left: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the bool mask [length, length], True = visible: key j for query i if i - left <= j <= i.

    A negative `left` is no limit.
    """
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    return visible.triu_(-left) if left >= 0 else visible


def chunk_mask(length: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the bool mask [length, length], True = visible: key j for query i in the same chunk if j <= i."""
    numbers = torch.arange(length, device=device) // size
    return (numbers[:, None] == numbers).tril_()


def compact(x: Tensor) -> Tensor:
    """Return x, or a copy if x is a view of a larger storage, which saving x would keep alive."""
    return (
        x
        if x.untyped_storage().nbytes() == x.numel() * x.element_size()
        else x.clone(memory_format=torch.contiguous_format)
    )


class _BlockedCausal(torch.autograd.Function):
    """Rows of a stacked query matrix are ordered by position, then by query of the group."""

    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGE, scale, should_save_inputs):
        seq_len, batch, heads, _width = q_SBND.shape
        groups = k_SBGD.shape[2]
        per_group = heads // groups
        q = _stack(q_SBND * scale, groups)
        k, v = _stack(k_SBGD, groups), _stack(v_SBGE, groups)
        k_t = k.transpose(1, 2)
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        above = torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=torch.bool, device=q.device).triu_(1)
        above = above.repeat_interleave(per_group, 0)
        kept = []
        for start, stop in _query_blocks(seq_len):
            rows = slice(start * per_group, stop * per_group)
            scores = torch.bmm(q[:, rows], k_t[:, :, :stop])
            size = stop - start
            scores[:, :, start:].masked_fill_(above[: size * per_group, :size], float("-inf"))
            probs = torch.softmax(scores, dim=-1)
            torch.bmm(probs, v[:, :stop], out=out[:, rows])
            kept.append(probs)
        ctx.save_for_backward(*((q_SBND, k_SBGD, v_SBGE) if should_save_inputs else (q, k, v)), *kept)
        ctx.sizes = seq_len, batch, groups, per_group, scale, should_save_inputs
        return _unstack(out, seq_len, batch, groups).flatten(2)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        seq_len, batch, groups, per_group, scale, should_save_inputs = ctx.sizes
        if should_save_inputs:
            q, k, v = _stack(q * scale, groups), _stack(k, groups), _stack(v, groups)
        grad = _stack(grad.view(seq_len, batch, groups * per_group, v.shape[2]), groups)
        grad_q = torch.empty_like(q)
        # keys and values collect from all later blocks: fp32 sums for half-precision inputs
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for probs, (start, stop) in zip(kept, _query_blocks(seq_len)):
            rows = slice(start * per_group, stop * per_group)
            _accumulate(grad_v[:, :stop], probs, grad[:, rows])
            grad_probs = torch.bmm(grad[:, rows], v[:, :stop].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            torch.bmm(grad_scores, k[:, :stop], out=grad_q[:, rows])
            _accumulate(grad_k[:, :stop], grad_scores, q[:, rows])
        return (
            _unstack(grad_q.mul_(scale), seq_len, batch, groups),
            _unstack(grad_k.to(k.dtype), seq_len, batch, groups),
            _unstack(grad_v.to(v.dtype), seq_len, batch, groups),
            None,
            None,
        )


def _query_blocks(seq_len: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_BLOCK, seq_len)) for start in range(0, seq_len, QUERY_BLOCK)]


def _stack(x_SBND: Tensor, groups: int) -> Tensor:
    """Reshape [S, B, G * n, D] to contiguous [B * G, S * n, D]."""
    seq_len, batch, heads, width = x_SBND.shape
    x = x_SBND.reshape(seq_len, batch, groups, heads // groups, width).permute(1, 2, 0, 3, 4)
    return x.reshape(batch * groups, seq_len * (heads // groups), width)


def _unstack(x: Tensor, seq_len: int, batch: int, groups: int) -> Tensor:
    """Reshape [B * G, S * n, D] to contiguous [S, B, G * n, D]."""
    x = x.view(batch, groups, seq_len, -1, x.shape[-1]).permute(2, 0, 1, 3, 4)
    return x.reshape(seq_len, batch, -1, x.shape[-1])


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to total, in the dtype of total."""
    if total.dtype == left.dtype:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total += torch.bmm(left.transpose(1, 2), right)


def should_pad_values(seq_len: int, masked: bool, dropout_p: float, device: torch.device) -> bool:
    """Return whether `attention` uses the fused kernel and pads values to the width of keys."""
    return masked or dropout_p > 0.0 or device.type != "cpu" or seq_len > BLOCKED_MAX_LENGTH


def pad_values(v_SBGE: Tensor, width: int) -> Tensor:
    """Pad values with zeros to the width of keys."""
    return F.pad(v_SBGE, (0, width - v_SBGE.shape[-1])) if v_SBGE.shape[-1] < width else v_SBGE


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    scale: float,
    visible: Tensor | None = None,
    dropout_p: float = 0.0,
    should_save_inputs: bool = False,
    value_width: int | None = None,
    backend: SDPBackend | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T + mask) v.

    Args:
        visible: None for causal, or a bool mask broadcastable to [B, N, S, S], True = visible.
        should_save_inputs: save q, k and v for backward as they are, not what was made of them.
        value_width: E, if v is padded (see `should_pad_values`); None for the width of v.
        backend: torch's kernel; None for torch's choice.

    Returns:
        [S, B, N * E], contiguous.

    Raises:
        RuntimeError: if that kernel cannot compute this.
    """
    seq_len, batch, heads, width = q_SBND.shape
    if not should_pad_values(seq_len, visible is not None, dropout_p, q_SBND.device):
        return _BlockedCausal.apply(q_SBND, k_SBGD, v_SBGE, scale, should_save_inputs)
    value_width = value_width or v_SBGE.shape[-1]
    v_SBGE = pad_values(v_SBGE, width)
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        o_BNSE = F.scaled_dot_product_attention(
            q_SBND.permute(1, 2, 0, 3),
            k_SBGD.permute(1, 2, 0, 3),
            v_SBGE.permute(1, 2, 0, 3),
            attn_mask=visible,
            dropout_p=dropout_p,
            is_causal=visible is None,
            scale=scale,
            enable_gqa=k_SBGD.shape[2] != heads,
        )
    if value_width < width:
        o_BNSE = o_BNSE[..., :value_width]
    return o_BNSE.permute(2, 0, 1, 3).reshape(seq_len, batch, heads * value_width)
