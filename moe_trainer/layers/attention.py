"""Self-attention with grouped queries (multi-head attention is the case of one query per group).

linear_qkv's rows are ordered by key-value group: [q..q, k, v], each of --kv-channels rows, as in Megatron-Core.

Shapes: S sequence, B microbatch, H hidden, N query heads, G key-value groups, D head dim.
"""

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.norm import L2Norm
from moe_trainer.layers.rotary import Tables, skips_rope
from moe_trainer.ops.rope import apply_rope
from moe_trainer.parallel.state import ParallelState


class _SplitQKV(torch.autograd.Function):
    """Views of q, k and v; the backward fills one gradient instead of adding three zero-padded ones."""

    @staticmethod
    def forward(ctx, qkv_SBGRD):
        ctx.shape = qkv_SBGRD.shape
        last = qkv_SBGRD.shape[3] - 2
        return qkv_SBGRD[..., :last, :], qkv_SBGRD[..., last, :], qkv_SBGRD[..., last + 1, :]

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        last = ctx.shape[3] - 2
        grad = torch.empty(ctx.shape, dtype=grad_q.dtype, device=grad_q.device)
        grad[..., :last, :] = grad_q
        grad[..., last, :] = grad_k
        grad[..., last + 1, :] = grad_v
        return grad


class SelfAttention(nn.Module):
    """Attention of one layer. name: global name, e.g. "decoder.layers.0.self_attention"; layer_number from 1."""

    def __init__(self, model: ModelArgs, ps: ParallelState, *, name: str, layer_number: int, kit: Kit):
        super().__init__()
        if model.attention_output_gate:
            raise ValueError("--attention-output-gate is not built yet")
        self.head_dim = model.kv_channels
        self.num_heads = model.num_attention_heads
        self.num_groups = model.query_groups
        self.rope = not skips_rope(model, layer_number)
        self.interleaved = model.rotary_interleaved
        self.linear_qkv = kit.column_linear(
            model.hidden_size, (self.num_heads + 2 * self.num_groups) * self.head_dim, name=f"{name}.linear_qkv",
            group=ps.tp, init=hidden_init(model), bias=model.add_bias_linear or model.add_qkv_bias)
        self.q_layernorm = self._qk_norm(model, kit, f"{name}.q_layernorm")
        self.k_layernorm = self._qk_norm(model, kit, f"{name}.k_layernorm")
        self.core_attention = kit.core_attention(model, layer_number, head_dim=self.head_dim)
        self.linear_proj = kit.row_linear(
            self.num_heads * self.head_dim, model.hidden_size, name=f"{name}.linear_proj", group=ps.tp,
            init=residual_init(model), bias=model.add_bias_linear)

    def _qk_norm(self, model: ModelArgs, kit: Kit, name: str) -> nn.Module | None:
        if model.qk_l2_norm:
            return L2Norm(model.layernorm_epsilon)
        return kit.norm(self.head_dim, model, name=name) if model.qk_layernorm else None

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: Tensor | None) -> Tensor:
        """rope: cos and sin [S, R/2]; visible: see CoreAttention. Returns: [S, B, H]."""
        seq_len, batch, _ = x_SBH.shape
        qkv = self.linear_qkv(x_SBH).view(seq_len, batch, self.num_groups, -1, self.head_dim)
        q, k_SBGD, v_SBGD = _SplitQKV.apply(qkv)
        if self.q_layernorm is not None:
            q, k_SBGD = self.q_layernorm(q), self.k_layernorm(k_SBGD)
        q_SBND = q.reshape(seq_len, batch, self.num_heads, self.head_dim)
        if rope is not None and self.rope:
            q_SBND = apply_rope(q_SBND, *rope, self.interleaved)
            k_SBGD = apply_rope(k_SBGD, *rope, self.interleaved)
        return self.linear_proj(self.core_attention(q_SBND, k_SBGD, v_SBGD, visible))
