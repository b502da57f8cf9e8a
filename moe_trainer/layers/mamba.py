"""The mixer of a Mamba-2 layer (M of --hybrid-layer-pattern).

in_proj makes [z; x; b; c; dt], each of all heads or groups, as in Megatron-Core. ops/state_space.py computes the rest,
then out_proj. No rotary embedding. Tensor parallelism shards heads and groups. A recurrence cannot be sharded by
positions, so context parallelism always exchanges positions for heads and groups (a2a), as Megatron-Core does. Packed
documents start with an empty state; explicit attention masks are rejected.

Source: arXiv 2405.21060; names and initialization of Megatron-Core.
Shapes: S sequence, B microbatch, H hidden, and those of ops/state_space.py.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.causal_convolution import CausalConvolution
from moe_trainer.layers.context_parallel import all_to_all_heads_to_seq, all_to_all_seq_to_heads
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.init import hidden_init, make_parameter, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.rotary import Tables
from moe_trainer.ops.block_attention import Documents
from moe_trainer.ops.block_sizes import MAMBA_CONV_WIDTH as CONV_WIDTH
from moe_trainer.ops.state_space import StateSpaceParams, StateSpaceSizes, continue_state_space, state_space
from moe_trainer.parallel.params import ParamInfo, get_param_info, set_param_info
from moe_trainer.parallel.state import Group, ParallelState

PROJECTIONS = ("z", "x", "B", "C", "dt")


class _Gain(nn.Module):
    """The weight of the gated norm, of this rank's heads."""

    def __init__(self, size: int, name: str, sharding: dict[str, Any]):
        super().__init__()
        self.weight = make_parameter((size,), ParamInfo((f"{name}.weight",), init="ones", **sharding))


