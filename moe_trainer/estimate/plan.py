"""A plan: memory and time of a command line on given accelerators, from flags alone; plan_text.py prints it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arguments import ArgumentError, parse_args
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.formats import quantized_format
from arguments.parse import as_plan
from arguments.stage_layout import chunk_layouts
from moe_trainer.data.group_packing import GroupSizes
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.length_histogram import LengthHistogram, PackedLengths
from moe_trainer.estimate.memory import (
    StageMemory,
    data_parallel_size,
    microbatches_per_iteration,
    plan_memory,
)
from moe_trainer.estimate.parameters import ParamCounts, count_parameters, planned_vocab_size
from moe_trainer.estimate.published_runs import BILLION_PARAMS, PUBLISHED_RUNS, PublishedRun
from moe_trainer.estimate.step_time import StepTime, plan_step
from moe_trainer.pipeline.batch_sizes import deadlocking_batch_sizes

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

DAY = 86400.0


class PlanError(ValueError):
    """Legal flags that do not determine a plan."""


@dataclass(frozen=True)
class ReferenceRun:
    """The most similar published run, what differs, and its distance (see `closest_reference_run`)."""

    run: PublishedRun
    differs: tuple[str, ...]
    distance: float


@dataclass(frozen=True)
class Plan:
    """Resources and speed of a run.

    Attributes:
        args: of the run; with packed samples those of full packs (`full_packs`).
        memory: by pipeline stage.
        flops: of an iteration, as Megatron-LM counts them.
        num_tokens: of an iteration, without padding.
        batch_size: sequences of args.data.seq_length tokens that the microbatches of an iteration have space for.
        vocab_rows: padded vocabulary size.
        timed: arguments and tokens of the attended sequence that `time` is of; others than those of `args` in dynamic
            groups and packs.
        note: assumptions.
        histogram: lengths of sequences (--length-histogram).
        lengths: these sequences in packs; None if all are --seq-length long.
        padded_step: seconds of an iteration of padded sequences, as many as would be packs; None without `lengths`.
    """

    args: Arguments
    world_size: int
    hardware: Hardware
    counts: ParamCounts
    memory: tuple[StageMemory, ...]
    time: StepTime
    flops: float
    num_tokens: float
    num_microbatches: int
    batch_size: int
    vocab_rows: int
    timed: tuple[Arguments, float]
    note: str = ""
    histogram: LengthHistogram | None = None
    lengths: PackedLengths | None = None
    padded_step: float | None = None

    @property
    def peak(self) -> StageMemory:
        """The stage with most bytes."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def margin(self) -> float:
        """Bytes that the fullest device has left; negative if it does not fit."""
        return self.hardware.usable_bytes - self.peak.total

    @property
    def headroom(self) -> float | None:
        """The smallest headroom of all stages (memory.py)."""
        return min((stage.headroom for stage in self.memory if stage.headroom is not None), default=None)

    def fits(self, headroom: float) -> bool:
        """Return whether it fits while a rank gets `headroom` times an even share of tokens."""
        return self.margin >= 0 and (self.headroom is None or self.headroom >= headroom)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU, without padding."""
        return self.num_tokens / self.time.step / self.world_size

    @property
    def tokens_per_day(self) -> float:
        """Tokens per day of all GPUs."""
        return self.tokens_per_second * self.world_size * DAY

    @property
    def tflops(self) -> float:
        """TFLOP/s of one GPU."""
        return self.flops / self.time.step / self.world_size / 1e12

    @property
    def width(self) -> str:
        """Width of the GEMMs: "bf16" (or wider) or a quantized one (Hardware.gemm_width)."""
        return self.hardware.gemm_width(self.args.precision)

    @property
    def mfu(self) -> float:
        """TFLOP/s as a fraction of the device's peak in the format of the GEMMs."""
        return self.tflops * 1e12 / self.hardware.peak(self.width)


def validated_args(argv: Sequence[str], world_size: int, checkpoint: Mapping[str, object] | None = None) -> Arguments:
    """Return the arguments, if a run on `world_size` ranks would start with them.

    Raises:
        ArgumentError: with everything that is wrong.
        PlanError: for batch sizes with which virtual stages would deadlock.
    """
    args = parse_args(as_plan(argv), world_size, checkpoint)
    if args.unbuildable:
        raise ArgumentError(args.unbuildable)
    waiting = deadlocking_batch_sizes(args, data_parallel_size(args, world_size))
    if waiting:
        raise PlanError("; ".join(waiting))
    return args


