"""Tensors that each kind of attention saves for backward (activations.py defines what is counted).

Attention saves what its kernel saves (ops/attention.py, layers/ring_attention.py): on a CPU, without mask and up to
BLOCKED_MAX_LENGTH positions, the probabilities of all blocks; else queries, keys, values, output and log-sum-exp. Where
sparse attention gathers its keys, latents replace keys and values. Attention dropout on a CPU and explicit masks are
not counted.

Transformer Engine's attention takes values of any width, and its output is the input of the projection. Without a fused
kernel it saves the probabilities in the model's format; torch's kernel computes and saves all of this in fp32.

Shapes: N heads, G key-value heads, D and E widths of key and value; the others as in saved_tensor.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from arguments.layer_pattern import OVERLAPPING_RATIO, compress_ratio
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.sublayers import variant_of
from arguments.sparse_attention import is_sparse, use_gathered_keys
from moe_trainer.estimate.linear_attention import conv_channels, gate_rank, is_short_conv, num_decays
from moe_trainer.estimate.saved_tensor import WIDE, LayerSizes, SavedTensor
from moe_trainer.ops.block_sizes import BLOCKED_MAX_LENGTH, DELTA_CHUNK, DELTA_SEGMENT, QUERY_BLOCK


def grouped_attention(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of multi-head or grouped-query attention (layers/attention.py)."""
    model = layer.model
    heads, groups = model.num_attention_heads // layer.tp, max(1, model.query_groups // layer.tp)
    width, value = model.kv_channels, model.value_width
    if model.qk_layernorm or model.qk_l2_norm:
        numbers = 2 if model.normalization == "LayerNorm" and not model.qk_l2_norm else 1
        for name, count in (("q_layernorm", heads), ("k_layernorm", groups)):
            rows = layer.tokens * (1 if model.qk_layernorm_all_heads else count)
            yield SavedTensor(f"{name}.x", (layer.tokens * count, width), layer.size)
            yield SavedTensor(f"{name}.statistics", (rows, numbers), WIDE)
    yield from _core(layer, heads, groups, width, value, discarded=False)
    if model.attention_output_gate:
        yield SavedTensor("gate", (layer.tokens, heads * width), layer.size, "qkv_linear")
        yield SavedTensor("linear_proj.x", (layer.tokens, heads * width), layer.size, "attn_proj")


