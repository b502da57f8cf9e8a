"""Self-attention with grouped queries; multi-head attention has one query head per group.

The rows of linear_qkv are ordered by key-value group, [q..q, k, v], as in Megatron-Core. --attention-output-gate adds a
gate per query head, [q..q, g..g, k, v]; the head's output is multiplied by sigmoid(g).

Tensor parallelism shards whole groups. With fewer groups than ranks, several ranks share a group: linear_qkv is still
sharded evenly, the projections are gathered, and every rank takes its queries and its group's key and value. Backward
sums the shared gradients.

Shapes: S sequence, B microbatch, H hidden, N query heads, G key-value groups (both local), D head dim, E value dim.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from arguments.layer_pattern import model_of_layer
from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import AttentionMask, make_attention_sinks
from moe_trainer.layers.dropout import rng_context
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.max_logits import MaxLogitTracker
from moe_trainer.layers.norm import AllHeadsNorm, L2Norm
from moe_trainer.layers.query_temperature import QueryTemperature
from moe_trainer.layers.rotary import Tables, skips_rope
from moe_trainer.ops.attention import compact
from moe_trainer.ops.cached_attention import attend_to_keys
from moe_trainer.parallel.mappings import gather_last_dim
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.state import ParallelState


class _SplitQKV(torch.autograd.Function):
    """Views of q (and its gates), k and v; backward fills one gradient instead of adding zero-padded ones."""

    @staticmethod
    def forward(ctx, qkv_SBGRD, gated):
        ctx.shape = qkv_SBGRD.shape
        last = qkv_SBGRD.shape[3] - 2
        queries = qkv_SBGRD[..., :last, :].chunk(1 + gated, dim=3)
        return *queries, qkv_SBGRD[..., last, :], qkv_SBGRD[..., last + 1, :]

    @staticmethod
    def backward(ctx, *grads):
        # three dimensions: CUDA joins more of them part by part
        rows = [
            grad.reshape(-1, 1, ctx.shape[-1]) if grad.dim() < len(ctx.shape) else grad.reshape(-1, *grad.shape[3:])
            for grad in grads
        ]
        return torch.cat(rows, 1).view(ctx.shape), None


class SigmoidGate(torch.autograd.Function):
    """y * sigmoid(gate), computed in fp32; saves both inputs as they are. A gate may apply to several of y."""

    @staticmethod
    def forward(ctx, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate)
        return (y * torch.sigmoid(gate.float())).to(y.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, gate = ctx.saved_tensors
        share = torch.sigmoid(gate.float())
        scaled = grad * share
        grad_gate = (scaled * y * (1.0 - share)).sum_to_size(gate.shape)
        return scaled.to(y.dtype), grad_gate.to(gate.dtype)


class SelfAttention(nn.Module):
    """Attention of one layer.

    Args:
        name: global name, e.g. "decoder.layers.0.self_attention".
        layer_number: counted from 1.
        sequence_parallel: see layers/linear.py.
    """

    def __init__(
        self,
        model: ModelArgs,
        ps: ParallelState,
        *,
        name: str,
        layer_number: int,
        factory: LayerFactory,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        model = model_of_layer(model, layer_number)
        heads, groups, tp = model.num_attention_heads, model.query_groups, ps.tp
        if heads % tp.size or (groups % tp.size and tp.size % groups):
            raise ValueError(
                f"{name}: {heads} heads in {groups} groups do not divide over {tp.size} tensor-parallel ranks"
            )
        self.tp = tp
        self.layer_number, self.head_dim, self.value_dim = layer_number, model.kv_channels, model.value_width
        self.value_scale = model.attention_value_scale
        self.num_heads = heads // tp.size
        self.num_groups = max(1, groups // tp.size)
        self.ranks_per_group = max(1, tp.size // groups)
        self.gated = model.attention_output_gate
        self.rope = not skips_rope(model, layer_number)
        self.normed_after_rope = model.qk_layernorm_after_rope
        self.temperature = QueryTemperature.of(model, layer_number, ps.context)
        self.interleaved = model.rotary_interleaved
        self.stream = factory.stream if model.attention_dropout > 0.0 else None
        self.activations, self.apply_rope = factory.activations, factory.kernels.apply_rope
        options = {"group": tp, "sequence_parallel": sequence_parallel}
        self.linear_qkv = factory.column_linear(
            model.hidden_size,
            (heads * (1 + self.gated) + groups) * self.head_dim + groups * self.value_dim,
            name=f"{name}.linear_qkv",
            init=hidden_init(model),
            bias=model.add_bias_linear or model.add_qkv_bias,
            save_original_input="layernorm" in self.activations.recomputed,
            **options,
        )
        queries = heads // groups * self.head_dim
        blocks, weight = (*(queries,) * (1 + self.gated), self.head_dim, self.value_dim), self.linear_qkv.weight
        set_param_info(weight, replace(get_param_info(weight), row_blocks=blocks))
        self.q_layernorm = self._qk_norm(model, factory, f"{name}.q_layernorm", heads)
        self.k_layernorm = self._qk_norm(model, factory, f"{name}.k_layernorm", groups)
        scale = self.head_dim**-0.5 if model.softmax_scale is None else model.softmax_scale
        self.core_attention = factory.core_attention(
            model, layer_number, head_dim=self.head_dim, scale=model.softmax_scale
        )
        self.max_logits = MaxLogitTracker(model, layer_number, scale, ps.context)
        self.softmax_offset = make_attention_sinks(model, name, tp)
        options |= {"init": residual_init(model), "bias": model.add_bias_linear or model.add_attention_output_bias}
        self.linear_proj = factory.row_linear(
            heads * self.value_dim,
            model.hidden_size,
            name=f"{name}.linear_proj",
            # attention saves its output too, unless it is recomputed
            save_original_input="core_attn" not in self.activations.recomputed and not self.gated,
            **options,
        )

    def _qk_norm(self, model: ModelArgs, factory: LayerFactory, name: str, num_heads: int) -> nn.Module | None:
        if model.qk_l2_norm and (self.rope or not model.qk_l2_norm_rope_layers_only):
            return L2Norm(model.layernorm_epsilon, factory.kernels.rms_norm)
        if not model.qk_layernorm:
            return None
        if model.qk_layernorm_all_heads:
            return AllHeadsNorm(
                num_heads * self.head_dim, model, name=name, group=self.tp, rms_norm=factory.kernels.rms_norm
            )
        # one gain for all heads, of which this rank sees some
        return factory.norm(self.head_dim, model, name=name, partial=self.tp.size > 1)

    def _queries_keys_values(self, x_SBH: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return q and its gates [S, B, G, N / G, D], k [S, B, G, D] and v [S, B, G, E]."""
        qkv = self.linear_qkv(x_SBH)
        if self.ranks_per_group == 1:
            *queries, k_SBGD, v_SBGE = self._split(qkv.view(*qkv.shape[:2], self.num_groups, -1))
        else:
            group, place = divmod(self.tp.rank, self.ranks_per_group)
            every = gather_last_dim(qkv, self.tp).chunk(self.tp.size // self.ranks_per_group, dim=-1)
            *queries, k_SBGD, v_SBGE = self._split(every[group].unsqueeze(2))
            queries = [every.narrow(3, place * self.num_heads, self.num_heads) for every in queries]
        return queries[0], queries[1] if self.gated else None, k_SBGD, v_SBGE

    def _split(self, qkv_SBGR: Tensor) -> tuple[Tensor, ...]:
        """Split the R rows of every group into q, its gates, k and v."""
        if self.value_dim == self.head_dim:
            return _SplitQKV.apply(qkv_SBGR.unflatten(-1, (-1, self.head_dim)), self.gated)
        queries = qkv_SBGR.shape[-1] - self.head_dim - self.value_dim
        q, k_SBGD, v_SBGE = qkv_SBGR.split([queries, self.head_dim, self.value_dim], dim=-1)
        return q.unflatten(-1, (-1, self.head_dim)), k_SBGD, v_SBGE

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: AttentionMask | None) -> Tensor:
        """Return attention of x_SBH, in its shape.

        Args:
            rope: cos and sin [S, R/2] of the full sequence.
            visible: see CoreAttention.
        """
        with self.activations.offload_scope("qkv_linear"):
            q, gate, k_SBGD, v_SBGD = self._queries_keys_values(x_SBH)
            if gate is not None:
                gate = compact(gate.reshape(*gate.shape[:2], -1))
        v_SBGD = compact(v_SBGD) if self.value_scale is None else v_SBGD * self.value_scale
        if self.q_layernorm is not None or rope is None or not self.rope:
            k_SBGD = compact(k_SBGD)  # else rotated at once, into a separate storage
        if not self.normed_after_rope:
            q, k_SBGD = self._normalize(q, k_SBGD)
        q_SBND = q.reshape(*q.shape[:2], self.num_heads, self.head_dim)
        if rope is not None and self.rope:
            q_SBND = self.apply_rope(q_SBND, *rope, self.interleaved)
            k_SBGD = self.apply_rope(k_SBGD, *rope, self.interleaved)
        if self.normed_after_rope:
            q_SBND, k_SBGD = self._normalize(q_SBND, k_SBGD)
        if self.temperature is not None:
            q_SBND = (q_SBND * self.temperature.factors(q_SBND.shape[0], visible, q_SBND.device)).to(q_SBND.dtype)
        with self.activations.offload_scope("core_attn"):
            y = self.activations.recompute_region(
                "core_attn", lambda q, k, v: self._attend(q, k, v, visible), q_SBND, k_SBGD, v_SBGD
            )
        with self.activations.offload_scope("attn_proj"):
            return self.linear_proj(y if gate is None else SigmoidGate.apply(y, gate))

    def _normalize(self, q: Tensor, k_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normalized if they have norms."""
        if self.q_layernorm is None or self.k_layernorm is None:
            return q, k_SBGD
        return self.q_layernorm(q), self.k_layernorm(k_SBGD)

    def _attend(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, visible: AttentionMask | None) -> Tensor:
        if visible is not None and visible.cache is not None:
            return self._attend_with_cache(q_SBND, k_SBGD, v_SBGD, visible.cache)
        if self.training:
            self.max_logits.update(q_SBND, k_SBGD, visible)
        with rng_context(self.stream if self.training else None, q_SBND.device):
            return self.core_attention(q_SBND, k_SBGD, v_SBGD, visible, self.softmax_offset)

    def _attend_with_cache(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, cache: KVCache) -> Tensor:
        k_BKGD, v_BKGD = (
            cache.append(self.layer_number, name, x) for name, x in (("keys", k_SBGD), ("values", v_SBGD))
        )
        if cache.is_prefill:
            return self.core_attention(q_SBND, k_SBGD, v_SBGD, None, self.softmax_offset)
        options = self.core_attention.decode_options(q_SBND, cache, self.softmax_offset)
        return attend_to_keys(q_SBND[:, 0], k_BKGD, v_BKGD, *options).flatten(1).unsqueeze(1)
