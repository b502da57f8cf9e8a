"""The step that a roofline executes: which pipeline stages, with which flags, and how it differs from that of a run.

The emulated device has one rank, no libraries for the token exchange and no graphs, so some flags are executed as
others and timed as what they are (roofline.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import is_linear, layer_letter, moe_layer_pattern, uses_chunks, uses_window
from arguments.mechanisms.dispatchers import ALLTOALL, get_dispatcher
from arguments.mechanisms.formats import quantized_format
from arguments.mechanisms.implementations import get_implementation
from arguments.mechanisms.sublayers import variant_of
from arguments.stage_layout import ChunkLayout, chunk_layouts, grid_sizes, parallel_sizes
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.estimate.parameters import planned_vocab_size
from moe_trainer.parallel.grid import make_layout

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.plan import Plan

EXECUTED_MICROBATCHES = 3
"""Microbatches that are executed: the first, the last, and one for all between."""


def stage_kinds(args: Arguments) -> list[tuple]:
    """Return what the chunks of each pipeline rank hold; ranks that hold the same launch the same."""
    pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)

    def kind(chunk: ChunkLayout) -> tuple:
        layers = [
            (
                pattern[number],
                is_linear(args.model, number),
                uses_window(args.model, number + 1) or uses_chunks(args.model, number + 1),
                layer_letter(args.model, number),
            )
            for number in chunk.layers
        ]
        ends = (chunk.has_embedding, chunk.has_loss, chunk.has_final_norm)
        return *layers, *ends, chunk.mtp, chunk.receives_normed, chunk.receives_depths

    return [tuple(map(kind, chunks)) for chunks in chunk_layouts(args.model, args.parallel)]


def stages_to_execute(args: Arguments) -> list[int]:
    """Return one pipeline rank of every kind."""
    kinds = stage_kinds(args)
    return sorted(kinds.index(kind) for kind in set(kinds))


def rank_of_stage(args: Arguments, world_size: int, stage: int) -> int:
    layout = make_layout(world_size, **grid_sizes(args.parallel))
    return next(ranks for ranks in layout.groups("pp") if 0 in ranks)[stage]


def executed_args(args: Arguments, world_size: int, microbatches: int) -> Arguments:
    """Return the flags that are executed in place of these; `notes` says how they differ.

    Raises:
        ValueError: if the size of the vocabulary is unknown, or the lengths of packed sequences.
    """
    if args.packed_capacity is not None and args.output.length_histogram is None:
        raise ValueError(f"the executed step of {args.data.sequences_flag} needs lengths: give --length-histogram")
    rows, _ = planned_vocab_size(args)
    if rows is None:
        raise ValueError("the executed step needs the size of the vocabulary: give --vocab-size or --padded-vocab-size")
    is_of_flags = rows == padded_vocab_size_from_flags(args)
    sizes = parallel_sizes(args)
    replicas = world_size // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    drops = args.moe.moe_expert_capacity_factor is not None and args.moe.moe_expert_capacity_factor >= 0
    training = args.training
    return replace(
        args,
        training=replace(
            training,
            global_batch_size=microbatches * training.micro_batch_size * replicas,
            rampup_batch_size=None,
            train_iters=training.train_iters or 10,
            cuda_graph_impl="none",
            cuda_graph_modules=[],
        ),
        parallel=replace(
            args.parallel,
            overlap_moe_expert_parallel_comm=False,
            delay_wgrad_compute=False,
            overlap_dispatch_backward_with_experts_wgrad=False,
        ),
        moe=replace(args.moe, moe_pad_expert_input_to_capacity=drops, **ALLTOALL.selected_by),
        precision=replace(args.precision, on_missing_backend="fallback"),
        optimizer=replace(
            args.optimizer,
            optimizer_cpu_offload=False,
            chunked_optimizer_state_offload=False,
            lr=args.optimizer.lr or 1e-4,
        ),
        data=replace(args.data, vocab_size=args.data.vocab_size if is_of_flags else rows - 1),
        output=replace(args.output, init_from=None, load=None, save=None),
    )


def recording_key(plan: Plan) -> tuple:
    """Return what determines the recording of a plan: command lines with one key launch the same operators."""
    args = executed_args(plan.args, plan.world_size, min(EXECUTED_MICROBATCHES, plan.num_microbatches))
    unread = vars(args.output)
    flags = tuple((name, str(value)) for name, value in args.as_dict().items() if name not in unread)
    parts = tuple(sorted(plan.args.training.captured_modules - {"iteration"}))
    blackwell = plan.width != "bf16" and plan.hardware.is_blackwell
    lengths = None if plan.lengths is None else (plan.histogram, plan.lengths.seq_length)
    return plan.world_size, blackwell, "triton_kernels" in args.typed, parts, flags, lengths


def notes(args: Arguments) -> Iterator[str]:
    """Yield how the executed step differs from that of the flags."""
    moe, parallel, training, optimizer = args.moe, args.parallel, args.training, args.optimizer
    if moe.num_experts:
        yield "tokens: an even routing, as in the plan"
    dispatcher = get_dispatcher(moe)
    if moe.num_experts and dispatcher is not ALLTOALL and parallel.expert_model_parallel_size > 1:
        yield f"dispatcher: executed with all-to-all, timed as {dispatcher.key}"
    if args.packed_capacity is not None:
        yield "packed sequences: some packs, each of the slowest rank of its microbatch, stand for all"
        if parallel.pipeline_model_parallel_size > 1:
            yield "pipeline: microbatches take the mean of their times"
    has_capacity = moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0
    if has_capacity and not moe.moe_pad_expert_input_to_capacity:
        yield "capacity: executed with experts that are filled up to it"
    if training.captured_modules:
        yield "CUDA graphs: executed without; the operators of captured parts cost no launch"
    if parallel.overlap_moe_expert_parallel_comm:
        yield "overlapped exchange: executed one after the other; the planner's share of it is hidden"
    if parallel.tp_comm_overlap and quantized_format(args.precision):
        yield "overlapped tensor-parallel communication: executed without; the planner's share of it is hidden"
    if get_implementation(args.precision).package is not None:
        linears, experts = args.te_quantizes
        casts = "their casts take" if experts or not moe.num_experts else "the casts of linears take"
        yield "TransformerEngine's layers: this program's own stand in for them" + (
            f"; {casts} what the plan's take" if linears or experts else ", which launch more kernels"
        )
    if variant_of(args.model).variant is not None:
        yield (
            "linear and sparse attention: their Triton kernels are timed by what they move; their FLOPs are not counted"
        )
    if optimizer.optimizer_cpu_offload or optimizer.chunked_optimizer_state_offload:
        yield "offloaded optimizer: executed without; its time is the planner's"
