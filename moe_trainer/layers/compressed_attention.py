"""DeepSeek-V4's attention: a window of recent keys, and pooled keys of everything before.

--csa-compress-ratios gives each layer its kind: 0 has the window only; 4 pools overlapping windows of four tokens,
among which an indexer selects (compressed sparse attention, CSA); a larger ratio pools that many tokens, and all of
them are visible (heavily compressed attention, HCA). Keys are values: one head serves all query heads. The last
channels of a head are rotated, in interleaved pairs; the output is rotated back. Heads of a group share a low-rank
output projection.

Tensor parallelism shards heads and groups of the output. Projections to keys are replicated (under sequence parallelism
on local tokens); keys are pooled on every rank. The indexer gets no gradient.
Sources: the published model as transformers has it; names of Megatron-Core's dev branch.
Shapes: S sequence, B microbatch, H hidden, N local heads, D head width, C query latent, G local groups, T pooled keys,
I indexer heads, F their width.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.layer_pattern import OVERLAPPING_RATIO, compress_ratio
from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.init import hidden_init, make_parameter, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.norm import L2Norm
from moe_trainer.layers.rotary import Rotary, Tables, make_compressed_rotary
from moe_trainer.ops.compressed_attention import compressed_attention, pool_windows, select_pooled
from moe_trainer.ops.hadamard import rotate
from moe_trainer.parallel.mappings import copy_to_group, gather_rows, gather_rows_from_group, local_rows
from moe_trainer.parallel.params import ParamInfo, get_param_info, set_param_info
from moe_trainer.parallel.state import Group, ParallelState


class Compressor(nn.Module):
    """Pooled keys of `width` channels.

    Parameters, with Megatron-Core's names: linear_wkv and linear_wgate, ape [ratio, W], norm; W is twice the width for
    overlapping windows.
    """

    def __init__(
        self, model: ModelArgs, tp: Group, ratio: int, width: int, *, name: str, factory: LayerFactory, is_local: bool
    ):
        """Create the compressor `name`; `is_local`: its input is this rank's part of the tokens."""
        super().__init__()
        self.tp, self.is_local, self.ratio, self.overlapping = tp, is_local, ratio, ratio == OVERLAPPING_RATIO
        self.rope_offset = width - model.qk_pos_emb_head_dim
        self.apply_rope = factory.kernels.apply_rope
        outputs, init = width * (1 + self.overlapping), hidden_init(model)
        self.linear_wkv, self.linear_wgate = (
            factory.replicated_linear(
                model.hidden_size,
                outputs,
                name=f"{name}.{leaf}",
                group=tp,
                init=init,
                sequence_parallel=is_local,
                save_original_input=True,
            )
            for leaf in ("linear_wkv", "linear_wgate")
        )
        partial = tp.size > 1  # what is pooled has the gradients of this rank's heads
        info = ParamInfo((f"{name}.ape",), is_grad_partial=partial, init=init.kind, init_std=init.std)
        self.ape = make_parameter((ratio, outputs), info)
        self.norm = factory.norm(width, model, name=f"{name}.norm", partial=partial)

    def forward(self, x_SBH: Tensor, rotary: Rotary) -> Tensor:
        """Return the pooled keys of all tokens, [T, B, D], rotated by the position of their first token."""
        projected = torch.cat([self.linear_wkv(x_SBH), self.linear_wgate(x_SBH)], dim=-1)
        if self.tp.size > 1:
            projected = (gather_rows_from_group if self.is_local else copy_to_group)(projected, self.tp)
        keys, gates = projected.chunk(2, dim=-1)
        pooled_TBD = self.norm(pool_windows(keys, gates, self.ape, self.overlapping))
        positions = torch.arange(len(pooled_TBD), device=x_SBH.device) * self.ratio
        tables = rotary.tables_at(positions)
        return self.apply_rope(pooled_TBD.unsqueeze(2), *tables, True, self.rope_offset).squeeze(2)


