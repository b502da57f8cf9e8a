"""What a forward pass keeps for its backward: every tensor, by name, shape and bytes, from flags alone. Pure arithmetic.

`layer_activations` lists what one transformer layer keeps of one microbatch on one rank, `chunk_activations` what the layers of a chunk
do, those of multi-token prediction included, with recompute and offload as the flags say. The parts of a layer: saved_attention.py and
saved_mlp.py. tests/memory/test_bytes.py measures what is alive behind a real forward pass and holds it against these lists. Which parts
are recomputed or sent to the host: arguments/training.py.

While indexers warm up (--dsa-indexer-warmup) all else is frozen, and what only the gradients of weights read is not kept.

What is counted: storages, each once, whoever keeps them (autograd's saved tensors, a node's own fields, the record of a recomputed
region); with a view the whole storage behind it. What is not: weights, the batch, tables that a model holds anyway, and what lives
only while an operator runs. Embedding and head are not layers; their logits are counted where the loss is (ops/cross_entropy.py).

The layers are this program's own. What TransformerEngine's keep instead (inputs as they were quantised, with their scales; their fused
kernels' maps of rows) is not listed; estimate/memory.py takes inputs in 8 bits into account.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear, moe_layer_pattern, mtp_is_moe
from arguments.training import is_offloaded
from moe_trainer.estimate.saved_attention import grouped_attention, latent_attention, linear_attention
from moe_trainer.estimate.saved_mlp import experts, mlp, recompute_cache
from moe_trainer.estimate.saved_tensor import INDEX, LayerSizes, SavedTensor

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.stage_layout import ChunkLayout
    from arguments.training import TrainingArgs


_FOR_WEIGHTS = frozenset(
    {"mlp.linear_fc2.x", "shared_experts.linear_fc2.x", "core_attn.y", "pre_mlp.normed", "kv_latent"}
)
"""What only the gradients of weights read, where no region that runs again begins with it."""
_READ_BY_INDEXERS = frozenset({"normed", "q_latent", "choice"})


def _layer(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Everything, in the order of forward."""
    return _everything(layer) if not layer.model.dsa_indexer_warmup else _of_warmup(layer, list(_everything(layer)))


def _of_warmup(layer: LayerSizes, entries: list[SavedTensor]) -> Iterator[SavedTensor]:
    """Without what frozen weights would need, and in the first layer without attention's own, into which no gradient goes."""
    read = set(_READ_BY_INDEXERS)
    if "layernorm" in layer.parts:  # normed again for the indexer
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


def _everything(layer: LayerSizes) -> Iterator[SavedTensor]:
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
    # routed experts read this rank's rows, a copy; all of them are read by shared experts and by a region that runs again
    if not discards and (
        not layer.is_moe
        or layer.own == layer.rows
        or region in layer.parts
        or layer.moe.moe_shared_expert_intermediate_size
    ):
        yield SavedTensor("pre_mlp.normed", (layer.rows, layer.hidden), layer.size)
    if region in layer.parts:
        yield from recompute_cache(layer) if layer.is_moe else ()
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
) -> tuple[SavedTensor, ...]:
    """What one layer keeps of one microbatch, recompute of its parts taken into account; nothing on the host yet.

    number: of the layer, from 0. received: rows of this rank's experts. packed: attention within packed documents.
    """
    return tuple(_layer(LayerSizes(args, number, is_moe=is_moe, device=device, received=received, packed=packed)))


def chunk_activations(
    args: Arguments, layout: ChunkLayout, *, device: str = "cuda", received: int | None = None, packed: bool = False
) -> tuple[SavedTensor, ...]:
    """What the layers of a chunk keep of one microbatch; names begin with "decoder.layers.<number>." or "mtp.layers.<depth>."."""
    training, model = args.training, args.model
    pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    sent = _Sent(training)
    found: list[SavedTensor] = []
    for first, stop, recomputed in training.recompute_spans(len(layout.layers)):
        for index in range(first, stop):
            number = layout.layers[index]
            layer = LayerSizes(args, number, is_moe=pattern[number], device=device, received=received, packed=packed)
            if not recomputed:
                entries = sent.of_layer(_layer(layer), whole=index < training.cpu_offloading_num_layers)
            else:
                entries = list(_of_a_region(layer, first=index == first))
            found += [replace(entry, name=f"decoder.layers.{number}.{entry.name}") for entry in entries]
    for depth in range(model.mtp_num_layers or 0) if layout.mtp else ():
        layer = LayerSizes(
            args, model.num_layers + depth, is_moe=mtp_is_moe(pattern), device=device, received=received, packed=packed
        )
        found += [replace(entry, name=f"mtp.layers.{depth}.{entry.name}") for entry in _of_mtp(layer, sent)]
    return tuple(found)


def _of_mtp(layer: LayerSizes, sent: _Sent) -> Iterator[SavedTensor]:
    """One depth of multi-token prediction: two norms, their joining, a layer, a norm."""
    shape = (layer.rows, layer.hidden)
    yield SavedTensor("tokens", (layer.tokens,), INDEX)
    if "mtp" in layer.parts:
        yield SavedTensor("embedded", shape, layer.residual)
        yield SavedTensor("x", shape, layer.size)
        yield from recompute_cache(layer) if layer.is_moe else ()
        return
    yield from layer.norm("", "enorm", *shape, layer.residual)
    yield from layer.norm("", "hnorm", *shape, layer.size)
    yield SavedTensor("joined", (layer.rows, 2 * layer.hidden), layer.size)
    for entry in sent.of_layer(_layer(layer), whole=False):
        yield replace(entry, name=f"mtp_model_layer.{entry.name}")
    yield from layer.norm("", "final_layernorm", *shape, layer.residual)


def _of_a_region(layer: LayerSizes, first: bool) -> Iterator[SavedTensor]:
    """A layer that runs again: the region's input, and what must not be decided again."""
    if first:
        share = layer.tp if layer.args.training.distribute_saved_activations else 1
        yield SavedTensor("x", (layer.rows * layer.hidden // share,), layer.residual)
    if layer.is_moe:
        yield from recompute_cache(layer)


class _Sent:
    """Which tensors go to the host, as memory/offload.py decides it."""

    def __init__(self, training: TrainingArgs):
        self.parts, self.fraction = training.offloaded_modules, training.activation_offload_fraction
        self.least = max(1, training.min_offloaded_tensor_size) if training.fine_grained_activation_offloading else 1
        self.groups: Counter[str] = Counter()

    def of_layer(self, entries: Iterator[SavedTensor], whole: bool) -> list[SavedTensor]:
        """The entries of the next layer. whole: --cpu-offloading-num-layers sends all that autograd saves of it."""
        found, going = [], {}
        for entry in entries:
            part = "layer" if whole and "layer" in self.parts and not entry.name.startswith("routes.") else entry.part
            if part in self.parts and part not in going:
                number = self.groups[part]
                self.groups[part] += 1
                going[part] = is_offloaded(number, self.fraction)
            large = math.prod(entry.shape) >= self.least
            found.append(replace(entry, on_host=True) if going.get(part) and large else entry)
        return found