def make_plan(args: Arguments, world_size: int, hardware: Hardware, histogram: LengthHistogram | None = None) -> Plan:
    """Plan legal flags for `world_size` ranks; with a histogram, for packs of such sequences.

    Raises:
        PlanError: if the size of the vocabulary, the sequences or the batches is unknown.
        ValueError: if the optimizer's state is unknown.
    """
    rows, note = planned_vocab_size(args)
    if rows is None:
        raise PlanError("a plan needs the size of the vocabulary: give --vocab-size or --padded-vocab-size")
    for dest, value in (("--seq-length", args.data.seq_length), ("--micro-batch-size", args.training.micro_batch_size)):
        if not value:
            raise PlanError(f"a plan needs {dest}")
    length, multiple, is_packed = args.data.seq_length, microbatch_multiple(args), args.max_packed_tokens is not None
    lengths = None if histogram is None else PackedLengths.of(histogram, args, rows, multiple)
    timed = args
    if is_packed:  # dynamic groups need the memory of the largest one, and take the time of the mean token's
        groups = None if lengths is None else lengths.groups
        args, timed = full_packs(args), full_packs(args, None if groups is None else groups.mean_size)
        note = "; ".join(filter(None, (note, _packed_note(args, length))))
    count = microbatches_per_iteration(args, world_size)
    num_ranks = data_parallel_size(args, world_size)
    if is_packed:
        count = packed_microbatches(args, num_ranks, length, lengths)
    memory = plan_memory(args, world_size, rows, count, hardware)
    time = plan_step(args, world_size, rows, count, memory, hardware, length)
    padded_step = None
    batch = count * num_ranks * args.training.micro_batch_size
    num_tokens, seen = float(batch * args.data.seq_length), float(length)
    flops = training_flops(args, num_tokens / length, length, rows)
    if lengths is not None:
        if is_packed:  # --global-batch-size counts sequences, not packs
            num_tokens = args.training.global_batch_size * lengths.histogram.mean
        else:
            num_tokens *= lengths.fill
        padded_step, flops = time.step, num_tokens * lengths.flops_per_token
        seen = lengths.histogram.attention_length
        time = plan_step(timed, world_size, rows, count, memory, hardware, seen)
    fmt = quantized_format(args.precision)
    if fmt is not None and hardware.gemm_width(args.precision) == "bf16":
        missing = (
            f"{hardware.name} has no {fmt.key} GEMMs: they are computed in bf16 from quantized operands, and the "
            "planned time, that of bf16 GEMMs, is a lower bound"
        )
        note = "; ".join(filter(None, (note, missing)))
    if args.has_frozen_weights:
        forward = (
            "the weights are not updated: memory is that of a forward pass; the time is still that of a training "
            "step, and a forward pass takes about a third"
        )
        note = "; ".join(filter(None, (note, forward)))
    counts = count_parameters(args, rows)
    return Plan(
        args,
        world_size,
        hardware,
        counts,
        memory,
        time,
        flops,
        num_tokens,
        count,
        batch,
        rows,
        (args if lengths is None else timed, seen),
        note,
        histogram=histogram,
        lengths=lengths,
        padded_step=padded_step,
    )


