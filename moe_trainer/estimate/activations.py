"""Tensors that forward saves for backward: every one by name, shape and bytes, from flags alone.

`layer_activations` lists what one transformer layer saves of one microbatch on one rank, `chunk_activations` what the
layers of a chunk do, including multi-token prediction, with recompute and offload as the flags say. The parts of a
layer are in saved_attention.py and saved_mlp.py. tests/memory/test_bytes.py compares these lists with the memory that
is alive after a real forward pass. arguments/training.py decides which parts are recomputed or offloaded.

During the warm-up of indexers (--dsa-indexer-warmup) everything else is frozen, and inputs of weight gradients are not
saved. Low-rank adapters (--lora-dim) save the inputs of both of their linears; dropout of the first one is not listed.

Counted: every storage once, whatever holds it (autograd's saved tensors, a node's own fields, the record of a
recomputed region); for a view the full storage. Not counted: weights, the batch, tables of the model, and what lives
only during an operator. Embedding and head are not layers; their logits are counted with the loss
(ops/cross_entropy.py).

Inputs of quantized GEMMs are saved quantized (saved_quantized.py), by this program's own layers and by Transformer
Engine's. Row maps of its fused kernels are not listed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    has_attention,
    has_mlp,
    is_linear,
    layer_letter,
    moe_layer_pattern,
    mtp_layers,
)
from arguments.mechanisms.selections import PROJECTIONS
from arguments.mechanisms.sublayers import variant_of
from arguments.training import is_offloaded
from moe_trainer.estimate.lora import adapted_linears
from moe_trainer.estimate.saved_attention import (
    compressed_attention,
    grouped_attention,
    latent_attention,
    linear_attention,
    mamba,
)
from moe_trainer.estimate.saved_mlp import experts, experts_in_chunks, mlp, recompute_cache
from moe_trainer.estimate.saved_quantized import with_quantized_inputs
from moe_trainer.estimate.saved_tensor import INDEX, WIDE, LayerSizes, SavedTensor

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.stage_layout import ChunkLayout
    from arguments.training import TrainingArgs


_FOR_WEIGHTS = frozenset(
    {"mlp.linear_fc2.x", "shared_experts.linear_fc2.x", "core_attn.y", "pre_mlp.normed", "kv_latent"}
)
"""Inputs of weight gradients only, unless a recomputed region starts with them."""
_ATTENTION, _MAMBA = "self_attention", "mixer"
_READ_BY_LINEARS = MappingProxyType(
    {
        "normed": (
            f"{_ATTENTION}.linear_qkv",
            f"{_ATTENTION}.linear_q_proj",
            f"{_ATTENTION}.linear_q_down_proj",
            f"{_ATTENTION}.linear_kv_down_proj",
            f"{_ATTENTION}.in_proj",
            f"{_MAMBA}.in_proj",
        ),
        "q_latent": (f"{_ATTENTION}.linear_q_up_proj",),
        "kv_latent": (f"{_ATTENTION}.linear_kv_up_proj",),
        "core_attn.y": (f"{_ATTENTION}.linear_proj",),
        "linear_proj.x": (f"{_ATTENTION}.linear_proj",),
        "out_proj.x": (f"{_ATTENTION}.out_proj", f"{_MAMBA}.out_proj"),
        "pre_mlp.normed": ("mlp.linear_fc1", "mlp.shared_experts.linear_fc1"),
        "mlp.linear_fc2.x": ("mlp.linear_fc2",),
        "shared_experts.linear_fc2.x": ("mlp.shared_experts.linear_fc2",),
        "experts.x": ("mlp.experts.linear_fc1",),
    }
)
"""Linears whose adapters read a tensor that nothing else saves."""
_READ_BY_PROJECTIONS = frozenset(f"{name}.x" for name in PROJECTIONS)
_READ_BY_INDEXERS = frozenset({"normed", "q_latent", "choice"})


def _layer(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield everything that a layer saves, in the order of forward."""
    entries = with_quantized_inputs(layer, _all_tensors(layer))
    if layer.args.optimizer.freeze_backbone:
        return (entry for entry in entries if not _is_read_by_backbone(layer, entry.name))
    if layer.model.lora_dim is not None:
        return _tensors_with_adapters(layer, entries)
    return _warmup_tensors(layer, entries) if layer.model.dsa_indexer_warmup else entries


