"""Exact parameter counts and model FLOPs, from flags alone.

Nothing here builds a model: the same sums serve --validate-only on a laptop, the throughput line of a run and the
tests that hold the built model against them. Definitions:

* `total` counts every trained parameter of the model without multi-token prediction; `mtp` is what the MTP layers add
  (they share embedding and head with the model). Buffers (the expert bias of the router) are not parameters.
* `active` is what one token uses: everything dense, shared experts and routers, and topk experts of each MoE layer.
  `active_no_embedding` leaves out the input embedding tables, of which a token reads single rows. A tied table is also
  the output head, which is used in full, so it stays.
* Embedding and head are counted with the padded vocabulary.
* Sparse attention's indexer is a part of its attention.

Biases follow Megatron-Core: --add-bias-linear (the default) puts one on every linear layer including experts and
router, but shared experts and the projections inside MLA, except its output projection, never have any;
--add-qkv-bias adds it to the fused qkv projection alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear, moe_layer_pattern, mtp_is_moe
from arguments.vocabulary import get_padded_vocab_size, padded_vocab_size_from_flags

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs


_BY_NAME = (
    ("deepseek-v3", 129280),
    ("deepseek-v2", 102400),
    ("qwen3", 151936),
    ("qwen2", 151936),
    ("kimi-k2", 163840),
    ("moonlight", 163840),
    ("mixtral-8x22b", 32768),
    ("mixtral", 32000),
    ("mistral", 32000),
    ("llama-3", 128256),
    ("llama3", 128256),
    ("llama-2", 32000),
)
"""(part of a tokenizer's name, rows of the embedding in the configurations published with it)."""
_BY_TYPE = (("Llama2Tokenizer", 32000), ("GPT2BPETokenizer", 50257))


@dataclass(frozen=True)
class ParamCounts:
    """Parameters of a model, in numbers of elements; see the module's head for the definitions."""

    total: int
    mtp: int
    active: int
    active_no_embedding: int
    embedding: int
    head: int
    attention_per_layer: int
    dense_ffn_per_layer: int
    moe_ffn_per_layer: int
    per_expert: int
    num_dense_layers: int
    num_moe_layers: int


def _norm(args: Arguments, size: int) -> int:
    """Parameters of one norm: a weight, and with LayerNorm a bias."""
    return 2 * size if args.model.normalization == "LayerNorm" else size


def _mla(args: Arguments) -> int:
    """Parameters of one multi-head latent attention."""
    model = args.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    query_dim = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.q_lora_rank is None:
        query = hidden * heads * query_dim
    else:
        query = hidden * model.q_lora_rank + model.q_lora_rank * heads * query_dim
        query += _norm(args, model.q_lora_rank) if model.qk_layernorm else 0
    key_value = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    key_value += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    key_value += _norm(args, model.kv_lora_rank) if model.qk_layernorm else 0
    output = heads * model.v_head_dim * hidden + (hidden if model.add_bias_linear else 0)
    return query + key_value + output


def _gqa(args: Arguments) -> int:
    """Parameters of one multi-head, multi-query or grouped-query attention."""
    model = args.model
    hidden, channels = model.hidden_size, model.kv_channels
    query_rows = model.num_attention_heads * channels
    qkv_rows = query_rows * (1 + model.attention_output_gate) + 2 * model.query_groups * channels
    count = hidden * qkv_rows + query_rows * hidden
    if model.add_qkv_bias or model.add_bias_linear:
        count += qkv_rows
    if model.add_bias_linear:
        count += hidden
    if model.qk_layernorm:
        count += 2 * _norm(args, channels)
    return count


def gated_delta_net_params(model: ModelArgs, matrices: bool = False) -> int:
    """Parameters of one gated DeltaNet, its norm aside; or of its two matrices."""
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    projections = model.hidden_size * (2 * keys + 3 * values + 2 * model.linear_num_value_heads)
    return (
        projections
        if matrices
        else projections + (2 * keys + values) * model.linear_conv_kernel_dim + 2 * model.linear_num_value_heads
    )


def indexer_params(model: ModelArgs, matrices: bool = False) -> int:
    """Parameters of a layer's indexer, if it has sparse attention: queries of latents, one key, its LayerNorm, a weight per head; or of the
    three matrices."""
    if model.experimental_attention_variant != "dsa":
        return 0
    heads, width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
    products = (model.q_lora_rank or model.hidden_size) * heads * width + model.hidden_size * (width + heads)
    return products if matrices else products + 2 * width


def _sinks(args: Arguments) -> int:
    """Parameters of the attention sinks of one layer."""
    return args.model.num_attention_heads if args.model.softmax_type == "learnable" else 0


def _ffn(args: Arguments, ffn_size: int, bias: bool) -> int:
    """Parameters of one feed-forward network: two matrices, or three when the activation is gated."""
    up_rows = 2 * ffn_size if args.model.swiglu or args.model.quick_geglu else ffn_size
    count = args.model.hidden_size * (up_rows + ffn_size)
    return count + (up_rows + args.model.hidden_size if bias else 0)


def _expert(args: Arguments) -> int:
    """Parameters of one routed expert: of whole tokens, of latents, or with an output of a slice."""
    reads, makes = args.moe.expert_widths(args.model.hidden_size)
    ffn_size = args.moe.moe_ffn_hidden_size or args.model.ffn_hidden_size
    up_rows = 2 * ffn_size if args.model.swiglu or args.model.quick_geglu else ffn_size
    return reads * up_rows + ffn_size * makes + (up_rows + makes if args.model.add_bias_linear else 0)


def _moe_fixed(args: Arguments) -> int:
    """Parameters of one MoE feed-forward that every token uses: router, shared experts and the projections of latents."""
    model, moe = args.model, args.moe
    count = moe.num_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))
    if moe.moe_shared_expert_intermediate_size:
        count += _ffn(args, moe.moe_shared_expert_intermediate_size, bias=False)
        count += model.hidden_size if moe.moe_shared_expert_gate else 0
    if moe.moe_latent_size:
        count += 2 * model.hidden_size * moe.moe_latent_size
        count += model.hidden_size + moe.moe_latent_size if model.add_bias_linear else 0
    return count


