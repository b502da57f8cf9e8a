"""Memory of every pipeline rank, from flags alone: states, activations in flight, buffers, and the margin.

Weights, gradients and optimizer state: parameters of the rank (parameters.py) times bytes (state_bytes.py).
Activations: what every chunk saves of one microbatch (activations.py, with the tensors of the loss), times the
microbatches that the chunk has in flight. These follow from the rank's schedule (pipeline/orders.py): forward adds,
backward (W if weight gradients are computed separately) frees, and the moment with most bytes counts.

Temporary buffers, of which the largest counts: tokens sent and received with the gradients of the experts; gradients of
a layer's experts before they are added to the main gradients; what recompute restores, a layer at a time; offloaded
tensors on their way, of two layers; scores of attention without a fused kernel; what indexers of sparse attention train
on; with full sharding the gathered layer and the prefetched one. Gradients at the borders of
CUDA graphs are resident for every microbatch in flight. A graph of the full iteration has its own pool for all of this,
so the batches that it reads and what an evaluation needs come in addition.

In 8 bits, Transformer Engine's layers (the default --transformer-impl) save the quantized inputs of their GEMMs, its
experts that of their second GEMM too; this program's own experts save the first, as saved_quantized.py lists it, and
recompute the second. Its attention saves values as they are and its output once (ours pads them where values are
narrower than keys: 256 MiB of a layer of DeepSeek-V3 and 4096 tokens), and probabilities in the model's format. Flags
determine which of them compute (arguments/te_support.py), assuming that the package is installed. Otherwise both are
taken to save the same.

Experts receive an even share of tokens (forced balancing, as in the published runs). `headroom` is the load of the
fullest rank, as a multiple of an even share in all layers at once, at which the device is full.

Not counted: fragmentation of the allocator, NCCL's buffers, the CUDA context; RESERVED_BYTES covers them. Units: bytes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    has_attention,
    has_mlp,
    layer_letter,
    moe_layer_pattern,
    mtp_layer_pattern,
    typical_layers,
)
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.format_kinds.eight_bit import OUTPUT_LAYER
from arguments.mechanisms.placements import get_placement
from arguments.mechanisms.schedules import get_schedule
from arguments.mechanisms.selections import PROJECTIONS
from arguments.mechanisms.shardings import get_sharding
from arguments.mechanisms.sublayers import variant_of
from arguments.sparse_attention import use_gathered_keys
from arguments.stage_layout import ChunkLayout, chunk_layouts, parallel_sizes
from moe_trainer.estimate.activations import chunk_activations, layer_activations
from moe_trainer.estimate.interconnect import processed_load
from moe_trainer.estimate.parameters import LayerParams, ParamsPerRank
from moe_trainer.estimate.saved_tensor import INDEX, WIDE, SavedTensor, num_mlp_chunks, saves_te_attention
from moe_trainer.estimate.state_bytes import StateBytes
from moe_trainer.estimate.static_memory import stage_states
from moe_trainer.ops.block_sizes import SPARSE_ELEMENTS_CUDA, SPARSE_QUERY_BLOCK_CUDA, expert_buffer_tokens
from moe_trainer.ops.logit_chunks import logit_chunk_size
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, WEIGHT, Order, step_actions

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.moe import MoEArgs
    from arguments.training import TrainingArgs
    from moe_trainer.estimate.hardware import Hardware

_LAYER = re.compile(r"^(?:decoder|mtp)\.layers\.\d+\.(?:mtp_model_layer\.(?:layers\.\d+\.)?)?")

OFFLOADS_IN_FLIGHT = 2
"""Layers whose offloaded tensors are on the device at a time."""
_IN_CHUNKS = tuple(
    f"{name}." for name in ("mlp", "experts", "shared_experts", "routes", "fc2_latent_proj", *PROJECTIONS)
)
"""Saved tensors of what runs in chunks (--mlp-chunks-for-training)."""
_MODULES = (
    ("logits", ("head.",)),
    ("norms", ("layernorm", "normed", "enorm", "hnorm", "joined")),
    ("shared experts", ("shared_experts",)),
    ("expert inputs", ("experts.x",)),
    ("expert activations", ("experts.linear", "experts.probs")),
    ("routing", ("router", "routes", "own_rows", "experts.order")),
    ("attention", ("core_attn", "q_", "kv_", "log_sum_exp", "probs", "choice", "indexer")),
    ("feed-forward", ("mlp.",)),
)


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of the ranks of one pipeline stage, in bytes.

    Attributes:
        held: parameters.
        weights: with their quantized casts, if these are kept between microbatches.
        optimizer: main parameters and moments on the device.
        activations: by module.
        peak_inflight_microbatches: of each chunk at that moment.
        dispatch: buffers of the token exchange.
        working: other temporary buffers.
        host: in host memory.
        headroom: see the head of this module; None without experts, or if no load would fill the device.
    """

    stage: int
    held: ParamsPerRank
    weights: float
    gradients: float
    optimizer: float
    activations: Mapping[str, float]
    peak_inflight_microbatches: tuple[int, ...]
    dispatch: float
    working: float
    host: float
    headroom: float | None = None

    @property
    def kept(self) -> float:
        return sum(self.activations.values())

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.kept + self.dispatch + self.working


