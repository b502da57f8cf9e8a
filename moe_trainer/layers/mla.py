"""Multi-head latent attention: low-rank latents for queries and key-values, one rotary key for all heads.

Training form: latents are expanded to full heads, unless sparse attention gathers the latents (layers/absorbed_mla.py).
Rows of the up-projections are ordered by head: q [nope, rope], kv [k_nope, v]. The rotary part is rotated in
interleaved pairs. --head-wise-attn-gate multiplies the output of every head by the sigmoid of one number of the token.

Tensor parallelism shards heads: up-projections are sharded, the small down-projections replicated (under sequence
parallelism on local tokens), and so is that to the gates. The gradient of the shared rotary key is summed over the
group (Megatron-Core's local layers lose the other ranks' part).
Source: DeepSeek-V2 (arXiv 2405.04434); names of Megatron-Core.
Shapes: S sequence, B microbatch, H hidden, N local heads, D key width (nope + rope), E value width, C latent width.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arguments.layer_pattern import model_of_layer
from arguments.mechanisms.sublayers import variant_of
from arguments.model import ModelArgs
from moe_trainer.layers.absorbed_mla import CompressedKV
from moe_trainer.layers.attention import SigmoidGate
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention, make_attention_sinks
from moe_trainer.layers.dropout import rng_context
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.linear import ParallelLinear, ReplicatedLinear
from moe_trainer.layers.lora import effective_weight
from moe_trainer.layers.max_logits import MaxLogitTracker
from moe_trainer.layers.query_temperature import QueryTemperature
from moe_trainer.layers.rotary import Tables, skips_rope
from moe_trainer.layers.sparse_attention import SparseAttention
from moe_trainer.layers.te_layers import FusedAttention
from moe_trainer.ops.attention import compact, pad_values
from moe_trainer.ops.cached_attention import attend_to_latents
from moe_trainer.ops.rope import yarn_mscale
from moe_trainer.parallel.mappings import copy_to_group, gather_rows_from_group
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.state import ParallelState


class MultiLatentAttention(nn.Module):
    """Latent attention of one layer.

    With --q-lora-rank the query has a latent too; with --qk-layernorm both latents are normalized.

    Args:
        name: global name, e.g. "decoder.layers.0.self_attention".
        layer_number: counted from 1.
        sequence_parallel: see layers/linear.py.
        per_token_loss: of an indexer (layers/sparse_attention.py).
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
        per_token_loss: bool = False,
    ):
        super().__init__()
        model = model_of_layer(model, layer_number)
        heads = model.num_attention_heads
        if heads % ps.tp.size:
            raise ValueError(f"{name}: {heads} heads do not divide over {ps.tp.size} tensor-parallel ranks")
        self.tp, self.sequence_parallel = ps.tp, sequence_parallel
        self.layer_number, self.num_heads = layer_number, heads // ps.tp.size
        self.nope_dim, self.rope_dim = model.qk_head_dim, model.qk_pos_emb_head_dim
        self.value_dim, self.kv_rank = model.v_head_dim, model.kv_lora_rank
        self.rope = not skips_rope(model, layer_number)
        self.temperature = QueryTemperature.of(model, layer_number, ps.context)
        self.stream = factory.stream if model.attention_dropout > 0.0 else None
        self.activations, self.apply_rope = factory.activations, factory.kernels.apply_rope
        key_dim = self.nope_dim + self.rope_dim
        options: dict[str, Any] = {"group": ps.tp, "sequence_parallel": sequence_parallel}
        self._build_projections(model, ps, name, factory, options)
        temperature = yarn_mscale(model.rotary_scaling_factor, model.mscale_all_dim)
        scale = temperature * temperature / math.sqrt(key_dim)
        self.core_attention: CoreAttention | FusedAttention
        if variant_of(model).selects_keys:
            self.core_attention = SparseAttention(
                model,
                ps,
                layer_number,
                name=f"{name}.core_attention",
                scale=scale,
                factory=factory,
                sequence_parallel=sequence_parallel,
                per_token_loss=per_token_loss,
            )
        else:
            self.core_attention = factory.core_attention(model, layer_number, head_dim=key_dim, scale=scale)
        self.max_logits = MaxLogitTracker(model, layer_number, scale, ps.context)
        # where its inputs are not saved, attention saves them as they come, and they come as it would save them
        self.core_attention.should_save_inputs = "mla_up_proj" in factory.activations.recomputed
        self.core_attention.value_width = self.value_dim
        self.softmax_offset = make_attention_sinks(model, name, ps.tp)
        # few rows, which no format of blocks divides: never quantized
        self.linear_gate = (
            ReplicatedLinear(
                model.hidden_size,
                heads,
                name=f"{name}.linear_gate",
                init=hidden_init(model),
                queue=factory.queue,
                **options,
            )
            if model.head_wise_attn_gate
            else None
        )
        options |= {"init": residual_init(model), "bias": model.add_bias_linear}
        self.linear_proj = factory.row_linear(
            heads * self.value_dim,
            model.hidden_size,
            name=f"{name}.linear_proj",
            # attention saves its output too, unless it is recomputed, and so does a gate
            save_original_input="core_attn" not in factory.activations.recomputed and self.linear_gate is None,
            **options,
        )

    def _build_projections(
        self, model: ModelArgs, ps: ParallelState, name: str, factory: LayerFactory, options: dict[str, Any]
    ) -> None:
        """Build the projections to queries and latents, their norms, and those from latents to all heads."""
        heads, key_dim, init = model.num_attention_heads, self.nope_dim + self.rope_dim, hidden_init(model)
        # down projections read one input; norms, recomputed projections and indexers keep latents
        keeps_latents = (
            not model.qk_layernorm or "mla_up_proj" in factory.activations.recomputed or variant_of(model).selects_keys
        )

        def linear(
            make: Callable[..., ParallelLinear], in_features: int, out_features: int, leaf: str
        ) -> ParallelLinear:
            original = make is down or leaf == "linear_q_proj" or keeps_latents
            return make(
                in_features, out_features, name=f"{name}.{leaf}", init=init, save_original_input=original, **options
            )

        def norm(size: int, leaf: str) -> nn.Module | None:
            partial = self.sequence_parallel and ps.tp.size > 1
            if not model.qk_layernorm:
                return None
            return factory.norm(size, model.of_latents, name=f"{name}.{leaf}", partial=partial)

        up, down = factory.column_linear, factory.replicated_linear
        self.linear_qkv_down_proj = self.linear_q_proj = self.q_layernorm = None
        kv_width = self.kv_rank + self.rope_dim
        self.down_widths = model.q_lora_rank or 0, kv_width
        if model.q_lora_rank is None:
            self.linear_q_proj = linear(up, model.hidden_size, heads * key_dim, "linear_q_proj")
        else:
            if model.mla_down_proj_fusion:
                self.linear_qkv_down_proj = self._fused_down_proj(linear, down, model, name, self.down_widths)
            else:
                self.linear_q_down_proj = linear(down, model.hidden_size, model.q_lora_rank, "linear_q_down_proj")
            self.q_layernorm = norm(model.q_lora_rank, "q_layernorm")
            self.linear_q_up_proj = linear(up, model.q_lora_rank, heads * key_dim, "linear_q_up_proj")
        if self.linear_qkv_down_proj is None:
            self.linear_kv_down_proj = linear(down, model.hidden_size, kv_width, "linear_kv_down_proj")
        self.kv_layernorm = norm(self.kv_rank, "kv_layernorm")
        kv_rows = heads * (self.nope_dim + self.value_dim)
        self.linear_kv_up_proj = linear(up, self.kv_rank, kv_rows, "linear_kv_up_proj")

    def _fused_down_proj(
        self,
        linear: Callable[..., ParallelLinear],
        down: Callable[..., ParallelLinear],
        model: ModelArgs,
        name: str,
        counts: tuple[int, int],
    ) -> ParallelLinear:
        """Return one projection to both latents; initial values and checkpoints are those of two."""
        fused = linear(down, model.hidden_size, sum(counts), "linear_qkv_down_proj")
        names = tuple(f"{name}.{leaf}.weight" for leaf in ("linear_q_down_proj", "linear_kv_down_proj"))
        set_param_info(fused.weight, replace(get_param_info(fused.weight), names=names, row_counts=counts))
        return fused

    def _project_down(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized query latent, or the queries if there is none, and latents with their rotary key."""
        if self.linear_qkv_down_proj is not None:
            q_latent, kv = self.linear_qkv_down_proj(x_SBH).split(self.down_widths, dim=-1)
        else:
            q_latent = (self.linear_q_proj or self.linear_q_down_proj)(x_SBH)
            kv = self.linear_kv_down_proj(x_SBH)
        return q_latent if self.q_layernorm is None else self.q_layernorm(q_latent), kv

    def _queries(self, rope: Tables | None, visible: AttentionMask | None, q_latent: Tensor) -> Tensor:
        """Return q_SBND, rotated and multiplied by its temperature."""
        q = q_latent if self.linear_q_proj is not None else self.linear_q_up_proj(q_latent)
        q_SBND = q.view(*q.shape[:2], self.num_heads, -1)
        if rope is not None and self.rope:
            q_SBND = self.apply_rope(q_SBND, *rope, interleaved=True, offset=self.nope_dim)
        if self.temperature is None:
            return q_SBND
        return (q_SBND * self.temperature.factors(q_SBND.shape[0], visible, q_SBND.device)).to(q_SBND.dtype)

    def _gates(self, x_SBH: Tensor) -> Tensor | None:
        """Return the gates of the local heads before the sigmoid, [S, B, N], or None."""
        if self.linear_gate is None:
            return None
        return compact(self._to_all_heads(self.linear_gate(x_SBH)).chunk(self.tp.size, dim=-1)[self.tp.rank])

    def _project_output(self, y: Tensor, gate_SBN: Tensor | None) -> Tensor:
        """Return the layer's output for the outputs of all local heads, [S, B, N * E]."""
        if gate_SBN is not None:
            y = SigmoidGate.apply(y.unflatten(-1, (self.num_heads, -1)), gate_SBN.unsqueeze(-1)).flatten(2)
        return self.linear_proj(y)

    def _to_all_heads(self, x: Tensor) -> Tensor:
        """Return all tokens; backward sums the gradient over the ranks' heads."""
        return (gather_rows_from_group if self.sequence_parallel else copy_to_group)(x, self.tp)

    def _rotated(self, rope: Tables | None, k_rope: Tensor) -> Tensor:
        """Return the rotated key of all heads, [S, B, 1, rope_dim]."""
        k_rope = k_rope.unsqueeze(2)
        return k_rope if rope is None or not self.rope else self.apply_rope(k_rope, *rope, interleaved=True)

    def _expand(
        self, rope: Tables | None, visible: AttentionMask | None, q_latent: Tensor, latent_SBC: Tensor, k_rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_SBND, k_SBND and v_SBNE (see should_pad_values) from latents.

        Args:
            k_rope: [S, B, rope_dim] of the local tokens.
        """
        q_SBND = self._queries(rope, visible, q_latent)
        heads = q_SBND.shape[:3]
        kv = self.linear_kv_up_proj(latent_SBC).view(*heads, -1)
        k_nope, v_SBNE = kv.split([self.nope_dim, self.value_dim], dim=-1)
        if self.core_attention.should_save_inputs and self.core_attention.should_pad_values(
            heads[0], visible, q_SBND.device
        ):
            v_SBNE = pad_values(v_SBNE, self.nope_dim + self.rope_dim)
        v_SBNE = compact(v_SBNE)
        k_rope = self._rotated(rope, self._to_all_heads(k_rope))
        return q_SBND, torch.cat([k_nope, k_rope.expand(*heads, -1)], dim=-1), v_SBNE

    def _leave(
        self, rope: Tables | None, visible: AttentionMask | None, q_latent: Tensor, latent_SBC: Tensor, k_rope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return q_SBND, and latents with their rotated key [S, B, C + rope_dim]."""
        all_SBC = self._to_all_heads(torch.cat([latent_SBC, k_rope], dim=-1))
        latent_SBC, k_rope = all_SBC.split([self.kv_rank, self.rope_dim], dim=-1)
        queries = self._queries(rope, visible, q_latent)
        return queries, torch.cat([latent_SBC, self._rotated(rope, k_rope).squeeze(2)], dim=-1)

    def forward(
        self, x_SBH: Tensor, rope: Tables | None, visible: AttentionMask | None, grad_scale: float | Tensor = 1.0
    ) -> Tensor:
        """Return attention of x_SBH, in its shape.

        Args:
            rope: cos and sin [S, rope_dim/2] of the full sequence.
            visible: see CoreAttention.
            grad_scale: of an indexer's loss.
        """
        with self.activations.offload_scope("qkv_linear"):
            q_latent, kv = self._project_down(x_SBH)
            gate_SBN = self._gates(x_SBH)
            latent_SBC, k_rope = kv.split([self.kv_rank, self.rope_dim], dim=-1)
            if self.kv_layernorm is not None:
                latent_SBC = self.kv_layernorm(latent_SBC)
            sparse = self.core_attention if isinstance(self.core_attention, SparseAttention) else None
            given, cache = visible, None if visible is None else visible.cache
            if cache is None:
                by_latents = sparse is not None and sparse.uses_gathered_form(
                    x_SBH.shape[0] * (self.tp.size if self.sequence_parallel else 1), visible
                )
            else:
                by_latents, visible = not cache.is_prefill, None
            make = (
                functools.partial(self._leave, rope, given)
                if by_latents
                else functools.partial(self._expand, rope, visible)
            )
            (q_SBND, *keys), inside = self.activations.recompute_output(
                "mla_up_proj", make, q_latent, latent_SBC, k_rope
            )
        if cache is not None:
            latents_BKW = self._append_latents(cache, latent_SBC, keys)
            select = None if sparse is None else self._append_index(sparse, cache, x_SBH, q_latent, rope)
            if not cache.is_prefill:
                y = self._attend_to_latents(cache, q_SBND, latents_BKW, select)
                return self._project_output(y, gate_SBN)
        with inside, self.activations.offload_scope("core_attn"):
            if sparse is not None:
                read = (x_SBH.detach(), (x_SBH if self.linear_q_proj is not None else q_latent).detach())
                y = self.activations.recompute_region(
                    "core_attn",
                    functools.partial(self._attend_sparsely, visible, rope, grad_scale),
                    *read,
                    q_SBND,
                    *keys,
                )
            else:
                y = self.activations.recompute_region(
                    "core_attn", lambda q, k, v: self._attend(q, k, v, visible), q_SBND, *keys
                )
        with self.activations.offload_scope("attn_proj"):
            return self._project_output(y, gate_SBN)

    def _attend(self, q_SBND: Tensor, k_SBND: Tensor, v_SBNE: Tensor, visible: AttentionMask | None) -> Tensor:
        if self.training:
            self.max_logits.update(q_SBND, k_SBND, visible)
        with rng_context(self.stream if self.training else None, q_SBND.device):
            return self.core_attention(q_SBND, k_SBND, v_SBNE, visible, self.softmax_offset)

    def _attend_sparsely(
        self,
        visible: AttentionMask | None,
        rope: Tables | None,
        grad_scale: float | Tensor,
        x_SBH: Tensor,
        latent: Tensor,
        q_SBND: Tensor,
        *keys: Tensor,
    ) -> Tensor:
        """Attend to selected keys. Does not track the largest logits; the flags exclude that.

        Args:
            keys: k_SBND and v_SBNE, or latents alone.
        """
        keys_or_latents = CompressedKV(*keys, effective_weight(self.linear_kv_up_proj)) if len(keys) == 1 else keys
        with rng_context(self.stream if self.training else None, q_SBND.device):
            return self.core_attention(q_SBND, keys_or_latents, visible, x_SBH, latent, rope, grad_scale)

    def _append_latents(self, cache: KVCache, latent_SBC: Tensor, keys: Sequence[Tensor]) -> Tensor:
        """Store the latents with their rotated key, which are `keys`, or in those of the heads; return all of them."""
        latents_SBW = keys[0]
        if cache.is_prefill:
            rotated_SBR = keys[0][:, :, 0, self.nope_dim :]
            latents_SBW = torch.cat([self._to_all_heads(latent_SBC), rotated_SBR], dim=-1)
        return cache.append(self.layer_number, "latents", latents_SBW)

    def _append_index(
        self, sparse: SparseAttention, cache: KVCache, x_SBH: Tensor, q_latent: Tensor, rope: Tables | None
    ) -> Callable[[Tensor], Tensor]:
        """Store the indexer's keys; return what selects from visible positions for this pass."""
        index = sparse.index(x_SBH, x_SBH if self.linear_q_proj is not None else q_latent, rope)
        keys = cache.append(self.layer_number, "index_keys", index.k_KBF)
        return functools.partial(sparse.select_in_cache, index, keys)

    def _attend_to_latents(
        self, cache: KVCache, q_SBND: Tensor, latents_BKW: Tensor, select: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """Attend to the cache: to all positions, or to those that an indexer selects."""
        scale, visible_BK, sink_N = self.core_attention.decode_options(q_SBND, cache, self.softmax_offset)
        if select is not None:
            visible_BK = select(visible_BK)
        weight_NFR = effective_weight(self.linear_kv_up_proj).unflatten(0, (self.num_heads, -1))
        out_BNE = attend_to_latents(q_SBND[:, 0], latents_BKW, weight_NFR, scale, visible_BK, sink_N)
        return out_BNE.flatten(1).unsqueeze(1)