class MambaMixer(nn.Module):
    """Mamba-2 of one layer.

    Args:
        name: global name, e.g. "decoder.layers.0.mixer".
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
        heads, groups, tp = model.mamba_heads, model.mamba_num_groups, ps.tp
        limits = model.mamba_step_size_min or 0.0, model.mamba_step_size_max or math.inf
        full = StateSpaceSizes(heads, groups, model.mamba_head_dim, model.mamba_state_dim, limits)
        if groups % (tp.size * ps.context.max_size) or heads % groups:
            raise ValueError(
                f"{name}: {heads} heads and {groups} groups do not divide over {tp.size} tensor-parallel and "
                f"{ps.context.max_size} context-parallel ranks"
            )
        self.sizes = replace(full, heads=heads // tp.size, groups=groups // tp.size)
        self.context, self.activations, self.layer_number = ps.context, factory.activations, layer_number
        sharding: dict[str, Any] = {"sharded_dim": 0, "shard_rank": tp.rank, "shard_count": tp.size}
        options = {"group": tp, "sequence_parallel": sequence_parallel}
        sizes = (full.inner, *full.channels, heads)
        self.in_proj = factory.column_linear(
            model.hidden_size,
            sum(sizes),
            name=f"{name}.in_proj",
            init=hidden_init(model),
            save_original_input="layernorm" in self.activations.recomputed,
            **options,
        )
        info = get_param_info(self.in_proj.weight)
        set_param_info(self.in_proj.weight, replace(info, parts=5, part_sizes=sizes, part_names=PROJECTIONS))
        self.conv1d = CausalConvolution(
            full.channels, PROJECTIONS[1:4], CONV_WIDTH, name=f"{name}.conv1d", sharding=sharding, bias=True
        )
        count = (self.sizes.heads,)
        self.dt_bias = make_parameter(count, ParamInfo((f"{name}.dt_bias",), init="log_step", **sharding))
        self.A_log = make_parameter(count, ParamInfo((f"{name}.A_log",), init="log_uniform", **sharding))
        self.D = make_parameter(count, ParamInfo((f"{name}.D",), init="ones", **sharding))
        self.norm = _Gain(self.sizes.inner, f"{name}.norm", sharding)
        self.out_proj = factory.row_linear(
            full.inner, model.hidden_size, name=f"{name}.out_proj", init=residual_init(model), **options
        )

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: AttentionMask | None) -> Tensor:
        """Return the mixed x_SBH, in its shape; `rope` is not used.

        Raises:
            ValueError: for an explicit mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("Mamba layers know no explicit attention mask; give document ids")
        with self.activations.offload_scope("qkv_linear"):
            z_SBI, x_SBC, dt_SBH = self.in_proj(x_SBH).split(
                [self.sizes.inner, sum(self.sizes.channels), self.sizes.heads], -1
            )
        params = StateSpaceParams(
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.A_log,
            self.dt_bias,
            self.D,
            self.norm.weight,
        )
        with self.activations.offload_scope("core_attn"):
            if visible is not None and visible.cache is not None:
                y_SBI = self._mix_with_cache(z_SBI, x_SBC, dt_SBH, params, visible.cache)
            else:
                documents, size = (None, None) if visible is None else (visible.documents, visible.cp_size)
                y_SBI = self._mix(z_SBI, x_SBC, dt_SBH, params, documents, self.context.of(size))
        with self.activations.offload_scope("attn_proj"):
            return self.out_proj(y_SBI)

    def _mix(
        self,
        z_SBI: Tensor,
        x_SBC: Tensor,
        dt_SBH: Tensor,
        params: StateSpaceParams,
        documents: Documents | None,
        cp: Group,
    ) -> Tensor:
        """Apply the state space to the full sequence; return [S, B, I] of the local positions."""
        ids_BS, lengths = (None, ()) if documents is None else (documents.ids_BS, documents.lengths)
        if cp.size == 1:
            return state_space(z_SBI, x_SBC, dt_SBH, params, self.sizes, ids_BS)
        sizes, (size, rank) = self.sizes, (cp.size, cp.rank)
        x, b, c = x_SBC.split(sizes.channels, -1)
        by_head = (each.unflatten(-1, (sizes.heads, -1)) for each in (z_SBI, x, dt_SBH))
        by_group = (each.unflatten(-1, (sizes.groups, -1)) for each in (b, c))
        z, x, dt, b, c = (each.flatten(2) for each in all_to_all_seq_to_heads(cp, *by_head, *by_group, lengths=lengths))
        convolution, others = params[:2], params[2:]
        y = state_space(
            z,
            torch.cat([x, b, c], -1),
            dt,
            StateSpaceParams(
                *(torch.cat([part.chunk(size)[rank] for part in full.split(sizes.channels)]) for full in convolution),
                *(full.chunk(size)[rank] for full in others),
            ),
            replace(sizes, heads=sizes.heads // size, groups=sizes.groups // size),
            ids_BS,
        )
        return all_to_all_heads_to_seq(cp, y, lengths)

    def _mix_with_cache(
        self, z_SBI: Tensor, x_SBC: Tensor, dt_SBH: Tensor, params: StateSpaceParams, cache: KVCache
    ) -> Tensor:
        """Continue from the cached state, and store the state after every sequence's last token."""
        number, state = self.layer_number, None
        if cache.is_prefill:
            positions_S11 = torch.arange(x_SBC.shape[0], device=x_SBC.device)[:, None, None]
            dt_SBH = dt_SBH.masked_fill(positions_S11 >= cache.lengths_B[:, None], float("-inf"))
        else:  # one token of each sequence, laid out as one sequence
            z_SBI, x_SBC, dt_SBH = (each.transpose(0, 1) for each in (z_SBI, x_SBC, dt_SBH))
            state = cache.get(number, "state")
        x_SBC = cache.convolution_inputs(number, x_SBC, CONV_WIDTH - 1)
        y_SBI, state = continue_state_space(z_SBI, x_SBC, dt_SBH, params, self.sizes, state)
        cache.put(number, "state", state)
        return y_SBI if cache.is_prefill else y_SBI.transpose(0, 1)
