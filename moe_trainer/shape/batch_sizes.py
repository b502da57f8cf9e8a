"""The global batch sizes that a run goes through, and which of them its pipeline cannot run. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_trainer.shape import deferral
from moe_trainer.shape.layout import chunk_layouts
from moe_trainer.shape.orders import orders
from moe_trainer.shape.timetable import timetable

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.training import TrainingArgs

_SUFFIXES = (("K", 10**3), ("M", 10**6), ("B", 10**9), ("T", 10**12))


def batch_stages(training: TrainingArgs, dp_size: int, seq_length: int) -> tuple[tuple[int, int], ...]:
    """(first consumed sample, global batch size) pairs, ascending, as --global-batch-size, --rampup-batch-size or
    --step-batch-size-schedule ask for them.

    Raises: ValueError naming the flag when they do not make a schedule.
    """
    final = training.global_batch_size
    if training.step_batch_size_schedule is not None:
        return parse_step_schedule(training.step_batch_size_schedule, seq_length)
    if training.rampup_batch_size is not None:
        return _rampup_stages(training.rampup_batch_size, final)
    return ((0, final or training.micro_batch_size * dp_size),)


def parse_step_schedule(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Read "0:768 250B:1536": tokens (K, M, B, T allowed) from which a global batch size holds.

    Returns: (first sample, batch size) pairs, ascending.
    Raises: ValueError naming --step-batch-size-schedule and the entry.
    """
    stages = []
    for entry in text.strip().strip("'\"").replace(",", " ").split():
        tokens, colon, batch = entry.partition(":")
        try:
            stages.append((_count(tokens) // seq_length, _count(batch)))
        except ValueError:
            colon = ""
        if not colon or stages[-1][1] <= 0:
            raise ValueError(f"--step-batch-size-schedule: {entry!r} in {text!r} is not TOKENS:BATCH_SIZE, such as 250B:1536")
    stages.sort()
    if not stages or stages[0][0] != 0:
        raise ValueError(f"--step-batch-size-schedule {text!r}: the first entry must begin at 0 tokens")
    if len({begin for begin, _ in stages}) != len(stages):
        raise ValueError(f"--step-batch-size-schedule {text!r}: two entries begin at the same sample")
    return tuple(stages)


def _count(text: str) -> int:
    text = text.strip().upper()
    for suffix, factor in _SUFFIXES:
        if text.endswith(suffix):
            return int(float(text[:-1]) * factor)
    return int(float(text))


def _rampup_stages(rampup: list[int], final: int) -> tuple[tuple[int, int], ...]:
    """Equal steps of `increment` from `start` to the final size, spread evenly over the ramp-up samples."""
    start, increment, samples = rampup
    if start <= 0 or increment <= 0 or samples < 0:
        raise ValueError(f"--rampup-batch-size {start} {increment} {samples}: START and INCREMENT must be positive, "
                         "SAMPLES not negative")
    if start > final or (final - start) % increment:
        raise ValueError(f"--rampup-batch-size {start} {increment} {samples}: --global-batch-size {final} must be reached "
                         f"from {start} in whole steps of {increment}")
    steps = (final - start) // increment
    if samples == 0 or steps == 0:
        return ((0, final),)
    return tuple((-(-step * samples // steps), start + step * increment) for step in range(steps + 1))


def sizes_that_wait(args: Arguments, data_ranks: int) -> list[str]:
    """A sentence about every batch size of the run with which virtual stages would wait for each other for ever.

    Raises: what batch_stages raises. (Sizes that do not divide among the ranks are judged by the rules.)
    """
    parallel, training = args.parallel, args.training
    layouts = chunk_layouts(args.model, parallel)
    ranks, chunks = len(layouts), len(layouts[0])
    if chunks == 1:
        return []  # every number of microbatches can run
    group, found = parallel.microbatch_group_size_per_vp_stage or ranks, []
    for size in dict.fromkeys(size for _, size in batch_stages(training, data_ranks, args.data.seq_length)):
        count = size // (training.micro_batch_size * data_ranks)
        if not 0 < count % group < ranks:
            continue  # with whole groups, or a last one that fills the pipeline, nobody waits
        table = orders(
            parallel.pipeline_schedule or "interleaved", ranks, chunks, count, group_size=group,
            pairs=parallel.overlap_moe_expert_parallel_comm,
            head_lag=parallel.wgrad_deferral_limit if deferral.of_the_head(parallel) else None)
        try:
            timetable(table, chunks)
        except ValueError:
            found.append(
                f"global batch size {size} makes {count} microbatches an iteration, with which the {chunks} virtual stages of "
                f"{ranks} pipeline ranks would wait for each other; choose a multiple of "
                "--microbatch-group-size-per-virtual-pipeline-stage (default: the pipeline size)")
    return found