def full_packs(args: Arguments, cp_size: int | None = None) -> Arguments:
    """Return arguments that compute full packs in every microbatch: as several sequences, else as one.

    Args:
        args: with packing.
        cp_size: of all groups of dynamic context parallelism; None for the smallest that holds --seq-length.
    """
    length, tokens, parallel = args.data.seq_length, args.max_packed_tokens, args.parallel
    assert tokens is not None and args.packed_capacity is not None, "they are packed"
    if sizes := args.dynamic_cp_sizes:
        limits = GroupSizes.of(sizes, args.packed_capacity, args.sequence_padding_multiple, float)
        cp_size = cp_size or limits.smallest(length)
        tokens = tokens // parallel.context_parallel_size * cp_size
        parallel = replace(parallel, context_parallel_size=cp_size)
    sequences = tokens // length if tokens % length == 0 else 1
    return replace(
        args,
        parallel=parallel,
        data=replace(args.data, seq_length=tokens // sequences),
        training=replace(args.training, micro_batch_size=sequences),
    )


def _packed_note(args: Arguments, length: int) -> str:
    """Say how packs of sequences of up to `length` tokens are planned."""
    sequences, cp_size = args.training.micro_batch_size, args.parallel.context_parallel_size
    if args.dynamic_cp_sizes:
        tokens = args.data.seq_length * sequences // cp_size
        return (
            f"dynamic groups: memory is planned as full microbatches of {tokens:,} tokens per rank, in groups of "
            f"{cp_size}, which --seq-length needs"
        )
    if args.data.seq_length == length:
        return f"packed sequences: planned as full microbatches of {sequences} x --seq-length tokens"
    return f"packed sequences: planned as full microbatches of {args.data.seq_length:,} tokens"


def microbatch_multiple(args: Arguments) -> int:
    """Return the multiple that the number of packed microbatches must be."""
    has_virtual_stages = len(chunk_layouts(args.model, args.parallel)[0]) > 1
    return (args.parallel.microbatch_group_size_per_vp_stage or 1) if has_virtual_stages else 1


def packed_microbatches(args: Arguments, num_ranks: int, length: int, lengths: PackedLengths | None) -> int:
    """Return the microbatches of an iteration on every data-parallel rank.

    Args:
        args: of full packs.
        num_ranks: data-parallel ranks.
        length: tokens of every sequence without lengths.
        lengths: of the sequences.
    """
    if lengths is None:
        per_pack = args.training.micro_batch_size * args.data.seq_length / length
    else:
        per_pack = lengths.per_pack
    count = args.training.global_batch_size / per_pack / num_ranks
    if lengths is not None and lengths.groups is not None:
        count = lengths.groups.num_microbatches
    multiple = microbatch_multiple(args)
    return math.ceil(count / multiple) * multiple


def retimed_step(plan: Plan, hardware: Hardware, factor: float = 1.0) -> StepTime:
    """Return the time of a plan's iteration with other constants or another factor of all passes (see plan_step)."""
    return plan_step(
        plan.args, plan.world_size, plan.vocab_rows, plan.num_microbatches, plan.memory, hardware, factor=factor
    )


def try_plan(
    argv: Sequence[str], world_size: int, hardware: Hardware, histogram: LengthHistogram | None = None
) -> Plan | None:
    """Plan a command line; None if it cannot be planned or the rules reject it."""
    try:
        return make_plan(validated_args(argv, world_size), world_size, hardware, histogram)
    except ValueError:
        return None


def closest_reference_run(plan: Plan) -> ReferenceRun:
    """Return the most similar published run: fewest doublings of sizes, same model, machine and format."""
    return min((_compare(plan, run) for run in PUBLISHED_RUNS), key=lambda found: found.distance)


def _compare(plan: Plan, run: PublishedRun) -> ReferenceRun:
    args, distance = plan.args, 0.0
    differs: list[str] = []
    billions = (plan.counts.total + plan.counts.mtp) / 1e9
    away = abs(math.log2(billions / BILLION_PARAMS[run.model]))
    if away > 0.02:
        differs.append(f"{billions:.1f} instead of {BILLION_PARAMS[run.model]:.1f} billion parameters")
        distance += 1 + 2 * away
    if plan.hardware.name != run.hardware:
        differs.append(f"{plan.hardware.name} instead of {run.hardware}")
        distance += 2
    if plan.width != run.width:
        differs.append(f"{plan.width} instead of {run.width} GEMMs")
        distance += 1.5
    sizes = args.parallel
    for name, mine, theirs, weight in (
        ("GPUs", plan.world_size, run.gpus, 0.3),
        ("TP", sizes.tensor_model_parallel_size, run.tp, 0.5),
        ("PP", sizes.pipeline_model_parallel_size, run.pp, 0.3),
        ("EP", sizes.expert_model_parallel_size, run.ep, 0.3),
        ("ETP", sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size, run.etp, 0.3),
        ("CP", sizes.context_parallel_size, run.cp, 0.7),
        ("micro-batch", args.training.micro_batch_size, run.mbs, 0.3),
        ("global batch", plan.batch_size, run.gbs, 0.1),
        ("sequence", args.data.seq_length, run.seq, 0.7),
    ):
        if mine != theirs:
            differs.append(f"{name} {mine} instead of {theirs}")
            distance += weight * abs(math.log2(mine / theirs))
    if sizes.overlap_moe_expert_parallel_comm != ("--overlap-moe-expert" in run.flags):
        verb = "with" if sizes.overlap_moe_expert_parallel_comm else "without"
        differs.append(f"{verb} overlapped token exchange")
        distance += 0.3
    dispatcher = get_dispatcher(args.moe).key
    if sizes.expert_model_parallel_size > 1 and dispatcher != run.dispatcher:
        differs.append(f"{dispatcher} instead of {run.dispatcher}")
        distance += 0.3
    return ReferenceRun(run, tuple(differs), distance)
