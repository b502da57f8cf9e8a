"""A decoder-only language model, or one chunk of it (arguments/stage_layout.py: ChunkLayout).

Module paths are Megatron-Core's names (`decoder.layers.0.self_attention.linear_qkv.weight`).

Shapes: S sequence (sharded in hidden states, full in tokens, labels and masks), B microbatch, H hidden, V padded
vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from arguments import Arguments
from arguments.layer_pattern import moe_layer_pattern, mtp_layer_pattern
from arguments.stage_layout import ChunkLayout
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.dropout import Dropout
from moe_trainer.layers.hyper_connection import StreamContraction, expand_streams
from moe_trainer.layers.init import embedding_init
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.layers.rotary import Rotary, Tables, make_layer_rotaries
from moe_trainer.layers.sparse_attention import SparseAttention, iter_sparse_attentions
from moe_trainer.layers.vocab import OutputHead, PositionEmbedding, VocabParallelEmbedding
from moe_trainer.model.block import TransformerLayer
from moe_trainer.model.mtp import MTPLosses, MultiTokenPrediction
from moe_trainer.model.sequence_borders import SequenceBorders, shard_of
from moe_trainer.moe.layer import MoELayer
from moe_trainer.ops.packed_sequences import Packed, PackedSequences, ValidTokens
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.mappings import gather_rows
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.iteration import find_quantized_gemms, find_weight_casts, scaling_state

LOGIT_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


class Embedding(nn.Module):
    """Token embedding, optional learned positions, dropout.

    Args:
        tied: other pipeline stages hold the word embeddings too.
        copy: this is a replica; an earlier stage owns the word embeddings and has the positions.
    """

    def __init__(
        self,
        args: Arguments,
        ps: ParallelState,
        padded_vocab_size: int,
        factory: LayerFactory,
        *,
        tied: bool = False,
        copy: bool = False,
    ):
        super().__init__()
        model, sp = args.model, args.parallel.sequence_parallel
        self.dropout = Dropout(model.hidden_dropout, factory.stream if sp else None)
        self.fp32_residual = model.fp32_residual_connection
        self.multiplier = model.embedding_scale
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size,
            model.hidden_size,
            name="embedding.word_embeddings",
            group=ps.tp,
            init=embedding_init(model),
            tied=tied,
            copy=copy,
            sequence_parallel=sp,
        )
        self.position_embeddings = None
        if model.position_embedding_type == "learned_absolute" and model.add_position_embedding and not copy:
            self.position_embeddings = PositionEmbedding(
                model.max_position_embeddings,
                model.hidden_size,
                name="embedding.position_embeddings",
                group=ps.tp,
                init=embedding_init(model),
                sequence_parallel=sp,
            )

    def forward(self, tokens_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        """Return x_SBH: local tokens under sequence parallelism, fp32 with --fp32-residual-connection."""
        x_SBH = self.word_embeddings(tokens_BS.t())
        if self.position_embeddings is not None:
            x_SBH = x_SBH + self.position_embeddings(position_ids_BS.t())
        if self.multiplier != 1.0:
            x_SBH = x_SBH * self.multiplier
        if self.fp32_residual:
            x_SBH = x_SBH.float()
        return self.dropout(x_SBH)


class Decoder(nn.Module):
    """The transformer layers of one chunk, and the final norm on the last stage."""

    def __init__(
        self, args: Arguments, ps: ParallelState, factory: LayerFactory, pattern: tuple[bool, ...], layout: ChunkLayout
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(
                args, ps, name=f"decoder.layers.{i}", layer_number=i + 1, is_moe=pattern[i], factory=factory
            )
            for i in layout.layers
        )
        # Megatron-Core's hybrid models have another name for it
        self.final_norm_name = f"decoder.{'final_norm' if args.model.hybrid_layer_pattern else 'final_layernorm'}"
        self.final_layernorm = self.hyper_connection_head = None
        if layout.has_final_norm and args.model.enable_hyper_connections:
            self.hyper_connection_head = StreamContraction(
                args.model, name="decoder", partial=args.parallel.sequence_parallel and ps.tp.size > 1
            )
        if layout.has_final_norm:
            self.final_layernorm = factory.norm(
                args.model.hidden_size,
                args.model,
                name=self.final_norm_name,
                partial=args.parallel.sequence_parallel and ps.tp.size > 1,
            )

    def norm(self, x_SBH: Tensor) -> Tensor:
        """Return what output head and multi-token prediction read on the last stage; the same as given on others."""
        if self.hyper_connection_head is not None:
            x_SBH = self.hyper_connection_head(x_SBH)
        return x_SBH if self.final_layernorm is None else self.final_layernorm(x_SBH)


def _make_output_head(
    args: Arguments,
    ps: ParallelState,
    padded_vocab_size: int,
    factory: LayerFactory,
) -> OutputHead:
    return OutputHead(
        args.model,
        padded_vocab_size,
        ps.tp,
        sequence_parallel=args.parallel.sequence_parallel,
        queue=factory.queue,
        kernels=factory.kernels.logit_kernels,
        logit_dtype=LOGIT_DTYPES.get(args.precision.logit_dtype or ""),
        quantize=factory.lm_head_quantizer(),
    )


class Transformer(nn.Module):
    """One chunk of the model, built by build.build_chunks, which also initializes the parameters.

    Args:
        factory: of the chunk (LayerFactory.for_chunk).
        shared_embedding: other pipeline stages hold the word embeddings too.
        params_dtype: of the parameters after initialization.
        device: of the parameters after initialization.
    """

    def __init__(
        self,
        args: Arguments,
        ps: ParallelState,
        padded_vocab_size: int,
        factory: LayerFactory,
        layout: ChunkLayout,
        *,
        shared_embedding: bool,
        params_dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        model = args.model
        pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self.layout, self.params_dtype, self.device = layout, params_dtype, device
        self.stream, self.weight_grads, self.overlap_executor = factory.stream, factory.queue, factory.overlap_executor
        self.activations, self.graphs = factory.activations, factory.graphs
        self.graphs.scopes = (self.activations.captured,)
        blocks = factory.without_queue() if args.parallel.has_deferred_head_wgrad else factory
        self.spans = args.training.recompute_spans(len(layout.layers))
        self.offloaded_layers = args.training.cpu_offloading_num_layers
        self.sequence, self.tp = SequenceShard.over(ps.context), ps.tp
        self.num_packs = 0.0  # of this iteration; this rank's shares of those of groups (moe/balancing.py)
        self.num_tensor_shards = ps.tp.size if args.parallel.sequence_parallel else 1
        self.num_streams = model.num_residual_streams if model.enable_hyper_connections else 1
        self.hidden_size, self.max_packed_sequences = model.hidden_size, args.parallel.thd_max_packed_sequences or 0
        self.fp32_residual = model.fp32_residual_connection
        self.mtp_depths, self.mtp_detached = model.num_mtp_depths, model.mtp_detach_heads
        # one per decoder layer, and those of a depth of multi-token prediction
        ahead = range(model.num_layers, model.num_layers + len(mtp_layer_pattern(pattern, model.hybrid_layer_pattern)))
        self.rotaries = make_layer_rotaries(model, (number + 1 for number in (*layout.layers, *ahead)), self.sequence)
        self.rotary = self.rotaries[0]
        self.tied = not model.untie_embeddings_and_output_weights
        self.embedding = None
        if layout.has_word_embeddings or (layout.has_loss and self.tied):
            self.embedding = Embedding(
                args, ps, padded_vocab_size, factory, tied=shared_embedding, copy=not layout.has_embedding
            )
        self.decoder = Decoder(args, ps, blocks, pattern, layout)
        self.mtp = MultiTokenPrediction(args, ps, pattern=pattern, factory=blocks) if layout.mtp else None
        self.mtp_losses = MTPLosses(args, ps) if layout.has_loss and self.mtp_depths else None
        self.output_layer = None
        if layout.has_loss:
            self.output_layer = _make_output_head(args, ps, padded_vocab_size, factory)
        self.has_hash_routing = any(layer.router.selection.reads_token_ids for layer in self.moe_layers())
        self.vocab_size = padded_vocab_size
        self.quantized = find_quantized_gemms(self)
        # FSDP gathers weights per layer; a graph of a part would hold the first microbatch's cast or none
        varies = args.parallel.has_sharded_params or not self.graphs.parts <= {"iteration"}
        self.casts = () if varies else find_weight_casts(self)
        self.caches_experts = args.caches_expert_casts

    def generators(self) -> dict[str, torch.Generator]:
        """Return the RNGs to checkpoint; those that are equal on all ranks (forced expert biases) by global name."""
        generators = {} if self.stream is None else {"tensor_parallel": self.stream.generator(self.device)}
        for router in (layer.router for layer in self.moe_layers()):
            if router.bias_stream is not None:
                generators[f"{router.name}.bias_stream"] = router.bias_stream
        return generators

    def input_spec(
        self, micro_batch_size: int, seq_length: int, packed: Packed | None = None
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the x_SBH of a microbatch that this chunk receives in its current mode."""
        num_states = 1 + (self.layout.receives_depths if self.training else 0)
        num_shards = shard_of(self.sequence, packed).cp.size * self.num_tensor_shards
        width = self.hidden_size * (1 if self.layout.receives_normed else self.num_streams)
        shape = (num_states * seq_length // num_shards, micro_batch_size, width)
        is_fp32 = self.fp32_residual and not self.layout.receives_normed
        return shape, torch.float32 if is_fp32 else self.params_dtype

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        labels_BS: Tensor | None = None,
        loss_mask_BS: Tensor | None = None,
        borders: SequenceBorders | None = None,
        grad_scale: float | Tensor = 1.0,
        x_SBH: Tensor | None = None,
    ) -> Tensor:
        """Run the chunk. All per-token inputs have the full sequence; the chunk shards them over cp.

        Args:
            tokens_BS, position_ids_BS: ids of the tokens and of their positions.
            labels_BS: None to compute logits.
            loss_mask_BS: the caller multiplies the returned loss by it, and differentiates that times one number.
            borders: where sequences begin and end; None if every row is one.
            grad_scale: see PassInputs.
            x_SBH: the previous chunk's output; None on the first one.

        Returns:
            The last chunk: per-token LM loss of this cp rank, fp32 [B, S/cp], or logits_BSV. Other chunks: x_SBH for
            the next one, concatenated along S with the states of MTP depths (see ChunkLayout). With a cache, the logits
            of every sequence's last token [1, B, V].
        """
        borders, with_mtp = borders or SequenceBorders(), self.training and labels_BS is not None
        x_SBH, *states = self._read_input(tokens_BS, position_ids_BS, x_SBH, borders.packed, with_mtp)
        inputs = self._pass_inputs(tokens_BS, borders, grad_scale)
        x_SBH = self.decoder.norm(self._layers(x_SBH, inputs))
        if self.mtp is not None and with_mtp:
            states = self.mtp(x_SBH, tokens_BS, position_ids_BS, self.embedding, inputs)
        if self.output_layer is None:
            return torch.cat([x_SBH, *states]) if states else x_SBH
        if labels_BS is None:
            return self._logits(self.output_layer, x_SBH, borders.cache)
        return self._loss(self.output_layer, x_SBH, states, labels_BS, loss_mask_BS, inputs)

    def _read_input(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        x_SBH: Tensor | None,
        packed: Packed | None,
        with_mtp: bool,
    ) -> Sequence[Tensor]:
        """Return the input of the first layer, then the received states of MTP depths."""
        if self.embedding is None or not self.layout.has_embedding:
            if x_SBH is None:
                raise ValueError("a chunk without the embedding needs the output of the chunk before it")
            num_depths = self.layout.receives_depths if with_mtp else 0
            return x_SBH.chunk(1 + num_depths) if num_depths else (x_SBH,)
        local = shard_of(self.sequence, packed).local
        x_SBH = self.embedding(local(tokens_BS, 1), local(position_ids_BS, 1))
        return (expand_streams(x_SBH, self.num_streams) if self.num_streams > 1 else x_SBH,)

    def _pass_inputs(self, tokens_BS: Tensor, borders: SequenceBorders, grad_scale: float | Tensor) -> PassInputs:
        """Begin a pass; return what the layers of this rank read in it."""
        packed, cache = borders.packed, borders.cache
        self.graphs.begin_pass(self.training, grad_scale)
        if packed is not None and packed.cp_size is not None and self.training:
            self.num_packs += 1.0 / packed.cp_size
        read = packed  # the lengths that captured parts read
        if isinstance(packed, PackedSequences) and self.graphs.is_replayed(*self.graphs.parts):
            read = packed.on_device(self.device, self.max_packed_sequences)
        visible = self._visible(borders, read)
        valid = None
        if read is not None:
            valid = self._valid_tokens(read).map_tensors(self.graphs.hold)
        elif borders.row_lengths is not None:
            valid = self._valid_rows(borders.row_lengths, tokens_BS.shape[1])
        token_ids_T = None
        if self.has_hash_routing:
            (token_ids_T,) = self.shard_for_router(shard_of(self.sequence, packed), tokens_BS.t())
            token_ids_T = self.graphs.hold(token_ids_T)
        tables = {rotary: self._rope(rotary, tokens_BS, packed, cache) for rotary in dict.fromkeys(self.rotaries)}
        self.activations.begin_pass(*(table for rope in tables.values() for table in rope or ()))
        ropes = tuple(tables[rotary] for rotary in self.rotaries)
        return PassInputs(ropes, visible, grad_scale, valid, token_ids_T, packed)

    def _visible(self, borders: SequenceBorders, read: Packed | None) -> AttentionMask | None:
        """Return what attention may see; `read` are the packed lengths that captured parts read."""
        if borders.cache is not None:
            return AttentionMask(cache=borders.cache)
        documents_BS, packed = borders.document_ids_BS, borders.packed
        if self.graphs.is_replayed("attn", "mamba", "layer"):
            packed, documents_BS = read, None if documents_BS is None else to_device(documents_BS, self.device)
        visible = AttentionMask.of(borders.attention_mask, documents_BS, self.device, packed)
        return None if visible is None else visible.static_copy(self.graphs)

    def _logits(self, head: OutputHead, x_SBH: Tensor, cache: KVCache | None) -> Tensor:
        if cache is not None and cache.is_prefill:
            x_SBH = self._last_tokens(x_SBH, cache)
        return head.logits(x_SBH, self._tied_weight())

    def _loss(
        self,
        head: OutputHead,
        x_SBH: Tensor,
        states: Sequence[Tensor],
        labels_BS: Tensor,
        loss_mask_BS: Tensor | None,
        inputs: PassInputs,
    ) -> Tensor:
        """Return the LM loss, with those of MTP depths attached."""
        local = shard_of(self.sequence, inputs.packed).local
        if self.mtp_losses is not None and states:
            loss_BS = partial(self._lm_loss, head, detached=self.mtp_detached)
            x_SBH = self.mtp_losses(x_SBH, states, labels_BS, loss_mask_BS, loss_BS, inputs.grad_scale, inputs.packed)
        weights_BS = None if loss_mask_BS is None else local(loss_mask_BS, 1)
        return self._lm_loss(head, x_SBH, local(labels_BS, 1), weights_BS)

    def _last_tokens(self, x_SBH: Tensor, cache: KVCache) -> Tensor:
        """Return the last token of every sequence as one sequence [B, 1, H], or the local part of it."""
        has_local_tokens = self.num_tensor_shards > 1
        if has_local_tokens:
            x_SBH, _ = gather_rows(x_SBH, self.tp)
        last_BH = x_SBH[cache.last_positions, torch.arange(x_SBH.shape[1], device=x_SBH.device)]
        return (last_BH.chunk(self.tp.size)[self.tp.rank] if has_local_tokens else last_BH).unsqueeze(1)

    def _valid_tokens(self, packed: Packed) -> ValidTokens:
        """Return which of the packed tokens are valid that this rank's routers read: sharded over cp, then over tp."""
        valid_T, sequence_T = self.shard_for_router(shard_of(self.sequence, packed), packed.is_valid(), packed.ids()[0])
        lengths_B = to_device(torch.as_tensor(packed.lengths), self.device)
        return ValidTokens(valid_T, packed.num_valid, sequence_T, lengths_B, packed.cp_size)

    def _valid_rows(self, row_lengths: tuple[int, ...], seq_length: int) -> ValidTokens:
        """Return the same of rows with padding."""
        lengths_B = torch.tensor(row_lengths)
        mask_SB = torch.arange(seq_length).unsqueeze(1) < lengths_B
        numbers_SB = torch.arange(len(row_lengths), dtype=torch.int32).expand(seq_length, -1)
        valid_T, sequence_T = self.shard_for_router(self.sequence, mask_SB, numbers_SB)
        return ValidTokens(valid_T, sum(row_lengths), sequence_T, to_device(lengths_B, self.device))

    def shard_for_router(self, sequence: SequenceShard, *tables: Tensor) -> Iterator[Tensor]:
        """Yield the part of each table [S] or [S, B, ...] that this rank's routers read, [T, ...], on the device."""
        for table in tables:
            shard = sequence.local(table, 0).tensor_split(self.tp.size)[self.tp.rank]
            yield to_device(shard.flatten(0, min(1, shard.dim() - 1)), self.device)

    def _rope(
        self, rotary: Rotary | None, tokens_BS: Tensor, packed: Packed | None, cache: KVCache | None
    ) -> Tables | None:
        """Return cos and sin of the local positions, or of the last ones in a cache."""
        if rotary is None:
            return None
        if cache is not None and not cache.is_prefill:
            return rotary.tables_at(cache.last_positions)
        rope = rotary.tables(tokens_BS.shape[1], tokens_BS.device, packed)
        return rope if packed is None else (self.graphs.hold(rope[0]), self.graphs.hold(rope[1]))

    def _layers(self, x_SBH: Tensor, inputs: PassInputs) -> Tensor:
        """Run the decoder's layers, those of a span as one recomputed region."""

        def run(first: int, stop: int, x_SBH: Tensor) -> Tensor:
            for index in range(first, stop):
                with self.activations.offload_scope("layer") if index < self.offloaded_layers else nullcontext():
                    x_SBH = self.decoder.layers[index](x_SBH, inputs.ropes[index], inputs)
            return x_SBH

        for first, stop, recomputed in self.spans:
            part = partial(run, first, stop)
            x_SBH = self.activations.recompute_region("full", part, x_SBH) if recomputed else part(x_SBH)
        return x_SBH

    def _tied_weight(self) -> Any:
        return self.embedding.word_embeddings.weight if self.tied and self.embedding is not None else None

    def _lm_loss(
        self,
        head: OutputHead,
        x_SBH: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor | None = None,
        detached: bool = False,
    ) -> Tensor:
        weight = self._tied_weight()
        if detached:
            source: Any = head.weight if weight is None else weight
            weight = source.detach()
        return head.loss(x_SBH, labels_BS, weight, weights_BS)

    def moe_layers(self) -> list[MoELayer]:
        """Return the MoE layers of the decoder, then those of multi-token prediction."""
        layers = [*self.decoder.layers]
        if self.mtp is not None:
            depths: Any = self.mtp.layers
            layers += [layer for depth in depths for layer in depth.inner_layers]
        return [layer.mlp for layer in layers if layer.is_moe]

    def make_hash_tables(self, device: torch.device) -> None:
        """Make the tables of hash routing; a checkpoint may replace them."""
        for layer in self.moe_layers():
            layer.router.selection.make_tables(self.vocab_size, device)

    def sparse_attentions(self) -> list[SparseAttention]:
        return [*iter_sparse_attentions([self])]

    def named_state_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers to checkpoint (routers' expert_bias) by global name."""
        for layer in self.moe_layers():
            yield from layer.named_state_buffers()

    def named_scaling_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the state of delayed scaling, which is checkpointed but not exported."""
        return scaling_state(self)
