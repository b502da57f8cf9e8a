"""Gated short convolution, which mixes neighboring positions (--experimental-attention-variant short_conv, LFM2).

in_proj makes [before; after; x] of all channels: y = out_proj(after * conv(before * x)), a causal convolution of each
channel. No rotary embedding, no state but the last inputs. Tensor parallelism shards channels. A convolution needs
earlier positions, so context parallelism exchanges positions for channels (a2a). Packed documents start from zeros;
explicit attention masks are rejected.

Source: transformers' lfm2_moe; Megatron-Core has no such layer: the names are ours.
Shapes: S sequence, B microbatch, H hidden, C channels of this rank, W width of the convolution.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.causal_convolution import CausalConvolution
from moe_trainer.layers.context_parallel import all_to_all_heads_to_seq, all_to_all_seq_to_heads
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.rotary import Tables
from moe_trainer.ops.block_attention import Documents
from moe_trainer.ops.gated_delta_rule import causal_convolution
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.state import Group, ParallelState

PROJECTIONS = ("before", "after", "x")


class _GatedConvolution(torch.autograd.Function):
    """after * conv(before * x); saves its inputs, backward computes it again."""

    @staticmethod
    def forward(ctx, parts: Tensor, weight_CW: Tensor, ids_BS: Tensor | None) -> Tensor:
        ctx.save_for_backward(parts, weight_CW)
        ctx.ids_BS = ids_BS
        return _mix(parts, weight_CW, ids_BS)

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            parts, weight_CW = leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            y = _mix(parts, weight_CW, ctx.ids_BS)
        return *torch.autograd.grad(y, leaves, grad), None


def _mix(parts: Tensor, weight_CW: Tensor, ids_BS: Tensor | None) -> Tensor:
    before, after, x = parts.chunk(3, -1)
    return after * causal_convolution(before * x, weight_CW, ids_BS, activation=None)


class ShortConvolution(nn.Module):
    """Gated short convolution of one layer.

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
        hidden, tp = model.hidden_size, ps.tp
        if hidden % (tp.size * ps.context.max_size):
            raise ValueError(
                f"{name}: {hidden} channels do not divide over {tp.size} tensor-parallel and {ps.context.max_size} "
                "context-parallel ranks"
            )
        self.context, self.activations, self.layer_number = ps.context, factory.activations, layer_number
        sharding: dict[str, Any] = {"sharded_dim": 0, "shard_rank": tp.rank, "shard_count": tp.size}
        options = {"group": tp, "sequence_parallel": sequence_parallel}
        self.in_proj = factory.column_linear(
            hidden,
            3 * hidden,
            name=f"{name}.in_proj",
            init=hidden_init(model),
            save_original_input="layernorm" in self.activations.recomputed,
            **options,
        )
        info = get_param_info(self.in_proj.weight)
        set_param_info(self.in_proj.weight, replace(info, parts=3, part_sizes=(hidden,) * 3, part_names=PROJECTIONS))
        self.conv1d = CausalConvolution(
            (hidden,), (), model.linear_conv_kernel_dim, name=f"{name}.conv1d", sharding=sharding
        )
        self.out_proj = factory.row_linear(
            hidden, hidden, name=f"{name}.out_proj", init=residual_init(model), **options
        )

    def forward(self, x_SBH: Tensor, rope: Tables | None, visible: AttentionMask | None) -> Tensor:
        """Return the mixed x_SBH, in its shape; `rope` is not used.

        Raises:
            ValueError: for an explicit mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("short convolutions know no explicit attention mask; give document ids")
        documents, size = (None, None) if visible is None else (visible.documents, visible.cp_size)
        with self.activations.offload_scope("qkv_linear"):
            parts = self.in_proj(x_SBH)
        with self.activations.offload_scope("core_attn"):
            if visible is not None and visible.cache is not None:
                y = self._mix_with_cache(parts, visible.cache)
            else:
                y = self._mix(parts, documents, self.context.of(size))
        with self.activations.offload_scope("attn_proj"):
            return self.out_proj(y)

    def _mix(self, parts: Tensor, documents: Documents | None, cp: Group) -> Tensor:
        """Return the mixed channels [S, B, C] of the local positions."""
        ids_BS, lengths = (None, ()) if documents is None else (documents.ids_BS, documents.lengths)
        weight_CW = self.conv1d.weight.squeeze(1)
        if cp.size == 1:
            return _GatedConvolution.apply(parts, weight_CW, ids_BS)
        shares = [part.unflatten(-1, (cp.size, -1)) for part in parts.chunk(3, -1)]
        mine = torch.cat([x.flatten(2) for x in all_to_all_seq_to_heads(cp, *shares, lengths=lengths)], -1)
        y = _GatedConvolution.apply(mine, weight_CW.chunk(cp.size)[cp.rank], ids_BS)
        return all_to_all_heads_to_seq(cp, y, lengths)

    def _mix_with_cache(self, parts: Tensor, cache: KVCache) -> Tensor:
        """Mix with the cached inputs, and store those of every sequence's last positions."""
        weight_CW = self.conv1d.weight.squeeze(1)
        halo = weight_CW.shape[1] - 1
        if not cache.is_prefill:
            parts = parts.transpose(0, 1)
        before, after, x = parts.chunk(3, -1)
        inputs_SBC = cache.convolution_inputs(self.layer_number, before * x, halo)
        y_SBC = after * causal_convolution(inputs_SBC, weight_CW, activation=None)[halo:]
        return y_SBC if cache.is_prefill else y_SBC.transpose(0, 1)