def graph_bytes(args: Arguments, chunks: Sequence[ChunkLayout], counts: Sequence[int], sizes: ChunkBytes) -> float:
    """Return what captured layer parts keep in addition to saved tensors (memory/cuda_graph.py).

    These are the gradients of their inputs and outputs, for each of the `counts` microbatches that a chunk has in
    flight.
    """
    units = 0
    for count, chunk in zip(counts, chunks):
        units += count * sum(_captured_parts(args, number, sizes.pattern[number]) for number in chunk.layers)
    return 2.0 * units * sizes.rows * args.model.hidden_size * sizes.size


def _captured_parts(args: Arguments, number: int, is_moe: bool) -> int:
    """Return how many graphs a layer, counted from 0, is captured as."""
    parts = {"layer"}
    if layer_letter(args.model, number) == MAMBA:
        parts.add("mamba")
    elif has_attention(args.model, number):
        parts.add("attn")
    if has_mlp(args.model, number):
        parts |= {"moe", "moe_router"} if is_moe else {"mlp"}
    return len(args.training.captured_modules & parts)


def iteration_graph_bytes(
    args: Arguments, chunks: Sequence[ChunkLayout], sizes: ChunkBytes, num_microbatches: int, dispatch: float
) -> float:
    """Return what a graph of the full iteration needs in addition: batches, and an evaluation outside its pool.

    `dispatch`: bytes of a token exchange.
    """
    if "iteration" not in args.training.captured_modules:
        return 0.0
    per_token = 3 * 8 + 4  # ids, labels, positions, loss mask
    batches = num_microbatches * args.training.micro_batch_size * args.data.seq_length * per_token
    if not args.training.eval_iters:
        return float(batches)
    kinds = {sizes.pattern[number] for chunk in chunks for number in chunk.layers}
    return batches + max(map(sizes.layer, kinds), default=0.0) + dispatch


def _local_name(name: str) -> str:
    """Return a name without "decoder.layers.3." or "mtp.layers.0."."""
    return _LAYER.sub("", name)


def module_name(name: str) -> str:
    """Return the part of a model that a saved tensor belongs to."""
    bare = _local_name(name)
    if bare in ("q", "k", "v", "out"):
        return "attention"
    return next((module for module, marks in _MODULES if any(mark in bare for mark in marks)), "other")


def without_recompute(training: TrainingArgs) -> TrainingArgs:
    """Return the arguments with all activations saved."""
    return replace(
        training, recompute_granularity=None, recompute_method=None, recompute_num_layers=None, recompute_modules=None
    )