class CompressedIndexer(nn.Module):
    """Selection of pooled keys by small heads; gets no gradient."""

    def __init__(self, model: ModelArgs, tp: Group, ratio: int, *, name: str, factory: LayerFactory):
        super().__init__()
        self.ratio, self.topk, self.relu = ratio, model.dsa_indexer_topk, model.dsa_indexer_scoring_relu
        self.heads, self.width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        self.rotates = model.dsa_indexer_rotate_activation
        self.rope_offset = self.width - model.qk_pos_emb_head_dim
        self.apply_rope = factory.kernels.apply_rope
        options: dict[str, Any] = {"group": tp, "init": hidden_init(model), "save_original_input": True}
        self.linear_wq_b = factory.replicated_linear(
            model.q_lora_rank, self.heads * self.width, name=f"{name}.linear_wq_b", **options
        )
        self.linear_weights_proj = factory.replicated_linear(
            model.hidden_size, self.heads, name=f"{name}.linear_weights_proj", **options
        )
        self.compressor = Compressor(
            model, tp, ratio, self.width, name=f"{name}.compressor", factory=factory, is_local=False
        )
        for param in self.parameters():
            set_param_info(param, replace(get_param_info(param), has_gradient=False))

    @torch.no_grad()
    def forward(self, x_SBH: Tensor, latent_SBC: Tensor, rotary: Rotary, tables: Tables) -> Tensor | None:
        """Return which pooled keys the queries of all tokens may see; see select_pooled."""
        if len(x_SBH) // self.ratio <= self.topk:
            return None
        q_SBIF = self.linear_wq_b(latent_SBC).unflatten(-1, (self.heads, self.width))
        q_SBIF = self.apply_rope(q_SBIF, *tables, True, self.rope_offset)
        k_TBF = self.compressor(x_SBH, rotary)
        if self.rotates:
            q_SBIF, k_TBF = rotate(q_SBIF), rotate(k_TBF)
        weights_SBI = self.linear_weights_proj(x_SBH)
        weights_SBI = weights_SBI.to(torch.promote_types(weights_SBI.dtype, torch.float32))
        weights_SBI = weights_SBI * (self.heads * self.width) ** -0.5
        return select_pooled(q_SBIF, k_TBF, weights_SBI, self.ratio, self.topk, self.relu)


