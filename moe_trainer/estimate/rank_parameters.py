"""How many parameters each pipeline rank holds, from flags alone: the model's counts (estimate/parameters.py), cut as the model cuts them.

Tensor parallelism cuts tables by rows, attention and feed-forward by heads and columns; norms, routers, latents, indexers of sparse
attention, learned positions and biases behind a sum are whole on every rank. Experts are cut by etp and spread over ep. tests/estimate holds the sums against built models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear, moe_layer_pattern, mtp_is_moe
from moe_trainer.estimate.parameters import gated_delta_net_params, indexer_params

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.stage_layout import ChunkLayout


@dataclass(frozen=True)
class ParamsPerRank:
    """Parameters on one rank: those that dp x cp ranks share, and those of routed experts, which edp ranks share."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert

    def __add__(self, other: ParamsPerRank) -> ParamsPerRank:
        return ParamsPerRank(self.dense + other.dense, self.expert + other.expert)


class LayerParams:
    """Parameters of the parts of a model on one rank. vocab_rows: of the padded vocabulary, all ranks' together."""

    def __init__(self, args: Arguments, vocab_rows: int):
        self.args, self.vocab_rows = args, vocab_rows
        self.model, self.moe = args.model, args.moe
        self.tp = args.parallel.tensor_model_parallel_size
        self.etp = args.parallel.expert_tensor_parallel_size or self.tp
        self.ep = args.parallel.expert_model_parallel_size
        self.pattern = moe_layer_pattern(self.model.num_layers, self.moe.num_experts, self.moe.moe_layer_freq)
        self._bias = self.model.add_bias_linear
        self.layers = {False: self._layer(False)} | ({True: self._layer(True)} if self.moe.num_experts else {})

    def norm(self, width: int) -> int:
        """A gain, and with LayerNorm a bias."""
        return 2 * width if self.model.normalization == "LayerNorm" else width

    def attention(self) -> int:
        """One attention, without the norm before it."""
        model = self.model
        hidden, heads = model.hidden_size, model.num_attention_heads
        bias = (hidden if self._bias else 0) + (heads // self.tp if model.softmax_type == "learnable" else 0)
        if not model.multi_latent_attention:
            queries = heads * model.kv_channels
            rows = queries * (1 + model.attention_output_gate) + 2 * model.query_groups * model.kv_channels
            count = hidden * (rows + queries) // self.tp + bias
            count += rows // self.tp if self._bias or model.add_qkv_bias else 0
            return count + (2 * self.norm(model.kv_channels) if model.qk_layernorm else 0)
        key = model.qk_head_dim + model.qk_pos_emb_head_dim
        latent_norm = self.norm if model.qk_layernorm else lambda width: 0
        if model.q_lora_rank is None:
            count = hidden * heads * key // self.tp
        else:
            count = (
                hidden * model.q_lora_rank + model.q_lora_rank * heads * key // self.tp + latent_norm(model.q_lora_rank)
            )
        count += hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + latent_norm(model.kv_lora_rank)
        count += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim) // self.tp + indexer_params(model)
        return count + heads * model.v_head_dim * hidden // self.tp + bias

    def more(self, number: int) -> ParamsPerRank:
        """What a layer (from 0) has more than `layers` say, where its attention is linear; fewer are below zero."""
        model = self.model
        if not is_linear(model, number):
            return ParamsPerRank(0, 0)
        return ParamsPerRank(
            gated_delta_net_params(model) // self.tp + self.norm(model.linear_value_head_dim) - self.attention(), 0
        )

    def _feed_forward(self, width: int, cut: int, bias: bool) -> int:
        up = (2 if self.model.swiglu or self.model.quick_geglu else 1) * width // cut
        return self.model.hidden_size * (up + width // cut) + (up + self.model.hidden_size if bias else 0)

    def expert(self) -> int:
        """One routed expert's piece."""
        reads, makes = self.moe.expert_widths(self.model.hidden_size)
        width = (self.moe.moe_ffn_hidden_size or self.model.ffn_hidden_size) // self.etp
        up = (2 if self.model.swiglu or self.model.quick_geglu else 1) * width
        return reads * up + width * makes + (up + makes if self._bias else 0)

    def projections(self) -> int:
        """Those of tokens to latents and back."""
        latent = self.moe.moe_latent_size or 0
        return 2 * latent * self.model.hidden_size + (latent + self.model.hidden_size if latent and self._bias else 0)

    def shared(self) -> int:
        """The shared experts of a layer and their gate."""
        width = self.moe.moe_shared_expert_intermediate_size
        if not width:
            return 0
        return self._feed_forward(width, self.tp, bias=False) + (
            self.model.hidden_size if self.moe.moe_shared_expert_gate else 0
        )

    def _layer(self, is_moe: bool) -> ParamsPerRank:
        model = self.model
        dense = self.attention() + 2 * self.norm(model.hidden_size)
        if not is_moe:
            return ParamsPerRank(dense + self._feed_forward(model.ffn_hidden_size, self.tp, self._bias), 0)
        router = self.moe.num_experts * (model.hidden_size + (1 if self._bias else 0))
        return ParamsPerRank(
            dense + router + self.shared() + self.projections(), self.moe.num_experts // self.ep * self.expert()
        )

    def table(self) -> int:
        """A rank's rows of the embedding or of the head."""
        return self.vocab_rows // self.tp * self.model.hidden_size

    def positions(self) -> int:
        """Learned positions, which stand with the first embedding only."""
        learned = self.model.position_embedding_type == "learned_absolute" and self.model.add_position_embedding
        return self.model.max_position_embeddings * self.model.hidden_size if learned else 0

    def tables(self, layout: ChunkLayout) -> int:
        """Embeddings and head of one chunk."""
        tied = not self.model.untie_embeddings_and_output_weights
        count = 0
        if layout.has_word_embeddings or (layout.has_loss and tied):
            count += self.table() + (self.positions() if layout.has_embedding else 0)
        return count + (self.table() if layout.has_loss and not tied else 0)

    def mtp(self) -> ParamsPerRank:
        """All layers of multi-token prediction."""
        model = self.model
        depths = 1 if model.mtp_use_repeated_layer else model.mtp_num_layers
        one = (
            self.layers[mtp_is_moe(self.pattern)]
            + self.more(model.num_layers)
            + ParamsPerRank(2 * model.hidden_size**2 // self.tp + 3 * self.norm(model.hidden_size), 0)
        )
        return ParamsPerRank(depths * one.dense, depths * one.expert)

    def chunk(self, layout: ChunkLayout) -> ParamsPerRank:
        """What one chunk of the pipeline holds."""
        held = ParamsPerRank(self.tables(layout), 0)
        for number in layout.layers:
            held += self.layers[self.pattern[number]] + self.more(number)
        if layout.mtp:
            held += self.mtp()
        if layout.has_final_norm:
            held += ParamsPerRank(self.norm(self.model.hidden_size), 0)
        return held