class ChunkBytes:
    """Bytes that chunks save of one microbatch; layers of one kind are counted once."""

    def __init__(self, args: Arguments, vocab_rows: int, load: float = 1.0):
        self.args, self.vocab_rows = args, vocab_rows
        self.pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
        self.tp = args.parallel.tensor_model_parallel_size
        self.tokens = args.training.micro_batch_size * args.data.seq_length // args.parallel.context_parallel_size
        self.rows = self.tokens // self.tp if args.parallel.sequence_parallel else self.tokens
        self.etp = args.parallel.etp_size
        routed = self.tokens // self.tp * args.moe.moe_router_topk
        self.sent = math.ceil(routed * processed_load(args.moe))
        self.received = math.ceil(routed * self.etp * processed_load(args.moe, load))
        factor = args.moe.moe_expert_rank_capacity_factor
        self.buffered = max(self.received, expert_buffer_tokens(routed * self.etp, factor) if factor else 0)
        self.size = 4 if args.precision.params_dtype_name == "fp32" else 2
        self.te_experts = args.te_quantizes[1]
        self.packed = args.packed_capacity is not None
        self.te_attends = saves_te_attention(args, self.packed)
        positions = self.tokens // self.tp // args.training.micro_batch_size
        self.mlp_chunks = num_mlp_chunks(args.training, positions)
        self._chunks: dict[object, Mapping[tuple[str, bool], float]] = {}
        self._offloaded: dict[object, float] = {}
        self._layers: dict[bool, float] = {}
        self._moved: dict[bool, float] = {}
        self._restored: dict[bool, float] = {}

    def of(self, layout: ChunkLayout) -> Mapping[tuple[str, bool], float]:
        """Return the bytes of one chunk and microbatch by (module, whether on the host)."""
        key = self._key(layout)
        if key not in self._chunks:
            sizes: defaultdict[tuple[str, bool], float] = defaultdict(int)
            by_layer: defaultdict[str, float] = defaultdict(int)
            layers = chunk_activations(self.args, layout, received=self.received, packed=self.packed)
            for entry in (*layers, *self._final_tensors(layout)):
                sizes[module_name(entry.name), entry.on_host] += entry.num_bytes
                by_layer[entry.name.removesuffix(_local_name(entry.name))] += entry.num_bytes * entry.on_host
            self._chunks[key] = sizes
            self._offloaded[key] = max(by_layer.values(), default=0.0)
        return self._chunks[key]

    def offloaded_by_layer(self, layout: ChunkLayout) -> float:
        """Return the bytes of one microbatch that a layer of a chunk offloads, of the layer that offloads most."""
        self.of(layout)
        return self._offloaded[self._key(layout)]

    def _key(self, layout: ChunkLayout) -> object:
        """Return what the bytes of a chunk depend on."""
        kinds: object = tuple(self.pattern[number] for number in layout.layers)
        model = self.args.model
        if len(self.args.parallel.cp_comm_type) > 1 or model.linear_attention_freq or model.hybrid_layer_pattern:
            kinds = layout.layers  # kinds of layers that differ by number
        return (kinds, layout.mtp, layout.has_loss, layout.has_final_norm)

    def _final_tensors(self, layout: ChunkLayout) -> Iterator[SavedTensor]:
        """Yield the tensors of the final norm, and of head and loss for the model and each MTP depth."""
        model, hidden = self.args.model, self.args.model.hidden_size
        if layout.has_final_norm and model.enable_hyper_connections:
            yield SavedTensor("hyper_connection_head.x", (self.rows, model.num_residual_streams * hidden), self.size)
        if layout.has_final_norm:
            yield SavedTensor("final_layernorm.x", (self.rows, hidden), self.size)
            yield SavedTensor("final_layernorm.statistics", (self.rows,), WIDE)
        if layout.has_loss:
            for _ in range(1 + model.num_mtp_depths):
                yield from self._loss_tensors()

    def _loss_tensors(self) -> Iterator[SavedTensor]:
        """Yield what a loss saves: the logits, or the gradients where it runs in chunks (ops/cross_entropy.py)."""
        args, hidden, columns = self.args, self.args.model.hidden_size, self.vocab_rows // self.tp
        size = {"fp32": 4, "bf16": 2}.get(args.precision.logit_dtype or "", self.size)
        step = logit_chunk_size(self.tokens, columns, hidden, weight_bytes=self.size, logit_bytes=size, on_cpu=False)
        defers = args.parallel.has_deferred_wgrad or args.parallel.has_deferred_head_wgrad
        waits = (defers and not args.model.add_output_layer_bias) or getattr(args.precision, OUTPUT_LAYER)
        if args.model.add_output_layer_bias:  # with the weight, in a copy of it
            yield SavedTensor("head.weight_and_bias", (columns, hidden + 1), self.size)
        if waits or args.precision.fp16 or step == self.tokens:
            yield SavedTensor("head.logits", (self.tokens, columns), size)
            yield SavedTensor("head.normed", (self.rows, hidden), self.size)
            yield SavedTensor("head.logits.labels", (self.tokens,), INDEX)
        else:
            yield SavedTensor("head.x_gradient", (self.tokens, hidden), self.size)
            yield SavedTensor("head.weight_gradient", (columns, hidden), WIDE)
            yield SavedTensor("head.loss_weights", (self.tokens,), WIDE)

    def restored(self, is_moe: bool) -> float:
        """Return the bytes that recompute restores of a layer at a time: of feed-forward parts those of a chunk."""
        if is_moe not in self._restored:
            bare = self._chunk_bytes(is_moe, replace(self.args, training=without_recompute(self.args.training)))
            full = self.args.training.recompute_granularity == "full"
            self._restored[is_moe] = bare - (0.0 if full else self._chunk_bytes(is_moe, self.args))
        return self._restored[is_moe]

    def _chunk_bytes(self, is_moe: bool, args: Arguments) -> float:
        """Return the bytes of one layer, of what runs in chunks those of one."""
        return max(
            sum(
                entry.num_bytes / (self.mlp_chunks if entry.name.startswith(_IN_CHUNKS) else 1)
                for entry in layer_activations(args, is_moe=is_moe, number=number, received=self.received)
            )
            for number in typical_layers(args.model, self.pattern, is_moe)
        )

    def _layer_bytes(self, args: Arguments, is_moe: bool, as_moved: bool = False) -> float:
        """Return the bytes of one layer; of the letters of a hybrid model, those of the largest."""
        return max(
            sum(
                entry.num_bytes
                for entry in layer_activations(
                    args, is_moe=is_moe, number=number, received=self.received, as_moved=as_moved
                )
            )
            for number in typical_layers(args.model, self.pattern, is_moe)
        )

    def layer(self, is_moe: bool) -> float:
        """Return the device bytes of one layer."""
        if is_moe not in self._layers:
            self._layers[is_moe] = self._layer_bytes(self.args, is_moe)
        return self._layers[is_moe]

    def moved_by_layer(self, is_moe: bool) -> float:
        """Return the device bytes that forward moves of what one layer saves, without recompute (LayerSizes)."""
        if is_moe not in self._moved:
            args = replace(self.args, training=without_recompute(self.args.training))
            self._moved[is_moe] = self._layer_bytes(args, is_moe, as_moved=True)
        return self._moved[is_moe]