class CompressedCoreAttention(nn.Module):
    """Attention of heads to the window and to the pooled keys; parameters: attn_sink [N], compressor, indexer."""

    def __init__(self, model: ModelArgs, tp: Group, ratio: int, *, name: str, factory: LayerFactory, is_local: bool):
        super().__init__()
        self.scale, self.window, self.ratio = model.v_head_dim**-0.5, model.csa_window_size, ratio
        info = ParamInfo((f"{name}.attn_sink",), sharded_dim=0, shard_rank=tp.rank, shard_count=tp.size, init="zeros")
        self.attn_sink = make_parameter((model.num_attention_heads // tp.size,), info)
        self.compressor = self.indexer = None
        if ratio:
            self.compressor = Compressor(
                model, tp, ratio, model.v_head_dim, name=f"{name}.compressor", factory=factory, is_local=is_local
            )
        if ratio == OVERLAPPING_RATIO and not model.csa_dense_mode:
            self.indexer = CompressedIndexer(model, tp, ratio, name=f"{name}.indexer", factory=factory)

    def forward(self, q_SBND: Tensor, kv_SBD: Tensor, pooled_TBD: Tensor, *selected_SBT: Tensor) -> Tensor:
        """Return [S, B, N, D]."""
        sink_N = self.attn_sink.to(torch.promote_types(q_SBND.dtype, torch.float32))
        return compressed_attention(
            q_SBND,
            kv_SBD,
            pooled_TBD,
            sink_N,
            *(selected_SBT or (None,)),
            scale=self.scale,
            window=self.window,
            ratio=max(1, self.ratio),
        )


class CompressedAttention(nn.Module):
    """Attention of one layer of DeepSeek-V4.

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
        heads, width, self.tp = model.num_attention_heads, model.v_head_dim, ps.tp
        self.layer_number, self.num_heads, self.width = layer_number, heads // ps.tp.size, width
        self.rope_offset = width - model.qk_pos_emb_head_dim
        self.is_local = sequence_parallel and ps.tp.size > 1
        self.activations, self.apply_rope = factory.activations, factory.kernels.apply_rope
        ratio = compress_ratio(model, layer_number - 1)
        self.rotary = make_compressed_rotary(model, is_compressed=ratio > 0)
        options: dict[str, Any] = {"group": ps.tp, "sequence_parallel": sequence_parallel, "save_original_input": True}
        init = hidden_init(model)
        self.linear_q_down_proj = factory.replicated_linear(
            model.hidden_size, model.q_lora_rank, name=f"{name}.linear_q_down_proj", init=init, **options
        )
        latents = model.of_latents
        self.q_layernorm = factory.norm(model.q_lora_rank, latents, name=f"{name}.q_layernorm", partial=self.is_local)
        self.linear_q_up_proj = factory.column_linear(
            model.q_lora_rank, heads * width, name=f"{name}.linear_q_up_proj", init=init, **options
        )
        self.q_head_norm = L2Norm(model.layernorm_epsilon, factory.kernels.rms_norm)
        self.linear_kv_proj = factory.replicated_linear(
            model.hidden_size, width, name=f"{name}.linear_kv_proj", init=init, **options
        )
        self.kv_layernorm = factory.norm(width, latents, name=f"{name}.kv_layernorm", partial=self.is_local)
        self.core_attention = CompressedCoreAttention(
            model, ps.tp, ratio, name=f"{name}.core_attention", factory=factory, is_local=self.is_local
        )
        self.num_groups = model.o_groups // ps.tp.size
        info = ParamInfo(
            (f"{name}.linear_o_group_proj",),
            sharded_dim=0,
            shard_rank=ps.tp.rank,
            shard_count=ps.tp.size,
            init=init.kind,
            init_std=init.std,
        )
        group_width = heads * width // model.o_groups
        self.linear_o_group_proj = make_parameter((self.num_groups * model.o_lora_rank, group_width), info)
        self.linear_proj = factory.row_linear(
            model.o_groups * model.o_lora_rank,
            model.hidden_size,
            name=f"{name}.linear_proj",
            init=residual_init(model),
            **options,
        )

    def _of_all_tokens(self, x: Tensor) -> Tensor:
        """Return all tokens; backward sums the gradient over the ranks' heads."""
        return (gather_rows_from_group if self.is_local else copy_to_group)(x, self.tp)

    def forward(self, x_SBH: Tensor, _rope: Tables | None, visible: AttentionMask | None) -> Tensor:
        """Return attention of x_SBH, in its shape; positions are those of `rotary`.

        Raises:
            ValueError: for a mask or documents.
        """
        cache = None if visible is None else visible.cache
        if visible is not None and cache is None:
            raise ValueError("DeepSeek-V4's attention is not built for masks and documents")
        y_SBO = self._attend(x_SBH) if cache is None else self._attend_with_cache(x_SBH, cache)
        with self.activations.offload_scope("attn_proj"):
            return self.linear_proj(y_SBO)

    def _attend(self, x_SBH: Tensor) -> Tensor:
        """Return the outputs of the groups of heads of all tokens, [S, B, G * rank]."""
        with self.activations.offload_scope("qkv_linear"):
            latent_SBC = self.q_layernorm(self.linear_q_down_proj(x_SBH))
            q_SBND = self.q_head_norm(self.linear_q_up_proj(latent_SBC).unflatten(-1, (self.num_heads, self.width)))
            tables = self.rotary.tables(len(q_SBND), x_SBH.device)
            q_SBND = self.apply_rope(q_SBND, *tables, True, self.rope_offset)
            kv_SBD = self._of_all_tokens(self.kv_layernorm(self.linear_kv_proj(x_SBH)))
            kv_SBD = self.apply_rope(kv_SBD.unsqueeze(2), *tables, True, self.rope_offset).squeeze(2)
            compressor = self.core_attention.compressor
            pooled_TBD = kv_SBD[:0] if compressor is None else compressor(x_SBH, self.rotary)
            selected = self._select(x_SBH, latent_SBC, tables)
        with self.activations.offload_scope("core_attn"):
            y_SBND = self.activations.recompute_region(
                "core_attn", self.core_attention, q_SBND, kv_SBD, pooled_TBD, *selected
            )
            cos, sin = tables
            y_SBND = self.apply_rope(y_SBND, cos, -sin, True, self.rope_offset)  # values carry their positions
        with self.activations.offload_scope("attn_proj"):
            weight_GRD = self.linear_o_group_proj.unflatten(0, (self.num_groups, -1))
            y_SBGD = y_SBND.flatten(2).unflatten(-1, (self.num_groups, -1))
            return torch.einsum("sbgd,grd->sbgr", y_SBGD, weight_GRD).flatten(2)

    def _attend_with_cache(self, x_SBH: Tensor, cache: KVCache) -> Tensor:
        """Keep the inputs of all positions, and compute their attention again at every token."""
        x_BKH = cache.append(self.layer_number, "inputs", gather_rows(x_SBH, self.tp)[0] if self.is_local else x_SBH)
        if cache.is_prefill:
            return self._attend(x_SBH)
        x_KBH = x_BKH.transpose(0, 1)
        if self.is_local:
            x_KBH = local_rows(F.pad(x_KBH, (0, 0, 0, 0, 0, -len(x_KBH) % self.tp.size)), self.tp)
        y_KBO = self._attend(x_KBH)
        return y_KBO[cache.last_positions, torch.arange(y_KBO.shape[1], device=y_KBO.device)].unsqueeze(1)

    def _select(self, x_SBH: Tensor, latent_SBC: Tensor, tables: Tables) -> tuple[Tensor, ...]:
        """Return the indexer's selection, or nothing if all pooled keys of the past are visible."""
        indexer = self.core_attention.indexer
        if indexer is None:
            return ()
        read = [x.detach() for x in (x_SBH, latent_SBC)]
        if self.is_local:
            read = [gather_rows(x, self.tp)[0] for x in read]
        selected = indexer(*read, self.rotary, tables)
        return () if selected is None else (selected,)
