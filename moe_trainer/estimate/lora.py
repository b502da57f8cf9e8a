"""Low-rank adapters (--lora-dim): the linears that have one, their parameters and multiply-adds, from flags alone.

An adapter of a linear from i to o features has dim * (i + o) parameters. On a rank A or B is sharded as layers/lora.py
says; an expert's adapter is sharded like the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    has_attention,
    has_mlp,
    is_linear,
    layer_letter,
    model_of_layer,
    moe_layer_pattern,
)
from arguments.lora import is_lora_target
from moe_trainer.estimate.linear_attention import linear_matrices

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear of a layer that may have an adapter.

    Attributes:
        sharded: features that are sharded: "in", "out" or "".
        is_expert: every routed expert has one.
    """

    name: str
    in_features: int
    out_features: int
    sharded: str
    is_expert: bool = False

    def params(self, dim: int, ranks: int) -> int:
        """Return the adapter's parameters on one of `ranks` that share the linear."""
        down, up = dim * self.in_features, dim * self.out_features
        return (down // ranks if self.sharded == "in" else down) + (up // ranks if self.sharded == "out" else up)


def adapted_linears(args: Arguments, number: int) -> list[AdaptedLinear]:
    """Return the linears of decoder layer `number` (from 0) that have adapters; none of MTP layers."""
    if args.model.lora_dim is None or number >= args.model.num_layers:
        return []
    model, found = args.model, list[AdaptedLinear]()
    if layer_letter(model, number) == MAMBA:
        found += _mamba(args)
    elif has_attention(model, number):
        found += _linear_attention(args) if is_linear(model, number) else _attention(model_of_layer(model, number + 1))
    if has_mlp(model, number):
        pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        found += _moe(args) if pattern[number] else _mlp(args, "mlp", model.ffn_hidden_size)
    targets = model.lora_target_modules
    return [each for each in found if is_lora_target(f"decoder.layers.{number}.{each.name}", targets)]


def _attention(model: ModelArgs) -> Iterator[AdaptedLinear]:
    path = "self_attention"
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        queries = heads * model.kv_channels
        rows = queries * (1 + model.attention_output_gate)
        rows += model.query_groups * (model.kv_channels + model.value_width)
        yield AdaptedLinear(f"{path}.linear_qkv", hidden, rows, "out")
        yield AdaptedLinear(f"{path}.linear_proj", heads * model.value_width, hidden, "in")
        return
    key = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    if model.q_lora_rank is None:
        yield AdaptedLinear(f"{path}.linear_q_proj", hidden, key, "out")
    else:
        yield AdaptedLinear(f"{path}.linear_q_down_proj", hidden, model.q_lora_rank, "")
        yield AdaptedLinear(f"{path}.linear_q_up_proj", model.q_lora_rank, key, "out")
    yield AdaptedLinear(f"{path}.linear_kv_down_proj", hidden, model.kv_lora_rank + model.qk_pos_emb_head_dim, "")
    rows = heads * (model.qk_head_dim + model.v_head_dim)
    yield AdaptedLinear(f"{path}.linear_kv_up_proj", model.kv_lora_rank, rows, "out")
    if model.head_wise_attn_gate:
        yield AdaptedLinear(f"{path}.linear_gate", hidden, heads, "")
    yield AdaptedLinear(f"{path}.linear_proj", heads * model.v_head_dim, hidden, "in")


def _linear_attention(args: Arguments) -> Iterator[AdaptedLinear]:
    for name, in_features, out_features, sharded in linear_matrices(args.model):
        yield AdaptedLinear(f"self_attention.{name}", in_features, out_features, sharded)


def _mamba(args: Arguments) -> Iterator[AdaptedLinear]:
    model, path = args.model, "mixer"
    inner, states = model.mamba_heads * model.mamba_head_dim, model.mamba_num_groups * model.mamba_state_dim
    yield AdaptedLinear(f"{path}.in_proj", model.hidden_size, 2 * inner + 2 * states + model.mamba_heads, "out")
    yield AdaptedLinear(f"{path}.out_proj", inner, model.hidden_size, "in")


def _mlp(args: Arguments, path: str, width: int) -> Iterator[AdaptedLinear]:
    gated = 2 if args.model.swiglu or args.model.quick_geglu else 1
    yield AdaptedLinear(f"{path}.linear_fc1", args.model.hidden_size, gated * width, "out")
    yield AdaptedLinear(f"{path}.linear_fc2", width, args.model.hidden_size, "in")


def _moe(args: Arguments) -> Iterator[AdaptedLinear]:
    model, moe = args.model, args.moe
    reads, makes = moe.expert_widths(model.hidden_size)
    width, gated = moe.moe_ffn_hidden_size or model.ffn_hidden_size, 2 if model.swiglu or model.quick_geglu else 1
    yield AdaptedLinear("mlp.experts.linear_fc1", reads, gated * width, "out", is_expert=True)
    yield AdaptedLinear("mlp.experts.linear_fc2", width, makes, "in", is_expert=True)
    if moe.moe_shared_expert_intermediate_size:
        yield from _mlp(args, "mlp.shared_experts", moe.moe_shared_expert_intermediate_size)


def adapter_params(args: Arguments, number: int, tp: int, etp: int) -> tuple[int, int]:
    """Return the adapters' parameters of a layer on a rank: of what is not a routed expert, and of one expert."""
    dim, linears = args.model.lora_dim or 0, adapted_linears(args, number)
    dense = sum(each.params(dim, tp) for each in linears if not each.is_expert)
    return dense, sum(each.params(dim, etp) for each in linears if each.is_expert)


def adapter_macs(args: Arguments) -> int:
    """Return the multiply-adds of all adapters per token."""
    found = (adapter_params(args, number, 1, 1) for number in range(args.model.num_layers))
    return sum(dense + (args.moe.moe_router_topk * expert if expert else 0) for dense, expert in found)
