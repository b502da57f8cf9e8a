"""Tensors that forward saves for backward: every one by name, shape and bytes, from flags alone.

`layer_activations` lists what one transformer layer saves of one microbatch on one rank, `chunk_activations` what the
layers of a chunk do, including multi-token prediction, with recompute and offload as the flags say. The parts of a
layer are in saved_attention.py and saved_mlp.py. tests/memory/test_bytes.py compares these lists with the memory that
is alive after a real forward pass. arguments/training.py decides which parts are recomputed or offloaded.

During the warm-up of indexers (--dsa-indexer-warmup) everything else is frozen, and inputs of weight gradients are not
saved.

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
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear, moe_layer_pattern, mtp_is_moe
from arguments.training import is_offloaded
from moe_trainer.estimate.saved_attention import grouped_attention, latent_attention, linear_attention
from moe_trainer.estimate.saved_mlp import experts, experts_in_chunks, mlp, recompute_cache
from moe_trainer.estimate.saved_quantized import with_quantized_inputs
from moe_trainer.estimate.saved_tensor import INDEX, LayerSizes, SavedTensor

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.stage_layout import ChunkLayout
    from arguments.training import TrainingArgs


_FOR_WEIGHTS = frozenset(
    {"mlp.linear_fc2.x", "shared_experts.linear_fc2.x", "core_attn.y", "pre_mlp.normed", "kv_latent"}
)
"""Inputs of weight gradients only, unless a recomputed region starts with them."""
_READ_BY_INDEXERS = frozenset({"normed", "q_latent", "choice"})


def _layer(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield everything that a layer saves, in the order of forward."""
    entries = with_quantized_inputs(layer, _all_tensors(layer))
    return _warmup_tensors(layer, entries) if layer.model.dsa_indexer_warmup else entries


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


def _all_tensors(layer: LayerSizes) -> Iterator[SavedTensor]:
    discards = "layernorm" in layer.parts
    yield from layer.norm("attn_norm", "input_layernorm", layer.rows, layer.hidden, layer.residual)
    if not discards:
        yield SavedTensor("normed", (layer.rows, layer.hidden), layer.size, "qkv_linear")
    if is_linear(layer.model, layer.number):
        yield from linear_attention(layer)
    else:
        yield from latent_attention(layer) if layer.model.multi_latent_attention else grouped_attention(layer)
    yield from _dropout(layer, "self_attention")
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
    yield from _dropout(layer, "mlp")


def _dropout(layer: LayerSizes, name: str) -> Iterator[SavedTensor]:
    if layer.model.hidden_dropout:
        yield SavedTensor(f"{name}.dropout", (layer.rows, layer.hidden), layer.size if layer.cpu else 1)


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
    for depth in range(model.mtp_num_layers or 0) if layout.mtp else ():
        layer = make_sizes(model.num_layers + depth, is_moe=mtp_is_moe(pattern))
        found += [replace(entry, name=f"mtp.layers.{depth}.{entry.name}") for entry in _mtp_tensors(layer, offload)]
    return tuple(found)


def _mtp_tensors(layer: LayerSizes, offload: _Offload) -> Iterator[SavedTensor]:
    """Yield one depth of multi-token prediction: two norms, their concatenation, a layer, a norm."""
    shape = (layer.rows, layer.hidden)
    yield SavedTensor("tokens", (layer.tokens,), INDEX)
    if "mtp" in layer.parts:
        yield SavedTensor("embedded", shape, layer.residual)
        yield SavedTensor("x", shape, layer.size)
        yield from recompute_cache(layer) if layer.is_moe else ()
        return
    yield from layer.norm("", "enorm", *shape, layer.residual)
    yield from layer.norm("", "hnorm", *shape, layer.size)
    yield from with_quantized_inputs(layer, [SavedTensor("joined", (layer.rows, 2 * layer.hidden), layer.size)])
    for entry in offload.mark(_layer(layer), is_complete=False):
        yield replace(entry, name=f"mtp_model_layer.{entry.name}")
    yield from layer.norm("", "final_layernorm", *shape, layer.residual)


def _recomputed_layer_tensors(layer: LayerSizes, first: bool) -> Iterator[SavedTensor]:
    """Yield what a fully recomputed layer saves: the input of the region, and its routing."""
    if first:
        share = layer.tp if layer.args.training.distribute_saved_activations else 1
        yield SavedTensor("x", (layer.rows * layer.hidden // share,), layer.residual)
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