def _is_read_by_backbone(layer: LayerSizes, name: str) -> bool:
    """Whether a tensor is saved for the gradients of weights alone that --freeze-backbone freezes."""
    starts_region = name == "pre_mlp.normed" and (layer.is_moe or "mlp" in layer.parts)  # routers read it
    return not starts_region and (name in _READ_BY_PROJECTIONS or name in _READ_BY_LINEARS) and name != "experts.x"


def _warmup_tensors(layer: LayerSizes, entries: Iterator[SavedTensor]) -> Iterator[SavedTensor]:
    """Yield what indexer warm-up saves: no inputs of frozen weights, and in the first layer nothing of attention."""
    read = set(_READ_BY_INDEXERS)
    if "layernorm" in layer.parts:  # recomputed for the indexer
        read |= {"input_layernorm.x", "input_layernorm.statistics", "q_layernorm.x", "q_layernorm.statistics"}
    if "core_attn" in layer.parts:
        read |= {"q", "k", "v"}
    inputs = {"pre_mlp.normed"} if layer.parts & ({"moe", "shared_experts"} if layer.is_moe else {"mlp"}) else set()
    inputs |= {"kv_latent"} if "mla_up_proj" in layer.parts else set()
    for entry in entries:
        before = entry.part in ("attn_norm", "qkv_linear", "core_attn")
        if entry.name in _FOR_WEIGHTS - inputs:
            continue
        if layer.number == 0 and before and entry.name not in read and not entry.name.startswith("indexer."):
            continue
        yield entry


