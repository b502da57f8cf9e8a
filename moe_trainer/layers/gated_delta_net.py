"""Gated DeltaNet, the linear attention of Qwen3-Next (--experimental-attention-variant gated_delta_net).

in_proj makes [queries; keys; values; z; beta; alpha], each of all heads, as in Megatron-Core. q, k, v pass a short
convolution and the gated delta rule (ops/gated_delta_rule.py) with gates beta and alpha; then out_proj(out_norm(y) *
silu(z)). No rotary embedding. Tensor parallelism shards heads. A recurrence cannot be sharded by positions, so context
parallelism always exchanges positions for heads (a2a); z is not exchanged. Packed documents start with an empty state;
explicit attention masks are rejected.

Source: arXiv 2412.06464; Qwen3-Next; names and initialization of Megatron-Core.
Shapes: S sequence, B microbatch, H hidden, K key heads, N value heads, D and E their widths, A decays, C channels of
the convolution.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.causal_convolution import CausalConvolution
from moe_trainer.layers.context_parallel import all_to_all_heads_to_seq, all_to_all_seq_to_heads
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.init import hidden_init, make_parameter, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.linear import ColumnParallelLinear
from moe_trainer.layers.rotary import Tables
from moe_trainer.ops.attention import compact
from moe_trainer.ops.block_attention import Documents
from moe_trainer.ops.gated_delta_rule import Heads, continue_gated_delta
from moe_trainer.parallel.params import ParamInfo, get_param_info, set_param_info
from moe_trainer.parallel.state import Group, ParallelState

PROJECTIONS = ("query", "key", "value", "z", "beta", "alpha")


class OutputGate(torch.autograd.Function):
    """y * silu(z) or y * sigmoid(z), computed in fp32; saves both inputs as they are."""

    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, gate: "_Gate") -> Tensor:
        ctx.save_for_backward(y, z)
        ctx.gate = gate
        return torch.mul(y, gate.function(z.to(_wide(z))), out=torch.empty_like(y))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, z = ctx.saved_tensors
        wide = z.to(_wide(z))
        grad_y = torch.mul(grad, ctx.gate.function(wide), out=torch.empty_like(y))
        grad_z = ctx.gate.backward(torch.mul(grad, y, out=torch.empty_like(wide)), wide)
        return grad_y, grad_z.to(z.dtype), None


class _Gate(NamedTuple):
    """A function of z, and its backward of (gradient, z)."""

    function: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


SILU = _Gate(F.silu, torch.ops.aten.silu_backward)
SIGMOID = _Gate(torch.sigmoid, lambda grad, z: torch.ops.aten.sigmoid_backward(grad, z.sigmoid()))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer.

    Args:
        name: global name, e.g. "decoder.layers.0.self_attention".
        layer_number: counted from 1.
        sequence_parallel: see layers/linear.py.

    Attributes:
        gate: of the output.
        step_init: initial distribution of dt_bias.
    """

    gate = SILU
    step_init = "ones"

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
        keys, values, tp = model.linear_num_key_heads, model.linear_num_value_heads, ps.tp
        if keys % (tp.size * ps.context.max_size) or values % keys:
            raise ValueError(
                f"{name}: {keys} key heads and {values} value heads do not divide over {tp.size} tensor-parallel and "
                f"{ps.context.max_size} context-parallel ranks"
            )
        self.context, self.activations, self.gated_delta = ps.context, factory.activations, factory.kernels.gated_delta
        full = self._all_heads(model)
        self.heads = replace(full, keys=keys // tp.size, values=values // tp.size)
        sharding: dict[str, Any] = {"sharded_dim": 0, "shard_rank": tp.rank, "shard_count": tp.size}
        options: dict[str, Any] = {"group": tp, "sequence_parallel": sequence_parallel}
        self.layer_number = layer_number
        self._build_projections(model, full, name, factory, options)
        self.conv1d = CausalConvolution(
            full.channels,
            PROJECTIONS[:3],
            model.linear_conv_kernel_dim,
            name=f"{name}.conv1d",
            sharding=sharding,
        )
        info = ParamInfo((f"{name}.dt_bias",), init=self.step_init, **sharding)
        self.dt_bias = make_parameter((values // tp.size * full.decays,), info)
        self.A_log = make_parameter((values // tp.size,), ParamInfo((f"{name}.A_log",), init="log_uniform", **sharding))
        # one gain for all heads, of which this rank sees some
        self.out_norm = factory.norm(model.linear_value_head_dim, model, name=f"{name}.out_norm", partial=tp.size > 1)
        self.out_proj = factory.row_linear(
            values * full.value_dim,
            model.hidden_size,
            name=f"{name}.out_proj",
            init=residual_init(model),
            save_original_input="gdn_norm_out" in self.activations.recomputed,
            **options,
        )

    def _all_heads(self, model: ModelArgs) -> Heads:
        return Heads(
            model.linear_num_key_heads,
            model.linear_num_value_heads,
            model.linear_key_head_dim,
            model.linear_value_head_dim,
        )

    def _build_projections(
        self, model: ModelArgs, full: Heads, name: str, factory: LayerFactory, options: dict[str, Any]
    ) -> None:
        """Build what `_project` uses; `full` are the heads of all ranks."""
        sizes = (*full.channels, full.values * full.value_dim, full.values, full.values * full.decays)
        self.in_proj = self._make_in_proj(model, sizes, PROJECTIONS, name, factory, options)

    def _make_in_proj(
        self,
        model: ModelArgs,
        sizes: tuple[int, ...],
        names: tuple[str, ...],
        name: str,
        factory: LayerFactory,
        options: dict[str, Any],
    ) -> ColumnParallelLinear:
        in_proj = factory.column_linear(
            model.hidden_size,
            sum(sizes),
            name=f"{name}.in_proj",
            init=hidden_init(model),
            save_original_input="layernorm" in self.activations.recomputed,
            **options,
        )
        info = get_param_info(in_proj.weight)
        set_param_info(in_proj.weight, replace(info, parts=len(sizes), part_sizes=sizes, part_names=names))
        self.rows = [size // options["group"].size for size in sizes]
        return in_proj

    def _project(self, x_SBH: Tensor) -> tuple[Tensor, ...]:
        """Return x_SBC, z [S, B, N E], beta_SBN and alpha_SBA of all tokens."""
        return self.in_proj(x_SBH).split([sum(self.rows[:3]), *self.rows[3:]], -1)

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: AttentionMask | None) -> Tensor:
        """Return linear attention of x_SBH, in its shape; `rope` is not used.

        Raises:
            ValueError: for an explicit mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("gated DeltaNet layers know no explicit attention mask; give document ids")
        documents, size = (None, None) if visible is None else (visible.documents, visible.cp_size)
        cp = self.context.of(size)
        with self.activations.offload_scope("qkv_linear"):
            x, z_SBN, beta, alpha = self._project(x_SBH)
        with self.activations.offload_scope("core_attn"):
            if visible is not None and visible.cache is not None:
                y_SBN = self._mix_with_cache(x, beta, alpha, visible.cache)
            else:
                y_SBN = self._mix(x, beta, alpha, documents, cp)
            z_SBN = z_SBN if cp.size == 1 else compact(z_SBN)
            gated, inside = self.activations.recompute_output("gdn_norm_out", self._gated_norm, y_SBN, z_SBN)
        with inside, self.activations.offload_scope("attn_proj"):
            return self.out_proj(gated)

    def _mix(
        self, x_SBC: Tensor, beta_SBN: Tensor, alpha_SBA: Tensor, documents: Documents | None, cp: Group
    ) -> Tensor:
        """Apply the delta rule over the full sequence; return [S, B, N * E] of the local positions."""
        ids_BS, lengths = (None, ()) if documents is None else (documents.ids_BS, documents.lengths)
        weight, rates = self.conv1d.weight.squeeze(1), (self.A_log, self.dt_bias)
        if cp.size == 1:
            return self.gated_delta(x_SBC, beta_SBN, alpha_SBA, weight, *rates, self.heads, ids_BS).flatten(2)
        heads, (size, rank) = self.heads, (cp.size, cp.rank)
        q, k, v = x_SBC.split(heads.channels, -1)
        q, k = (each.unflatten(-1, (heads.keys, -1)) for each in (q, k))
        values = [
            v.unflatten(-1, (heads.values, -1)),
            beta_SBN.unsqueeze(-1),
            alpha_SBA.unflatten(-1, (heads.values, -1)),
        ]
        q, k, v, beta, alpha = all_to_all_seq_to_heads(cp, q, k, *values, lengths=lengths)
        weight_of_rank = torch.cat([part.chunk(size)[rank] for part in weight.split(heads.channels)])
        heads_of_rank = replace(heads, keys=heads.keys // size, values=heads.values // size)
        y = self.gated_delta(
            torch.cat([each.flatten(2) for each in (q, k, v)], -1),
            beta.squeeze(-1),
            alpha.flatten(2),
            weight_of_rank,
            *(rate.chunk(size)[rank] for rate in rates),
            heads_of_rank,
            ids_BS,
        )
        return all_to_all_heads_to_seq(cp, y.flatten(2), lengths)

    def _mix_with_cache(self, x_SBC: Tensor, beta_SBN: Tensor, alpha_SBA: Tensor, cache: KVCache) -> Tensor:
        """Apply the delta rule from the cached state, and store the state after every sequence's last token."""
        halo, number, state = self.conv1d.weight.shape[-1] - 1, self.layer_number, None
        if cache.is_prefill:
            # padding writes nothing and forgets nothing
            is_padding_SB1 = (
                torch.arange(x_SBC.shape[0], device=x_SBC.device)[:, None, None] >= cache.lengths_B[:, None]
            )
            beta_SBN, alpha_SBA = (x.masked_fill(is_padding_SB1, float("-inf")) for x in (beta_SBN, alpha_SBA))
        else:
            x_SBC, beta_SBN, alpha_SBA = (x.transpose(0, 1) for x in (x_SBC, beta_SBN, alpha_SBA))
            state = cache.get(number, "state")
        x_SBC = cache.convolution_inputs(number, x_SBC, halo)
        rates, weight_CW = (self.A_log, self.dt_bias), self.conv1d.weight.squeeze(1)
        y, state = continue_gated_delta(x_SBC, beta_SBN, alpha_SBA, weight_CW, *rates, self.heads, state)
        cache.put(number, "state", state)
        y_SBN = y.flatten(2)
        return y_SBN if cache.is_prefill else y_SBN.transpose(0, 1)

    def _gated_norm(self, y_SBN: Tensor, z_SBN: Tensor) -> Tensor:
        return OutputGate.apply(
            self.out_norm(y_SBN.unflatten(-1, (self.heads.values, -1))).flatten(2), z_SBN, self.gate
        )