def stage_orders(args: Arguments, num_microbatches: int) -> list[Order]:
    """Return the orders of actions of the schedule, by pipeline rank."""
    parallel = args.parallel
    num_chunks = len(chunk_layouts(args.model, parallel)[0])
    kind = ScheduleKind.of_flags(parallel, num_chunks)
    return kind.orders(parallel.pipeline_model_parallel_size, num_microbatches)


def steady_state_microbatches(args: Arguments, num_microbatches: int) -> int:
    """Return a smaller number of microbatches with the same peak: the steady state repeats with every group."""
    parallel = args.parallel
    group = parallel.microbatch_group_size_per_vp_stage or parallel.pipeline_model_parallel_size
    enough = 4 * max(group, parallel.pipeline_model_parallel_size)
    if num_microbatches <= enough + group:
        return num_microbatches
    return enough // group * group + num_microbatches % group + group


def peak_inflight_microbatches(order: Order, sizes: Sequence[float], frees: str = BACKWARD) -> tuple[int, ...]:
    """Return the microbatches of each chunk at the moment with most bytes.

    `sizes`: bytes of a microbatch, by chunk. `frees`: kind of the action that frees them.
    """
    count, best, most = [0] * len(sizes), (0,) * len(sizes), -1.0
    for step in order:
        # in a pair the backward frees a layer for every layer that the forward runs
        for action in reversed(step_actions(step)):
            if action.kind == FORWARD:
                count[action.chunk] += 1
                now = sum(number * size for number, size in zip(count, sizes))
                if now > most:
                    best, most = tuple(count), now
            elif action.kind == frees:
                count[action.chunk] -= 1
    return best