def _tensors_with_adapters(layer: LayerSizes, entries: Iterator[SavedTensor]) -> Iterator[SavedTensor]:
    """Yield what a layer with adapters saves: inputs of A and of B, and none of frozen weights alone."""
    dim, linears = layer.model.lora_dim or 0, {each.name: each for each in adapted_linears(layer.args, layer.number)}
    regions = layer.parts & ({"moe", "shared_experts"} if layer.is_moe else {"mlp"})
    # nothing has a gradient before the first adapter, because the embedding is frozen
    is_before_first = not any(adapted_linears(layer.args, number) for number in range(layer.number))
    if is_before_first and not linears:
        return
    skips_attention = is_before_first and not any(name.startswith((_ATTENTION, _MAMBA)) for name in linears)
    first_norm, has_passed = ("pre_mlp_layernorm.",) if skips_attention else ("input_layernorm.", "norm."), False
    for entry in entries:
        if is_before_first and entry.name.startswith(first_norm):
            has_passed = True
            if "layernorm" not in layer.parts:
                continue
        elif is_before_first and (not has_passed or (skips_attention and entry.name.startswith("router."))):
            continue
        readers = _READ_BY_LINEARS.get(entry.name, ())
        starts_region = (entry.name == "pre_mlp.normed" and regions) or (
            entry.name == "kv_latent" and "mla_up_proj" in layer.parts
        )
        if readers and not starts_region and linears.keys().isdisjoint(readers):
            continue
        yield entry
    for each in linears.values():
        block, _, leaf = each.name.partition(".")
        region = "shared_experts" if "shared_experts" in each.name else "moe" if layer.is_moe else "mlp"
        if block == "mlp" and (region in layer.parts or "moe" in layer.parts):
            continue
        part = {"linear_proj": "attn_proj", "out_proj": "attn_proj"}.get(leaf, "qkv_linear")
        rows = layer.rows
        if each.is_expert:
            part, rows = ("expert_fc1", "moe_act")[leaf.endswith("fc2")], layer.received
        elif block == "mlp":
            part = ""
        yield SavedTensor(f"{each.name}.lora_B.x", (rows, dim), layer.size, part)
        if each.is_expert:  # of the grouped GEMMs of the weight, A and B
            yield SavedTensor(f"{each.name}.offsets", (3, layer.num_experts // layer.ep), WIDE)
        if leaf == "experts.linear_fc2" and "moe_act" not in layer.parts:
            width = each.in_features // layer.etp
            yield SavedTensor(f"{each.name}.lora_A.x", (rows, width), layer.size, part)


def _all_tensors(layer: LayerSizes) -> Iterator[SavedTensor]:
    is_mamba = layer_letter(layer.model, layer.number) == MAMBA
    if is_mamba or has_attention(layer.model, layer.number):
        yield from _mixing_tensors(layer, is_mamba)
    if has_mlp(layer.model, layer.number):
        yield from _mlp_tensors(layer)


def _mixing_tensors(layer: LayerSizes, is_mamba: bool) -> Iterator[SavedTensor]:
    name, module = ("norm", "mixer") if is_mamba else ("input_layernorm", "self_attention")
    yield from _hyper_connection(layer, module)
    if layer.model.pre_layernorm:
        yield from layer.norm("attn_norm", name, layer.rows, layer.hidden, layer.residual)
    if "layernorm" not in layer.parts or not layer.model.pre_layernorm:
        yield SavedTensor("normed", (layer.rows, layer.hidden), layer.size, "qkv_linear")
    if is_mamba:
        yield from mamba(layer)
    elif is_linear(layer.model, layer.number):
        yield from linear_attention(layer)
    elif variant_of(layer.model).compresses_keys:
        yield from compressed_attention(layer)
    else:
        yield from latent_attention(layer) if layer.model.multi_latent_attention else grouped_attention(layer)
    if layer.model.post_self_attn_layernorm:
        yield from layer.norm("", "post_self_attn_layernorm", layer.rows, layer.hidden, layer.size)
    yield from _dropout(layer, module)


def _mlp_tensors(layer: LayerSizes) -> Iterator[SavedTensor]:
    discards = "layernorm" in layer.parts and layer.model.pre_layernorm
    yield from _hyper_connection(layer, "mlp")
    if layer.model.pre_layernorm:
        yield from layer.norm("mlp_norm", "pre_mlp_layernorm", layer.rows, layer.hidden, layer.residual)
    region = "moe" if layer.is_moe else "mlp"
    # routed experts read a copy of this rank's tokens; shared experts and recomputed regions read all of them
    reads_all = layer.own == layer.rows or region in layer.parts or layer.moe.moe_shared_expert_intermediate_size
    if not discards and (reads_all or not layer.is_moe):
        yield SavedTensor("pre_mlp.normed", (layer.rows, layer.hidden), layer.size)
    if region in layer.parts:
        if layer.is_moe:
            yield from experts_in_chunks(layer) if layer.mlp_chunks > 1 else recompute_cache(layer)
    elif layer.is_moe:
        yield from experts(layer)
    else:
        yield from mlp(layer, "mlp", layer.model.ffn_hidden_size // layer.tp)
    if layer.model.post_mlp_layernorm:
        yield from layer.norm("", "post_mlp_layernorm", layer.rows, layer.hidden, layer.size)
    yield from _dropout(layer, "mlp")


def _hyper_connection(layer: LayerSizes, name: str) -> Iterator[SavedTensor]:
    """Yield the streams, the sublayer's output, weights of every token, and fp32 copies of streams and parameters."""
    if layer.streams == 1:
        return
    name, streams = f"{name}_hyper_connection", layer.streams
    shape, numbers = (layer.rows, streams * layer.hidden), streams * streams + 2 * streams
    yield SavedTensor(f"{name}.x", shape, layer.size)
    if layer.size != WIDE:
        yield SavedTensor(f"{name}.x_fp32", shape, WIDE)
        yield SavedTensor(f"{name}.weight_fp32", (numbers, shape[1]), WIDE)
    yield SavedTensor(f"{name}.y", (layer.rows, layer.hidden), layer.size)
    yield SavedTensor(f"{name}.weights", (layer.rows, 3 * numbers + 1), WIDE)
    yield SavedTensor(f"{name}.rounded_weights", (layer.rows, numbers), layer.size)


def _dropout(layer: LayerSizes, name: str) -> Iterator[SavedTensor]:
    if layer.model.hidden_dropout:
        yield SavedTensor(f"{name}.dropout", (layer.rows, layer.streams * layer.hidden), layer.size if layer.cpu else 1)


def layer_activations(
    args: Arguments,
    *,
    is_moe: bool,
    number: int = 0,
    device: str = "cuda",
    received: int | None = None,
    packed: bool = False,
    as_moved: bool = False,
) -> tuple[SavedTensor, ...]:
    """Return what one layer saves of one microbatch, considering recompute but not offload; see LayerSizes."""
    return tuple(
        _layer(
            LayerSizes(
                args,
                number,
                is_moe=is_moe,
                device=device,
                received=received,
                packed=packed,
                as_moved=as_moved,
            )
        )
    )


def chunk_activations(
    args: Arguments, layout: ChunkLayout, *, device: str = "cuda", received: int | None = None, packed: bool = False
) -> tuple[SavedTensor, ...]:
    """Return what the layers of a chunk save of one microbatch.

    Names begin with "decoder.layers.<number>." or "mtp.layers.<depth>.".
    """
    training, model = args.training, args.model
    pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    offload = _Offload(training)
    make_sizes = partial(LayerSizes, args, device=device, received=received, packed=packed)
    found: list[SavedTensor] = []
    for first, stop, recomputed in training.recompute_spans(len(layout.layers)):
        for index in range(first, stop):
            number = layout.layers[index]
            layer = make_sizes(number, is_moe=pattern[number])
            if not recomputed:
                entries = offload.mark(_layer(layer), is_complete=index < training.cpu_offloading_num_layers)
            else:
                entries = list(_recomputed_layer_tensors(layer, first=index == first))
            found += [replace(entry, name=f"decoder.layers.{number}.{entry.name}") for entry in entries]
    for depth, inside in enumerate(mtp_layers(model, pattern) if layout.mtp else ()):
        layers = [make_sizes(number, is_moe=is_moe) for number, is_moe in inside]
        found += [replace(entry, name=f"mtp.layers.{depth}.{entry.name}") for entry in _mtp_tensors(layers, offload)]
    return tuple(found)


def _mtp_tensors(layers: Sequence[LayerSizes], offload: _Offload) -> Iterator[SavedTensor]:
    """Yield one depth of multi-token prediction: two norms, their concatenation, its layers, a norm."""
    layer = layers[0]
    shape = (layer.rows, layer.hidden)
    yield SavedTensor("tokens", (layer.tokens,), INDEX)
    if "mtp" in layer.parts:
        yield SavedTensor("embedded", shape, layer.residual)
        yield SavedTensor("x", shape, layer.size)
        for each in layers:
            yield from recompute_cache(each) if each.is_moe else ()
        return
    yield from layer.norm("", "enorm", *shape, layer.residual)
    yield from layer.norm("", "hnorm", *shape, layer.size)
    yield from with_quantized_inputs(layer, [SavedTensor("joined", (layer.rows, 2 * layer.hidden), layer.size)])
    for index, each in enumerate(layers):
        inner = f"layers.{index}." if layer.model.hybrid_layer_pattern else ""
        for entry in offload.mark(_layer(each), is_complete=False):
            yield replace(entry, name=f"mtp_model_layer.{inner}{entry.name}")
    yield from layer.norm("", "final_layernorm", *shape, layer.residual)


def _recomputed_layer_tensors(layer: LayerSizes, first: bool) -> Iterator[SavedTensor]:
    """Yield what a fully recomputed layer saves: the input of the region, and its routing."""
    if first:
        share = layer.tp if layer.args.training.distribute_saved_activations else 1
        yield SavedTensor("x", (layer.rows * layer.streams * layer.hidden // share,), layer.residual)
    if layer.is_moe:
        yield from recompute_cache(layer)


class _Offload:
    """Selects the tensors that are offloaded, as memory/offload.py does."""

    def __init__(self, training: TrainingArgs):
        self.parts, self.fraction = training.offloaded_modules, training.activation_offload_fraction
        self.least = max(1, training.min_offloaded_tensor_size) if training.fine_grained_activation_offloading else 1
        self.groups: Counter[str] = Counter()

    def mark(self, entries: Iterator[SavedTensor], is_complete: bool) -> list[SavedTensor]:
        """Return the entries of the next layer. `is_complete`: --cpu-offloading-num-layers offloads all of it."""
        found, going = [], {}
        for entry in entries:
            is_whole = is_complete and "layer" in self.parts and not entry.name.startswith("routes.")
            part = "layer" if is_whole else entry.part
            if part in self.parts and part not in going:
                number = self.groups[part]
                self.groups[part] += 1
                going[part] = is_offloaded(number, self.fraction)
            large = math.prod(entry.shape) >= self.least
            found.append(replace(entry, on_host=True) if going.get(part) and large else entry)
        return found