def linear_attention(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of linear attention (layers/gated_delta_net.py and what derives from it).

    In its core each cp rank has some of the heads of the full sequence.
    """
    model, tokens, part = layer.model, layer.tokens, "core_attn"
    if is_short_conv(model):
        channels = model.hidden_size // layer.tp
        yield SavedTensor("in_proj.y", (tokens, 3 * channels), layer.size, part)
        yield SavedTensor("out_proj.x", (tokens, channels), layer.size, "attn_proj")
        return
    heads, width = model.linear_num_value_heads // layer.tp, model.linear_value_head_dim
    channels = (conv_channels(model) + num_decays(model)) // layer.tp + heads * width + heads
    yield SavedTensor("in_proj.y", (tokens, channels), layer.size, part)
    if rank := gate_rank(model):
        yield SavedTensor("latents", (layer.rows, 2 * rank), layer.size, "qkv_linear")
    later_segments = -(-layer.length * layer.cp // (DELTA_CHUNK * DELTA_SEGMENT)) - 1
    names = set(layer.args.precision.triton_kernels)
    by_torch = layer.cpu or bool(names) and not names & {"all", "delta-rule"}  # our kernel saves no state
    if later_segments and by_torch:
        state = (layer.batch, heads // layer.cp, model.linear_key_head_dim, width)
        yield SavedTensor("states", (later_segments, *state), WIDE, part)
    yield from layer.norm(part, "out_norm", tokens * heads, width, layer.size)
    yield SavedTensor("out_norm.y", (tokens, heads * width), layer.size, part)
    if "gdn_norm_out" not in layer.parts:
        yield SavedTensor("out_proj.x", (tokens, heads * width), layer.size, "attn_proj")


def mamba(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of a Mamba mixer (layers/mamba.py), which computes all between its matrices again."""
    model = layer.model
    heads, groups = model.mamba_heads // layer.tp, model.mamba_num_groups // layer.tp
    inner = heads * model.mamba_head_dim
    channels = 2 * inner + 2 * groups * model.mamba_state_dim + heads
    yield SavedTensor("in_proj.y", (layer.tokens, channels), layer.size, "core_attn")
    yield SavedTensor("out_proj.x", (layer.tokens, inner), layer.size, "attn_proj")


def compressed_attention(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of DeepSeek-V4's attention (layers/compressed_attention.py), which computes scores again."""
    model, tokens, part = layer.model, layer.tokens, "core_attn"
    heads, width, angles = model.num_attention_heads // layer.tp, model.v_head_dim, model.qk_pos_emb_head_dim // 2
    yield from layer.norm("qkv_linear", "q_layernorm", layer.rows, model.q_lora_rank or 0, layer.size)
    yield SavedTensor("q_latent", (layer.rows, model.q_lora_rank or 0), layer.size, "qkv_linear")
    yield from layer.norm("qkv_linear", "q_head_norm", tokens * heads, width, layer.size)
    yield from layer.norm("qkv_linear", "kv_layernorm", layer.rows, width, layer.size)
    yield SavedTensor("q", (tokens, heads, width), layer.size, part)
    yield SavedTensor("kv", (tokens, width), layer.size, part)
    if layer.size != WIDE:
        yield SavedTensor("attn_sink", (heads,), WIDE, part)
    ratio = compress_ratio(model, layer.number)
    if ratio:
        yield from _pooled(layer, ratio, width, angles)
    yield SavedTensor("rotation.sin", (layer.length, angles), WIDE, "attn_proj")
    yield SavedTensor("core_attn.y", (tokens, heads * width), layer.size, "attn_proj")
    yield SavedTensor(
        "linear_proj.x", (tokens, model.o_groups // layer.tp * model.o_lora_rank), layer.size, "attn_proj"
    )


def _pooled(layer: LayerSizes, ratio: int, width: int, angles: int) -> Iterator[SavedTensor]:
    """Yield what a compressor saves: keys and weights of all windows, and its norm; and an indexer's selection."""
    model, windows, part = layer.model, layer.length // ratio, "qkv_linear"
    count, overlapping = windows * layer.batch, ratio == OVERLAPPING_RATIO
    if overlapping:
        yield SavedTensor("windows", (count, 2 * ratio, width), layer.size, part)
    else:
        yield SavedTensor("windows", (layer.tokens, 2 * width), layer.size, part)
    shape = (count, ratio * (1 + overlapping), width)
    yield SavedTensor("window_weights", shape, WIDE, part)
    if layer.size != WIDE:
        yield SavedTensor("window_weights.rounded", shape, layer.size, part)
    yield from layer.norm(part, "pooled_norm", count, width, layer.size)
    yield SavedTensor("pooled.rotation", (2, windows, angles), WIDE, part)
    yield SavedTensor("pooled", (count, width), layer.size, part)
    if overlapping and not model.csa_dense_mode and windows > model.dsa_indexer_topk:
        yield SavedTensor("choice", (layer.tokens, windows), 1, "core_attn")


def latent_attention(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield the tensors of latent attention (layers/mla.py), with its indexer if it is sparse."""
    model = layer.model
    heads = model.num_attention_heads // layer.tp
    key = model.qk_head_dim + model.qk_pos_emb_head_dim
    down = model.kv_lora_rank + model.qk_pos_emb_head_dim
    if model.q_lora_rank is not None:
        if model.qk_layernorm:
            yield from layer.norm("qkv_linear", "q_layernorm", layer.rows, model.q_lora_rank, layer.size)
        yield SavedTensor("q_latent", (layer.rows, model.q_lora_rank), layer.size, "qkv_linear")
    elif "mla_up_proj" in layer.parts:
        yield SavedTensor("q_before_rope", (layer.tokens, heads, key), layer.size, "qkv_linear")
    gathered = variant_of(model).selects_keys and use_gathered_keys(layer.args)
    discarded = "mla_up_proj" in layer.parts and _num_head_shards(layer) == 1
    reads = not gathered or "mla_up_proj" in layer.parts  # latents that are gathered are copies of these
    if reads or model.qk_layernorm:
        yield SavedTensor("kv_down", (layer.rows, down), layer.size, "qkv_linear")
    if model.qk_layernorm:
        numbers = 2 if model.normalization == "LayerNorm" else 1
        yield SavedTensor("kv_layernorm.statistics", (layer.rows, numbers), WIDE, "qkv_linear")
        if reads:
            yield SavedTensor("kv_latent", (layer.rows, model.kv_lora_rank), layer.size, "qkv_linear")
    if variant_of(model).selects_keys:
        yield from _selection(layer)
    if gathered:
        yield from _gathered(layer, heads, key, discarded)
    else:
        yield from _core(layer, heads, heads, key, model.v_head_dim, discarded)
    if model.head_wise_attn_gate:
        yield SavedTensor("gate", (layer.tokens, heads), layer.size, "qkv_linear")
        yield SavedTensor("linear_proj.x", (layer.tokens, heads * model.v_head_dim), layer.size, "attn_proj")


def _gathered(layer: LayerSizes, heads: int, key: int, discarded: bool) -> Iterator[SavedTensor]:
    """Yield the tensors of attention to gathered keys (layers/absorbed_mla.py), `discarded`: no queries and latents."""
    part, tokens, model = "core_attn", layer.tokens, layer.model
    if not discarded:
        yield SavedTensor("q", (tokens, heads, key), layer.size, part)
        yield SavedTensor("kv_latents", (tokens, model.kv_lora_rank + model.qk_pos_emb_head_dim), layer.size, part)
    if part not in layer.parts:
        yield SavedTensor("log_sum_exp", (tokens, heads), WIDE, part)
    yield SavedTensor("core_attn.y", (tokens, heads * model.v_head_dim), layer.size, "attn_proj")


def _selection(layer: LayerSizes) -> Iterator[SavedTensor]:
    """Yield what sparse attention saves in addition (layers/sparse_attention.py): selected keys and indexer inputs."""
    model, tokens, part = layer.model, layer.tokens, "core_attn"
    if part in layer.parts:
        return
    if use_gathered_keys(layer.args):
        yield SavedTensor("choice", (layer.batch, layer.length, model.dsa_indexer_topk), WIDE, part)
    elif _is_sparse(layer):
        yield SavedTensor("choice", (layer.batch, layer.length, -(-layer.length * layer.cp // 8)), 1, part)
    if not model.dsa_indexer_loss_coeff:
        return
    heads, width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
    if layer.rows != tokens:
        yield SavedTensor("indexer.x", (tokens, layer.hidden), layer.size, part)
        yield SavedTensor("indexer.latent", (tokens, model.q_lora_rank or layer.hidden), layer.size, part)
    yield SavedTensor("indexer.k_norm.x", (tokens, width), layer.size, part)
    yield SavedTensor("indexer.k_norm.statistics", (tokens, 2), WIDE, part)
    if model.dsa_indexer_rotate_activation:
        yield SavedTensor("indexer.rotations", (2, width, width), layer.size, part)
    narrow = 2 if layer.args.precision.params_dtype_name == "bf16" else WIDE
    yield SavedTensor("indexer.q.gradient", (tokens, heads, width), narrow, part)
    yield SavedTensor("indexer.k.gradient", (tokens, width), narrow, part)
    yield SavedTensor("indexer.weights.gradient", (tokens, heads), WIDE, part)


def _is_sparse(layer: LayerSizes) -> bool:
    """Return whether there are more keys than are selected."""
    return is_sparse(layer.model, layer.length * layer.cp)


def _core(layer: LayerSizes, heads: int, groups: int, key: int, value: int, discarded: bool) -> Iterator[SavedTensor]:
    """Yield the tensors of core attention and the input of the output projection.

    `discarded`: queries, keys and values are not saved.
    """
    part, tokens, shards = "core_attn", layer.tokens, _num_head_shards(layer)
    q = SavedTensor("q", (tokens, heads, key), layer.size, part)
    k = SavedTensor("k", (tokens, groups, key), layer.size, part)
    v = SavedTensor("v", (tokens, groups, value), layer.size, part)
    inputs = () if discarded else (q, k, v)
    if "core_attn" in layer.parts:
        yield from inputs
    elif _is_blockwise(layer):
        yield from inputs
        yield SavedTensor("log_sum_exp", (layer.batch, heads, layer.length), WIDE, part)
    elif layer.cpu and layer.length * shards <= BLOCKED_MAX_LENGTH:
        yield from inputs
        shape = (layer.batch, heads // shards, _num_visible(layer.length * shards))
        yield SavedTensor("probs", shape, layer.size, part)
    elif layer.te_attends:
        yield from _transformer_engine(layer, (q, k, v), heads, discarded)
    elif not layer.cpu and get_attention_backend(layer.model).stores_scores:
        yield from _unfused(layer, heads, key, max(key, value), shards)
    else:
        yield from _flash(layer, q, k, v, heads, discarded)
    yield SavedTensor("core_attn.y", (tokens, heads * value), layer.size, "attn_proj")


def _num_head_shards(layer: LayerSizes) -> int:
    """Return how many ranks have exchanged heads for positions; the received heads are saved."""
    parallel = layer.args.parallel
    kind = parallel.cp_comm_type[min(layer.number, len(parallel.cp_comm_type) - 1)]
    return {"a2a": layer.cp, "a2a+p2p": (parallel.hierarchical_context_parallel_sizes or (1,))[0]}.get(kind, 1)


def _is_blockwise(layer: LayerSizes) -> bool:
    """Return whether attention runs block by block (layers/ring_attention.py)."""
    is_ring = layer.packed or layer.cp > _num_head_shards(layer)
    return is_ring or layer.model.softmax_type != "vanilla" or _is_sparse(layer)


def _num_visible(length: int) -> int:
    """Return the saved probabilities of a head: every block of queries with the keys up to its end."""
    ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
    return sum((end - start) * end for start, end in zip(range(0, length, QUERY_BLOCK), ends))


def _transformer_engine(
    layer: LayerSizes, inputs: tuple[SavedTensor, ...], heads: int, discarded: bool
) -> Iterator[SavedTensor]:
    """Yield what Transformer Engine's attention saves; `inputs`: queries, keys and values."""
    stores_scores = get_attention_backend(layer.model).stores_scores
    if stores_scores:  # keys and values are repeated for their queries
        inputs = tuple(replace(x, shape=(layer.tokens, heads, x.shape[2])) for x in inputs)
    if not discarded:
        yield from inputs
    if stores_scores:
        yield SavedTensor("probs", (layer.batch, heads, layer.length, layer.length), layer.size, "core_attn")
    else:
        yield SavedTensor("log_sum_exp", (layer.batch, heads, layer.length), WIDE, "core_attn")


def _unfused(layer: LayerSizes, heads: int, key: int, value: int, shards: int) -> Iterator[SavedTensor]:
    """Yield what torch's math kernel saves: scaled queries and keys, values and probabilities of all heads in fp32."""
    for name, width in (("q", key), ("k", key), ("v", value)):
        yield SavedTensor(f"{name}.fp32", (layer.tokens, heads, width), WIDE, "core_attn")
    length = layer.length * shards
    yield SavedTensor("probs", (layer.batch, heads // shards, length, length), WIDE, "core_attn")


def _flash(
    layer: LayerSizes, q: SavedTensor, k: SavedTensor, v: SavedTensor, heads: int, discarded: bool
) -> Iterator[SavedTensor]:
    key, value = q.shape[2], v.shape[2]
    padded = value < key
    if layer.cpu and k.shape[1] != heads:  # the kernel requires as many keys as queries
        k, v = (replace(x, shape=(layer.tokens, heads, x.shape[2])) for x in (k, v))
    if not discarded:
        yield from (q, k, replace(v, shape=(*v.shape[:2], max(key, value))))
    yield SavedTensor("log_sum_exp", (layer.batch, heads, layer.length), WIDE, "core_attn")
    if padded or layer.batch > 1 or layer.cp > 1:  # else the projection reads it in place
        yield SavedTensor("out", (layer.tokens, heads, max(key, value)), layer.size, "core_attn")
