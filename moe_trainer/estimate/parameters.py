"""Exact parameter counts of a model and of each rank, from flags alone.

Nothing here builds a model: the same sums serve --validate-only on a laptop, the throughput line of a run, plans of
memory, and the tests that compare them with built models. Definitions:

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

Tensor parallelism shards tables by rows, attention and MLP by heads and columns. Every rank holds full norms, routers,
latents, indexers, learned positions and biases added after a reduction. Experts are sharded by etp and distributed
over ep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    OVERLAPPING_RATIO,
    compress_ratio,
    has_mlp,
    is_linear,
    layer_letter,
    model_of_layer,
    moe_layer_pattern,
    mtp_layer_pattern,
)
from arguments.mechanisms.sublayers import variant_of
from arguments.vocabulary import get_padded_vocab_size, padded_vocab_size_from_flags
from model_zoo.tokenizers import find_vocab_size
from moe_trainer.estimate.linear_attention import is_short_conv, linear_attention_params
from moe_trainer.estimate.lora import adapter_params
from moe_trainer.ops.block_sizes import MAMBA_CONV_WIDTH

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs
    from arguments.stage_layout import ChunkLayout


_BY_TYPE: Mapping[str | None, int] = MappingProxyType({"Llama2Tokenizer": 32000, "GPT2BPETokenizer": 50257})
_WITHOUT_VOCABULARY = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers that take --vocab-size."""


@dataclass(frozen=True)
class ParamCounts:
    """Parameters of a model; the head of this module defines the counts."""

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


def mamba_params(model: ModelArgs, matrices: bool = False) -> int:
    """Return the parameters of one Mamba mixer, or of its two matrices only."""
    inner, states = model.mamba_heads * model.mamba_head_dim, model.mamba_num_groups * model.mamba_state_dim
    count = model.hidden_size * (3 * inner + 2 * states + model.mamba_heads)
    if matrices:
        return count
    return count + (inner + 2 * states) * (MAMBA_CONV_WIDTH + 1) + 3 * model.mamba_heads + inner


def indexer_params(model: ModelArgs, matrices: bool = False) -> int:
    """Return the parameters of a layer's indexer, or of its three matrices only; 0 without sparse attention.

    The matrices make queries from latents, one key and a weight per head; the key has a LayerNorm.
    """
    if not variant_of(model).selects_keys:
        return 0
    heads, width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
    count = (model.q_lora_rank or model.hidden_size) * heads * width + model.hidden_size * (width + heads)
    return count if matrices else count + 2 * width


