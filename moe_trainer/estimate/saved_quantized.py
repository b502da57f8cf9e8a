"""Inputs that quantized linears save in 8 or 4 bits (moe_trainer/quantization/saved_input.py).

Transformer Engine's linears and experts save the same ones. A recipe for single layers (--te-precision-config-file) is
not considered.

Shape letters: R tokens, K channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear
from arguments.mechanisms.format_kinds.declaration import FormatDeclaration
from arguments.mechanisms.formats import quantized_format, quantizes_weight_gradients
from arguments.mechanisms.selections import PROJECTIONS
from arguments.mechanisms.sublayers import variant_of
from moe_trainer.estimate.saved_tensor import WIDE, LayerSizes, SavedTensor

if TYPE_CHECKING:
    pass

_ALWAYS = (
    "linear_proj.x",
    "out_proj.x",
    "mlp.linear_fc2.x",
    "experts.linear_fc2.x",
    "shared_experts.linear_fc2.x",
    "fc2_latent_proj.x",
    *tuple(f"{name}.x" for name in PROJECTIONS),
)


def with_quantized_inputs(layer: LayerSizes, entries: Iterable[SavedTensor]) -> Iterator[SavedTensor]:
    """Yield what a layer saves, with the inputs that wait in 8 or 4 bits and their scales instead of those in full."""
    fmt = _format(layer)
    for entry in entries:
        if fmt is None or not _is_saved_quantized(layer, entry.name, fmt):
            yield entry
        else:
            groups = layer.num_experts // layer.ep if entry.name.startswith("experts.") else 1
            in_buffer = entry.name == "experts.x" and layer.moe.moe_expert_rank_capacity_factor is not None
            yield from _quantized(entry, fmt, groups, in_buffer and not layer.te_experts)


def _format(layer: LayerSizes) -> FormatDeclaration | None:
    """Return the format of a layer's weight gradients, None if they are not quantized."""
    precision, count = layer.args.precision, layer.model.num_layers
    if not quantizes_weight_gradients(precision):
        return None
    if precision.first_last_layers_bf16 and layer.number < count:
        first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
        if not first <= layer.number < count - last:
            return None
    return quantized_format(precision)


def _is_saved_quantized(layer: LayerSizes, name: str, fmt: FormatDeclaration) -> bool:
    model, parts = layer.model, layer.parts
    keeps_latents = _keeps_latents(layer)
    if name == "experts.x":  # ours save the tokens of pages as they are
        return layer.te_experts or not layer.has_pages
    if name in _ALWAYS:
        return True
    if name == "core_attn.y":
        is_projected = not (is_linear(model, layer.number) or model.attention_output_gate or model.head_wise_attn_gate)
        return is_projected and "core_attn" in parts
    latent = model.multi_latent_attention
    of_columns = {
        "joined": True,
        "normed": not latent or is_linear(model, layer.number),
        "pre_mlp.normed": not layer.is_moe and "mlp" not in parts,
        "q_latent": not keeps_latents,
        "kv_latent": not keeps_latents,
    }
    return of_columns.get(name, False) and _can_shard(layer, fmt)


def _keeps_latents(layer: LayerSizes) -> bool:
    """Return whether something else than the up projections keeps latents (layers/mla.py)."""
    is_sparse = variant_of(layer.model).selects_keys
    return not layer.model.qk_layernorm or "mla_up_proj" in layer.parts or is_sparse


def _can_shard(layer: LayerSizes, fmt: FormatDeclaration) -> bool:
    """Return whether a rank's tokens of a sequence shard have separate scales."""
    if layer.tp == 1 or not layer.args.parallel.sequence_parallel:
        return True
    return not fmt.has_global_scale and layer.rows % (fmt.tokens_per_scale or 1) == 0


def _quantized(entry: SavedTensor, fmt: FormatDeclaration, groups: int, in_buffer: bool) -> Iterator[SavedTensor]:
    """Yield values and scales of an input; `groups` of its tokens are quantized apart, evenly many in each.

    `in_buffer`: their counts are on the device, and two-level scales are saved in one byte.
    """
    tokens, channels = math.prod(entry.shape[:-1]), entry.shape[-1]
    block = fmt.tokens_per_scale
    num_blocks = groups * -(-tokens // (groups * block)) if block else groups
    if block and fmt.has_global_scale:
        yield replace(entry, shape=(channels, num_blocks * block * fmt.flags.bits // 8), itemsize=1)
        yield replace(
            entry, name=f"{entry.name}.scales", shape=(channels, num_blocks), itemsize=1 if in_buffer else WIDE
        )
        return
    yield replace(entry, itemsize=1)
    shape = (channels, num_blocks) if block else (num_blocks,)
    yield replace(entry, name=f"{entry.name}.scales", shape=shape, itemsize=1 if block else WIDE)