def count_parameters(args: Arguments, padded_vocab_size: int | None = None) -> ParamCounts:
    """Count the parameters of the model that these flags describe.

    Without padded_vocab_size it is derived from --padded-vocab-size or --vocab-size.
    Raises: ValueError when neither says how large the vocabulary is, or --moe-layer-freq does not fit --num-layers.
    """
    model, moe = args.model, args.moe
    vocab = padded_vocab_size or padded_vocab_size_from_flags(args)
    if vocab is None:
        raise ValueError(
            "the number of parameters needs a vocabulary: give --vocab-size, --padded-vocab-size or a tokenizer"
        )
    hidden = model.hidden_size
    pattern = moe_layer_pattern(model.num_layers, moe.num_experts, moe.moe_layer_freq)
    num_moe, num_dense = sum(pattern), len(pattern) - sum(pattern)

    attention = (
        (_mla(args) if model.multi_latent_attention else _gqa(args))
        + _sinks(args)
        + indexer_params(model)
        + 2 * _norm(args, hidden)
    )
    dense_ffn = _ffn(args, model.ffn_hidden_size, model.add_bias_linear)
    expert = fixed = experts = topk = 0
    if moe.num_experts:
        expert = _expert(args)
        fixed, experts, topk = _moe_fixed(args), moe.num_experts, moe.moe_router_topk
    moe_ffn = fixed + experts * expert

    embedding = vocab * hidden
    positions = model.max_position_embeddings * hidden if model.position_embedding_type == "learned_absolute" else 0
    head = vocab * hidden if model.untie_embeddings_and_output_weights else 0
    linear = gated_delta_net_params(model) + _norm(args, model.linear_value_head_dim) + 2 * _norm(args, hidden)
    num_linear = sum(is_linear(model, number) for number in range(model.num_layers))
    layers = (
        num_linear * linear + (model.num_layers - num_linear) * attention + num_dense * dense_ffn + num_moe * moe_ffn
    )
    total = embedding + positions + layers + _norm(args, hidden) + head
    active = total - num_moe * (experts - topk) * expert

    depths = model.mtp_num_layers or 0
    if model.mtp_use_repeated_layer:
        depths = min(depths, 1)
    mtp_layer = (
        (linear if is_linear(model, model.num_layers) else attention)
        + (moe_ffn if mtp_is_moe(pattern) else dense_ffn)
        + 2 * hidden * hidden
        + 3 * _norm(args, hidden)
    )
    return ParamCounts(
        total=total,
        mtp=depths * mtp_layer,
        active=active,
        active_no_embedding=active - positions - (embedding if model.untie_embeddings_and_output_weights else 0),
        embedding=embedding + positions,
        head=head,
        attention_per_layer=attention - 2 * _norm(args, hidden),
        dense_ffn_per_layer=dense_ffn,
        moe_ffn_per_layer=moe_ffn,
        per_expert=expert,
        num_dense_layers=num_dense,
        num_moe_layers=num_moe,
    )


def params_report(args: Arguments, padded_vocab_size: int | None = None) -> dict[str, int | None]:
    """Return the four counts that --validate-only reports; all None when the flags do not tell the vocabulary."""
    keys = ("total", "mtp", "active", "active_no_embedding")
    if padded_vocab_size is None and padded_vocab_size_from_flags(args) is None:
        return dict.fromkeys(keys)
    counts = count_parameters(args, padded_vocab_size)
    return {key: getattr(counts, key) for key in keys}


def planned_vocab_size(args: Arguments) -> tuple[int | None, str]:
    """Rows of the padded vocabulary, and a note where they follow from a tokenizer's name; None where nothing says it."""
    rows = padded_vocab_size_from_flags(args)
    if rows is not None:
        return rows, ""
    name = (args.data.tokenizer_model or "").lower()
    size = next((size for part, size in _BY_NAME if part in name), None)
    if size is None:
        size = next((size for kind, size in _BY_TYPE if kind == args.data.tokenizer_type), None)
    if size is None:
        return None, ""
    rows = get_padded_vocab_size(args, size)
    said = args.data.tokenizer_model or args.data.tokenizer_type
    return rows, f"vocabulary: {rows:,} rows, taken from the tokenizer's name ({said}); --vocab-size says it exactly"