def plan_memory(
    args: Arguments, world_size: int, vocab_rows: int, num_microbatches: int, hardware: Hardware | None = None
) -> tuple[StageMemory, ...]:
    """Return the memory of every pipeline stage, first to last.

    `hardware`: needed for `headroom`.

    Raises:
        ValueError: if the optimizer's state is unknown.
    """
    layouts = chunk_layouts(args.model, args.parallel)
    # loads that fit into buffers of fixed sizes take no more memory than an even one
    first = max([1.0, *_buffer_factors(args.moe)])
    even, crowded = ChunkBytes(args, vocab_rows), ChunkBytes(args, vocab_rows, 2 * first)
    full = even if first == 1.0 else ChunkBytes(args, vocab_rows, first)
    params = LayerParams(args, vocab_rows)
    orders = stage_orders(args, steady_state_microbatches(args, num_microbatches))
    found = []
    for stage, (chunks, state) in enumerate(zip(layouts, stage_states(args, world_size, vocab_rows, hardware))):
        plan_stage = partial(
            _stage, args, stage, chunks, params, state, order=orders[stage], num_microbatches=num_microbatches
        )
        now = plan_stage(even)
        if args.moe.num_experts and hardware is not None:
            limit = processed_load(args.moe, math.inf)  # where tokens are dropped, no load is larger
            more = processed_load(args.moe, 2 * first) - processed_load(args.moe, first)
            least, most = now.total if full is even else plan_stage(full).total, plan_stage(crowded).total
            margin = hardware.usable_bytes - least
            headroom = max(0.0, first + margin / ((most - least) / more)) if more and most > least else math.inf
            now = replace(now, headroom=headroom if headroom < limit else None)
        found.append(now)
    return tuple(found)


def _buffer_factors(moe: MoEArgs) -> Iterator[float]:
    """Yield the sizes of buffers for received tokens, as multiples of an even share."""
    if moe.moe_expert_rank_capacity_factor is not None:
        yield moe.moe_expert_rank_capacity_factor
        if moe.moe_paged_stash:
            yield moe.moe_paged_stash_buffer_size_factor_cuda


def _stage(
    args: Arguments,
    stage: int,
    chunks: Sequence[ChunkLayout],
    params: LayerParams,
    state: StateBytes,
    sizes: ChunkBytes,
    order: Order,
    num_microbatches: int,
) -> StageMemory:
    held = params.stage(chunks)
    saved = [sizes.of(chunk) for chunk in chunks]
    on_device = [sum(count for (_, on_host), count in each.items() if not on_host) for each in saved]
    apart = get_schedule(args.parallel).splits_backward
    counts = peak_inflight_microbatches(order, on_device, WEIGHT if apart else BACKWARD)
    modules: defaultdict[str, float] = defaultdict(int)
    host = state.host
    for number, each in zip(counts, saved):
        for (module, on_host), count in each.items():
            if on_host:
                host += number * count
            else:
                modules[module] += number * count
    dispatch, working = _buffers(args, chunks, params, sizes)
    if args.has_frozen_weights:  # forward only: a layer's tensors are freed after it
        kinds = {sizes.pattern[number] for chunk in chunks for number in chunk.layers}
        counts, host, working = (0,) * len(chunks), state.host, max(map(sizes.layer, kinds), default=0.0)
        modules.clear()
    else:
        working += graph_bytes(args, chunks, counts, sizes)
        working += iteration_graph_bytes(args, chunks, sizes, num_microbatches, dispatch)
    optimizer = state.main_params + state.moments - state.host
    states = (state.weights, state.gradients, optimizer)
    return StageMemory(stage, held, *states, dict(modules), counts, dispatch, working, host)


