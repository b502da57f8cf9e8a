"""Tensors that a dense MLP or an MoE layer saves for backward (activations.py defines what is counted).

The number of tokens that experts receive depends on the routing: without `received` a balanced one is assumed. Surplus
rows of half-precision experts on a CPU are not counted (ops/expert_mlp.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.selections import expert_split, get_selection, output_slices
from arguments.rules.derived_sizes import as_list
from moe_trainer.estimate.saved_tensor import INDEX, WIDE, LayerSizes, SavedTensor
from moe_trainer.ops.block_sizes import expert_buffer_tokens


def mlp(layer: LayerSizes, name: str, ffn: int, part: str = "") -> Iterator[SavedTensor]:
    """Yield what an MLP saves besides its input: the inputs of the activation and of fc2."""
    yield SavedTensor(f"{name}.linear_fc1.y", (layer.tokens, _fc1_factor(layer) * ffn), layer.size, part)
    if layer.model.squared_relu:
        yield SavedTensor(f"{name}.relu", (layer.tokens, ffn), layer.size, part)
    yield from _unfused_gate(layer, name, ffn, part)
    yield SavedTensor(f"{name}.linear_fc2.x", (layer.tokens, ffn), layer.size, part)


def _unfused_gate(layer: LayerSizes, name: str, ffn: int, part: str) -> Iterator[SavedTensor]:
    """Yield what a gated activation saves besides its input where it is not one function (ops/pointwise.py)."""
    model = layer.model
    is_clamped, is_changed = model.activation_func_clamp_value is not None, bool(model.glu_linear_offset)
    if model.quick_geglu or model.swiglu and (is_clamped or is_changed):
        count = 1 + model.quick_geglu + is_clamped + (is_clamped or is_changed)  # f(gate), sigmoid, gate, up
        yield SavedTensor(f"{name}.gate", (count, layer.tokens, ffn), layer.size, part)


def _fc1_factor(layer: LayerSizes) -> int:
    return 2 if layer.model.swiglu or layer.model.quick_geglu else 1


def experts(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of an MoE layer (moe/layer.py): router, routes, routed and shared experts."""
    moe = layer.moe
    if layer.own != layer.rows:
        yield SavedTensor("own_rows", (layer.own, layer.hidden), layer.size)
    yield from _router(layer)
    yield from _routes(layer)
    kept = _num_expert_tokens(layer)  # activation kernels run over all of them, dispatch and GEMMs do not
    inputs = layer.received if layer.as_moved else kept
    yield SavedTensor("experts.x", (inputs, moe.expert_widths(layer.hidden)[0]), layer.size, "expert_fc1")
    yield SavedTensor("experts.probs", (kept,), _logit_size(layer), "moe_act")
    ffn = (moe.moe_ffn_hidden_size or layer.model.ffn_hidden_size) // layer.etp
    yield SavedTensor("experts.linear_fc1.y", (kept, _fc1_factor(layer) * ffn), layer.size, "moe_act")
    if layer.te_experts and "moe_act" not in layer.parts:  # ours compute it again (ops/expert_mlp.py)
        yield SavedTensor("experts.linear_fc2.x", (kept, ffn), layer.size, "moe_act")
    if _sorts_received(layer):
        yield SavedTensor("experts.order", (2, layer.received), INDEX)
    if moe.moe_latent_size:
        yield SavedTensor("fc2_latent_proj.x", (layer.own, moe.moe_latent_size), layer.size)
    if moe.output_projection is not None:
        yield SavedTensor(f"{moe.output_projection}.x", (layer.own, layer.hidden), layer.size)
    shared = moe.moe_shared_expert_intermediate_size
    if shared and "shared_experts" not in layer.parts:
        yield from mlp(layer, "shared_experts", shared // layer.tp)
        if moe.moe_shared_expert_gate:
            yield SavedTensor("shared_experts.y", (layer.rows, layer.hidden), layer.size)
            yield SavedTensor("shared_experts.gate", (layer.rows,), layer.size)


def _sorts_received(layer: LayerSizes) -> bool:
    """Return whether received tokens are sorted by expert; those of a single expert need not be."""
    exchanged = not get_dispatcher(layer.moe).gathers and layer.etp * layer.ep > 1
    return exchanged and layer.num_experts > layer.ep


def _num_expert_tokens(layer: LayerSizes) -> int:
    """Return the tokens of the tensors that experts save.

    What was received, the receive buffer (moe/receive/budget.py), or a layer's part of the pool of pages
    (memory/paged_stash.py), which is smaller if layers leave each other pages.
    """
    moe, even = layer.moe, layer.sent * layer.etp
    if moe.moe_expert_rank_capacity_factor is None:
        return layer.received
    if not layer.has_pages:
        return max(layer.received, expert_buffer_tokens(even, moe.moe_expert_rank_capacity_factor))
    page = moe.moe_paged_stash_page_size
    return max(-(-layer.received // page), math.ceil(moe.moe_paged_stash_buffer_size_factor_cuda * even / page)) * page


def _logit_size(layer: LayerSizes) -> int:
    return {"fp32": 4, "fp64": 8}.get(layer.moe.moe_router_dtype or "", layer.size)


def _router(layer: LayerSizes) -> Iterator[SavedTensor]:
    moe, own, size = layer.moe, layer.own, _logit_size(layer)
    wide = max(size, WIDE)
    yield from _loss_gradients(layer, wide)
    if moe.moe_input_jitter_eps is not None:
        yield SavedTensor("router.noise", (own, layer.hidden), layer.size)
        yield SavedTensor("router.x", (own, layer.hidden), layer.size)
    experts, topk = layer.num_experts, moe.moe_router_topk
    if (saves := get_selection(moe).saves) is not None:
        for name, shape, width in saves(own, experts, topk):
            yield SavedTensor(f"router.{name}", shape, wide if width is None else width)
    else:
        yield from _top_k(layer, size)
    if moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0:
        yield SavedTensor("router.kept", (own, experts), 1)


def _top_k(layer: LayerSizes, size: int) -> Iterator[SavedTensor]:
    moe, own, experts, topk, wide = layer.moe, layer.own, layer.num_experts, layer.moe.moe_router_topk, max(size, WIDE)
    yield SavedTensor("router.indices", (own, topk), INDEX)
    if moe.moe_router_score_function == "softmax":
        yield SavedTensor("router.scores", (own, experts if moe.moe_router_pre_softmax else topk), wide)
        if not moe.moe_router_pre_softmax:  # torch's gather keeps what it picks from
            yield SavedTensor("router.logits", (own, experts), size)
        return
    yield SavedTensor("router.scores", (own, experts), wide)
    if moe.moe_router_score_function == "sqrtsoftplus":
        yield SavedTensor("router.logits", (own, experts), wide)
    if topk > 1:
        yield SavedTensor("router.weights", (own, topk), wide)
        yield SavedTensor("router.weight_sums", (own,), wide)


def _loss_gradients(layer: LayerSizes, wide: int) -> Iterator[SavedTensor]:
    """Yield the gradient of the auxiliary losses, which forward computes."""
    moe = layer.moe
    coefficients, kinds = as_list(moe.moe_aux_loss_coeff), as_list(moe.moe_router_load_balancing_type)
    asked = any(coeff for kind, coeff in zip(kinds, coefficients) if kind.endswith("aux_loss"))
    if asked or moe.moe_z_loss_coeff is not None:
        yield SavedTensor("router.loss_gradient", (layer.own, layer.num_experts), wide)


def _routes(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the permutation indices (ops/permute.py) of this rank's tokens, or of all gathered ones."""
    gathered = get_dispatcher(layer.moe).gathers and layer.etp * layer.ep > 1
    rows, tokens = (layer.received, layer.own * layer.etp * layer.ep) if gathered else (layer.sent, layer.own)
    yield SavedTensor("routes.rows", (4, rows), INDEX)
    yield SavedTensor("routes.offsets", (tokens + layer.mlp_chunks,), INDEX)
    if (split := expert_split(layer.moe)) is not None:
        for name, count in split.saves(rows, tokens, layer.mlp_chunks, output_slices(vars(layer.moe))).items():
            yield SavedTensor(f"routes.{name}", (count,), INDEX)
    yield SavedTensor("routes.counts", (layer.mlp_chunks, layer.num_experts // (layer.ep if gathered else 1)), INDEX)


def experts_in_chunks(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield what an MoE layer saves whose experts are recomputed chunk by chunk: the router runs once, outside."""
    if layer.own != layer.rows:
        yield SavedTensor("own_rows", (layer.own, layer.hidden), layer.size)
    yield from _router(layer)
    yield SavedTensor("router.probs", (layer.own, layer.num_experts), _logit_size(layer))
    yield SavedTensor("router.map", (layer.own, layer.num_experts), 1)
    if layer.moe.moe_latent_size:
        yield SavedTensor("latents", (layer.own, layer.moe.moe_latent_size), layer.size)
    yield from _routes(layer)
    if _sorts_received(layer):
        yield SavedTensor("experts.order", (2, layer.received), INDEX)


def recompute_cache(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield what a recomputed MoE layer saves besides its input: routing and the gradient of the losses."""
    moe = layer.moe
    yield from _loss_gradients(layer, max(_logit_size(layer), WIDE))
    yield SavedTensor("router.indices", (layer.own, moe.moe_router_topk), INDEX)
    if moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0:
        yield SavedTensor("router.kept", (layer.own, layer.num_experts), 1)
    yield from _routes(layer)
    if _sorts_received(layer):
        yield SavedTensor("experts.order", (2, layer.received), INDEX)