def compressed_attention_params(model: ModelArgs, ratio: int, tp: int = 1, matrices: bool = False) -> int:
    """Return the parameters of attention of DeepSeek-V4 with a compression ratio, on one of `tp` ranks.

    With `matrices`, those of the matrices alone that multiply every token.
    """
    hidden, width, latent = model.hidden_size, model.v_head_dim, model.q_lora_rank or 0
    heads = model.num_attention_heads // tp
    count = heads * width * (latent + model.o_lora_rank)  # queries, and the first matrices of the output
    count += hidden * (latent + width + model.o_groups // tp * model.o_lora_rank)
    small = latent + width + heads
    compressors = [width] if ratio else []
    if ratio == OVERLAPPING_RATIO and not model.csa_dense_mode:
        compressors.append(model.dsa_indexer_head_dim)
        count += model.dsa_indexer_n_heads * (latent * model.dsa_indexer_head_dim + hidden)
    factor = 2 if ratio == OVERLAPPING_RATIO else 1
    for channels in compressors:
        count += 2 * hidden * factor * channels
        small += ratio * factor * channels + channels
    return count if matrices else count + small


@dataclass(frozen=True)
class ParamsPerRank:
    """Parameters on one rank: those replicated over dp x cp ranks, and those of routed experts, replicated over edp."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: ParamsPerRank) -> ParamsPerRank:
        return ParamsPerRank(self.dense + other.dense, self.expert + other.expert)

    def scale(self, factor: int) -> ParamsPerRank:
        return ParamsPerRank(factor * self.dense, factor * self.expert)


class LayerParams:
    """Parameters of the parts of a model on one rank, or with `is_sharded=False` of the full model.

    Attributes:
        vocab_rows: padded vocabulary size of the model.
        layers: parameters of a dense layer (False) and of an MoE layer (True).
    """

    def __init__(self, args: Arguments, vocab_rows: int, is_sharded: bool = True):
        parallel = args.parallel
        self.args, self.vocab_rows = args, vocab_rows
        self.model, self.moe = args.model, args.moe
        self.tp = parallel.tensor_model_parallel_size if is_sharded else 1
        self.etp = parallel.expert_tensor_parallel_size or self.tp if is_sharded else 1
        self.ep = parallel.expert_model_parallel_size if is_sharded else 1
        self.num_experts = self.moe.expert_count
        self.pattern = moe_layer_pattern(self.model.num_layers, self.moe.num_experts, self.moe.moe_layer_freq)
        self.mtp_pattern = mtp_layer_pattern(self.pattern, self.model.hybrid_layer_pattern)
        self._bias = self.model.add_bias_linear
        self.layers = {False: self._layer(False)} | ({True: self._layer(True)} if self.num_experts else {})

    def norm(self, width: int) -> int:
        """Return the parameters of a norm: a weight, and with LayerNorm a bias."""
        return 2 * width if self.model.normalization == "LayerNorm" else width

    def around_mixer(self) -> int:
        """Return the parameters of the norms before and after attention, and of its hyper-connection."""
        return self._around(self.model.post_self_attn_layernorm)

    def around_mlp(self) -> int:
        """Return the parameters of the norms before and after an MLP or experts, and of their hyper-connection."""
        return self._around(self.model.post_mlp_layernorm)

    def _around(self, has_norm_after: bool) -> int:
        norms = self.model.pre_layernorm + has_norm_after
        return norms * self.norm(self.model.hidden_size) + self.hyper_connection()

    def hyper_connection(self) -> int:
        """Return the parameters of one sublayer's hyper-connection; 0 with one residual stream."""
        streams = self.model.num_residual_streams
        numbers = streams * streams + 2 * streams
        return numbers * (streams * self.model.hidden_size + 1) + 3 if self.model.enable_hyper_connections else 0

    def final_norm(self) -> int:
        """Return the parameters of the final norm, and of the sum of residual streams before it."""
        streams = self.model.num_residual_streams
        head = streams * (streams * self.model.hidden_size + 1) + 1 if self.model.enable_hyper_connections else 0
        return self.norm(self.model.hidden_size) + head

    def attention(self, number: int | None = None) -> int:
        """Return the parameters of the softmax attention of layer `number` (from 0), without the norm before it.

        By default of one without a window.
        """
        model = self.model if number is None else model_of_layer(self.model, number + 1)
        hidden, heads = model.hidden_size, model.num_attention_heads
        rest = (hidden if self._bias or model.add_attention_output_bias else 0) + (
            heads // self.tp if model.softmax_type == "learnable" else 0
        )
        rest += indexer_params(model)
        if variant_of(model).compresses_keys:
            return compressed_attention_params(model, compress_ratio(model, number or 0), self.tp)
        if not model.multi_latent_attention:
            queries = heads * model.kv_channels
            keys_values = model.query_groups * (model.kv_channels + model.value_width)
            rows = queries * (1 + model.attention_output_gate) + keys_values
            count = hidden * (rows + heads * model.value_width) // self.tp + rest
            count += rows // self.tp if self._bias or model.add_qkv_bias else 0
            norms = 2 * self.norm(model.kv_channels)
            if model.qk_layernorm_all_heads:
                norms = (heads + model.query_groups) * model.kv_channels // self.tp
            return count + (norms if model.qk_layernorm else 0)
        key = model.qk_head_dim + model.qk_pos_emb_head_dim
        latent_norm = self.norm if model.qk_layernorm else lambda width: 0
        if model.q_lora_rank is None:
            count = hidden * heads * key // self.tp
        else:
            count = model.q_lora_rank * hidden + model.q_lora_rank * heads * key // self.tp
            count += latent_norm(model.q_lora_rank)
        count += hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + latent_norm(model.kv_lora_rank)
        count += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) // self.tp
        count += hidden * heads if model.head_wise_attn_gate else 0
        return count + heads * model.v_head_dim * hidden // self.tp + rest

    def more(self, number: int) -> ParamsPerRank:
        """Return what a layer (from 0) that is not as `layers` state has more than that, and its adapters.

        It may be negative.
        """
        model, letter = self.model, layer_letter(self.model, number)
        if not letter:
            count = self._mixing(number) - self.attention()
        elif has_mlp(model, number):
            count = -self.attention() - self.around_mixer()
        else:
            count = self._mixing(number) + self.around_mixer() - self.layers[False].dense
        return ParamsPerRank(count, 0) + self.adapters(number)

    def _mixing(self, number: int) -> int:
        """Return the parameters of the attention or the Mamba mixer of a layer (from 0)."""
        model = self.model
        if layer_letter(model, number) == MAMBA:
            return mamba_params(model) // self.tp
        if not is_linear(model, number):
            return self.attention(number)
        norm = 0 if is_short_conv(model) else self.norm(model.linear_value_head_dim)
        return linear_attention_params(model, self.tp) + norm

    def adapters(self, number: int) -> ParamsPerRank:
        """Return the adapters' parameters of a layer (from 0); MTP layers have none."""
        dense, expert = adapter_params(self.args, number, self.tp, self.etp)
        return ParamsPerRank(dense, self.num_experts // self.ep * expert)

    def _mlp(self, width: int, tp: int, bias: bool) -> int:
        up = (2 if self.model.swiglu or self.model.quick_geglu else 1) * width // tp
        return self.model.hidden_size * (up + width // tp) + (up + self.model.hidden_size if bias else 0)

    def expert(self) -> int:
        """Return the parameters of this rank's shard of one routed expert."""
        reads, makes = self.moe.expert_widths(self.model.hidden_size)
        width = (self.moe.moe_ffn_hidden_size or self.model.ffn_hidden_size) // self.etp
        up = (2 if self.model.swiglu or self.model.quick_geglu else 1) * width
        return reads * up + width * makes + (up + makes if self._bias else 0)

    def projections(self) -> int:
        """Return the parameters of the projections of tokens to the experts' latents and back, and of slices."""
        latent, hidden = self.moe.moe_latent_size or 0, self.model.hidden_size
        slices = hidden**2 if self.moe.output_projection is not None else 0
        return slices + 2 * latent * hidden + (latent + hidden if latent and self._bias else 0)

    def shared(self) -> int:
        """Return the parameters of a layer's shared experts and their gate."""
        width = self.moe.moe_shared_expert_intermediate_size
        gate = self.model.hidden_size if self.moe.moe_shared_expert_gate else 0
        return self._mlp(width, self.tp, bias=False) + gate if width else 0

    def _layer(self, is_moe: bool) -> ParamsPerRank:
        model = self.model
        dense = self.attention() + self.around_mixer() + self.around_mlp()
        if not is_moe:
            return ParamsPerRank(dense + self._mlp(model.ffn_hidden_size, self.tp, self._bias), 0)
        router = self.num_experts * (model.hidden_size + (1 if self._bias else 0))
        dense += router + self.shared() + self.projections()
        return ParamsPerRank(dense, self.num_experts // self.ep * self.expert())

    def table(self) -> int:
        """Return the parameters of this rank's rows of the embedding or of the head."""
        return self.vocab_rows // self.tp * self.model.hidden_size

    def head_bias(self) -> int:
        """Return the parameters of this rank's bias of logits."""
        return self.vocab_rows // self.tp if self.model.add_output_layer_bias else 0

    def positions(self) -> int:
        """Return the parameters of learned positions, which belong to the first embedding only."""
        learned = self.model.position_embedding_type == "learned_absolute" and self.model.add_position_embedding
        return self.model.max_position_embeddings * self.model.hidden_size if learned else 0

    def tables(self, layout: ChunkLayout) -> int:
        """Return the parameters of the embeddings and the head of one chunk."""
        tied = not self.model.untie_embeddings_and_output_weights
        count = 0
        if layout.has_word_embeddings or (layout.has_loss and tied):
            count += self.table() + (self.positions() if layout.has_embedding else 0)
        count += self.table() if layout.has_loss and not tied else 0
        return count + (self.head_bias() if layout.has_loss else 0)

    def mtp(self) -> ParamsPerRank:
        """Return the parameters of all multi-token prediction layers."""
        model = self.model
        depths = model.num_mtp_depths
        if model.mtp_use_repeated_layer:
            depths = min(depths, 1)
        one = ParamsPerRank(2 * model.hidden_size**2 // self.tp + 3 * self.norm(model.hidden_size), 0)
        for number, is_moe in enumerate(self.mtp_pattern, start=model.num_layers):
            one += self.layers[is_moe] + self.more(number)
        return one.scale(depths)

    def stage(self, layouts: Iterable[ChunkLayout]) -> ParamsPerRank:
        """Return the parameters of the chunks of a pipeline stage."""
        return sum(map(self.chunk, layouts), ParamsPerRank(0, 0))

    def chunk(self, layout: ChunkLayout) -> ParamsPerRank:
        """Return the parameters of one pipeline chunk."""
        count = ParamsPerRank(self.tables(layout), 0)
        for number in layout.layers:
            count += self.layers[self.pattern[number]] + self.more(number)
        if layout.mtp:
            count += self.mtp()
        if layout.has_final_norm:
            count += ParamsPerRank(self.final_norm(), 0)
        return count


def count_parameters(args: Arguments, padded_vocab_size: int | None = None) -> ParamCounts:
    """Count the parameters of the model, with the padded vocabulary size of the flags by default.

    Raises:
        ValueError: if the vocabulary size is unknown, or --moe-layer-freq does not fit --num-layers.
    """
    model, moe = args.model, args.moe
    vocab = padded_vocab_size or padded_vocab_size_from_flags(args)
    if vocab is None:
        raise ValueError(
            "the number of parameters needs a vocabulary: give --vocab-size, --padded-vocab-size or a tokenizer"
        )
    params = LayerParams(args, vocab, is_sharded=False)
    hidden, pattern = model.hidden_size, params.pattern
    num_moe = sum(pattern)
    around = params.around_mixer() + params.around_mlp()
    expert = params.expert() if params.num_experts else 0
    layers = ParamsPerRank(0, 0)
    for number, is_moe in enumerate(pattern):
        layers += params.layers[bool(is_moe)] + params.more(number)
    embedding = params.table()
    positions = model.max_position_embeddings * hidden if model.position_embedding_type == "learned_absolute" else 0
    head = (embedding if model.untie_embeddings_and_output_weights else 0) + params.head_bias()
    total = embedding + positions + layers.total + params.final_norm() + head
    active = total - num_moe * (params.num_experts - moe.moe_router_topk) * expert
    if params.num_experts:
        adapters = sum(params.adapters(number).expert for number in range(len(pattern))) // params.num_experts
        active -= (params.num_experts - moe.moe_router_topk) * adapters
    return ParamCounts(
        total=total,
        mtp=params.mtp().total,
        active=active,
        active_no_embedding=active - positions - (embedding if model.untie_embeddings_and_output_weights else 0),
        embedding=embedding + positions,
        head=head,
        attention_per_layer=params.attention(),
        dense_ffn_per_layer=params.layers[False].total - params.attention() - around,
        moe_ffn_per_layer=params.layers[True].total - params.attention() - around if params.num_experts else 0,
        per_expert=expert,
        num_dense_layers=sum(has_mlp(model, number) for number in range(len(pattern))) - num_moe,
        num_moe_layers=num_moe,
    )


def params_report(args: Arguments, padded_vocab_size: int | None = None) -> dict[str, int | None]:
    """Return the four counts that --validate-only reports; all None if the vocabulary size is unknown."""
    keys = ("total", "mtp", "active", "active_no_embedding")
    if padded_vocab_size is None and padded_vocab_size_from_flags(args) is None:
        return dict.fromkeys(keys)
    counts = count_parameters(args, padded_vocab_size)
    return {key: getattr(counts, key) for key in keys}


def planned_vocab_size(args: Arguments) -> tuple[int | None, str]:
    """Return the padded vocabulary size or None, and a note if the run may have another one.

    A run takes that of its tokenizer, which a plan does not open; the flags say it exactly, the tokenizer's name may
    tell it, and a preset says that of its model.
    """
    rows, data = padded_vocab_size_from_flags(args), args.data
    is_of_preset = args.source.get("vocab_size") == "preset" and not data.padded_vocab_size
    has_tokenizer = not args.typed.isdisjoint(("tokenizer_type", "tokenizer_model", "vocab_file"))
    if rows is not None and not (is_of_preset and has_tokenizer and data.tokenizer_type not in _WITHOUT_VOCABULARY):
        return rows, ""
    source = data.tokenizer_model or data.vocab_file or data.tokenizer_type
    size = find_vocab_size(data.tokenizer_model or "") or _BY_TYPE.get(data.tokenizer_type)
    if size is not None:
        named = get_padded_vocab_size(args, size)
        note = f"vocabulary: {named:,} rows, taken from the tokenizer's name ({source}); --vocab-size says it exactly"
        return named, "" if named == rows else note
    if rows is None:
        return None, ""
    return rows, (
        f"vocabulary: {rows:,} rows, those of the preset; a run takes the tokenizer's ({source}), which --check-files "
        "reads; --vocab-size says it exactly"
    )