def _buffers(
    args: Arguments, chunks: Sequence[ChunkLayout], params: LayerParams, sizes: ChunkBytes
) -> tuple[float, float]:
    """Return the bytes of temporary buffers: (of the token exchange, of everything else)."""
    moe, training, hidden = args.moe, args.training, args.model.hidden_size
    kinds = {sizes.pattern[number] for chunk in chunks for number in chunk.layers}
    if any(chunk.mtp for chunk in chunks):
        kinds |= {*mtp_layer_pattern(sizes.pattern, args.model.hybrid_layer_pattern)}
    dispatch = 0.0
    if True in kinds:
        sent, received, (reads, makes) = sizes.sent, sizes.buffered, moe.expert_widths(hidden)
        dispatcher = get_dispatcher(moe)
        back = makes if dispatcher.sends_copies else reads
        if dispatcher.gathers:
            sent = sizes.tokens // sizes.tp * sizes.etp * args.parallel.expert_model_parallel_size
        if dispatcher.sorts_tokens:
            makes = reads  # its library wants full rows from the experts
        # dispatch and combine; the experts' output and its gradient
        dispatch = float((sent * (reads + back) + received * (reads + makes)) * sizes.size)
        width = (moe.moe_ffn_hidden_size or args.model.ffn_hidden_size) // sizes.etp
        dispatch += received * 3 * width * sizes.size  # gradients of what the activation reads and makes
        dispatch /= sizes.mlp_chunks
        dispatch *= 2 if args.parallel.overlap_moe_expert_parallel_comm else 1
    # in a pair one layer runs before another is freed
    working = max(map(sizes.layer, kinds), default=0.0) if args.parallel.overlap_moe_expert_parallel_comm else 0.0
    if True in kinds and moe.moe_grouped_gemm and not sizes.te_experts:
        # gradients of a layer's experts, before they are added to the main gradients
        working += params.layers[True].expert * sizes.size
    if training.recompute_granularity is not None:
        is_full, span = training.recompute_granularity == "full", 1
        if is_full and training.recompute_method == "uniform":
            span = training.recompute_num_layers or 1
        working += span * max(map(sizes.restored, kinds), default=0.0)
    working += indexer_bytes(args, sizes)
    # one layer's tensors are copied to the host while the next computes, and come back while the one after it does
    working += OFFLOADS_IN_FLIGHT * max(map(sizes.offloaded_by_layer, chunks), default=0.0)
    working += score_bytes(args, sizes)
    if True in kinds:
        ep = args.parallel.expert_model_parallel_size
        held = get_placement(args.moe, ep).held_elements(args.moe, params.layers[True].expert, ep, params.num_experts)
        working += float(held * sizes.size)
    if get_sharding(args.parallel).gathers_each_pass:
        largest = max((params.layers[kind].total for kind in kinds), default=0)
        gathered = 3 if args.parallel.overlap_moe_expert_parallel_comm else 2  # a layer for each pass, and the next one
        reduced = 1  # the gradients of a layer before they are reduced
        working += largest * (gathered * sizes.size + 4 * reduced)
    return dispatch, working


def score_bytes(args: Arguments, sizes: ChunkBytes) -> float:
    """Return the temporary score matrices of attention without a fused kernel.

    The scores next to the saved probabilities in forward, and the gradients of both in backward.
    """
    if not sizes.te_attends or not get_attention_backend(args.model).stores_scores:
        return 0.0
    heads, length = args.model.num_attention_heads // sizes.tp, args.data.seq_length
    return 2.0 * args.training.micro_batch_size * heads * length**2 * sizes.size


def indexer_bytes(args: Arguments, sizes: ChunkBytes) -> float:
    """Return the temporary tensors of indexers that select keys and train (ops/sparse_attention.py).

    fp32 copies of the queries, of the keys of the full sequence and of the index queries, with the gradient of these;
    and four tensors of [heads, block, keys]. With gathered keys, latents of the full sequence replace the copies, and
    their fp32 gradient exists in backward, which trains nothing.
    """
    model = args.model
    if not variant_of(model).selects_keys:
        return 0.0
    keys, heads = args.training.micro_batch_size * args.data.seq_length, model.num_attention_heads // sizes.tp
    learned = bool(model.dsa_indexer_loss_coeff)
    index = sizes.tokens * model.dsa_indexer_n_heads * model.dsa_indexer_head_dim
    if use_gathered_keys(args):
        whole = keys * (model.kv_lora_rank + model.qk_pos_emb_head_dim) * (1 + sizes.size / 4)
    else:
        whole = (sizes.tokens + keys) * heads * (model.qk_head_dim + model.qk_pos_emb_head_dim) if learned else 0
    block = min(
        SPARSE_ELEMENTS_CUDA, SPARSE_QUERY_BLOCK_CUDA * keys * max(model.dsa_indexer_n_heads, heads if learned else 0)
    )
    return 4.0 * (whole + (2 if learned else 1) * index + 4 * block)


def data_parallel_size(args: Arguments, world_size: int) -> int:
    """Return the number of replicas of the model, at least one."""
    sizes = parallel_sizes(args)
    return max(1, world_size // (sizes["tp"] * sizes["pp"] * sizes["cp"]))


def microbatches_per_iteration(args: Arguments, world_size: int) -> int:
    """Microbatches of an iteration on every data-parallel rank, at the full global batch size; at least one."""
    replicas = data_parallel_size(args, world_size)
    batch = args.training.global_batch_size or args.training.micro_batch_size * replicas
    return max(1, batch // (args.training.micro_batch_size * replicas))
