"""Global batch sizes of a run, and those that would deadlock its pipeline. Pure arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arguments.stage_layout import chunk_layouts
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.simulate import simulate_schedule

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.training import TrainingArgs


def batch_stages(training: TrainingArgs, dp_size: int, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return ascending (first consumed sample, global batch size) pairs.

    Source: --global-batch-size, --rampup-batch-size or --step-batch-size-schedule.

    Raises:
        ValueError: the flags do not form a schedule.
    """
    final = training.global_batch_size
    if training.step_batch_size_schedule is not None:
        return _step_stages(training, seq_length)
    if training.rampup_batch_size is not None:
        return _rampup_stages(training.rampup_batch_size, final)
    return ((0, final or training.micro_batch_size * dp_size),)


def _step_stages(training: TrainingArgs, seq_length: int) -> tuple[tuple[int, int], ...]:
    stages = tuple((tokens // seq_length, batch_size) for tokens, batch_size in training.step_batch_sizes or ())
    if len({begin for begin, _ in stages}) != len(stages):
        text = training.step_batch_size_schedule
        raise ValueError(f"--step-batch-size-schedule {text!r}: two entries begin at the same sample")
    return stages


def _rampup_stages(rampup: list[int], final: int) -> tuple[tuple[int, int], ...]:
    """Return equal steps of `increment` from `start` to the final size, spread evenly over the ramp-up samples."""
    start, increment, samples = rampup
    if start <= 0 or increment <= 0 or samples < 0:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples}: START and INCREMENT must be positive, "
            "SAMPLES not negative"
        )
    if start > final or (final - start) % increment:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples}: --global-batch-size {final} must be reached "
            f"from {start} in whole steps of {increment}"
        )
    steps = (final - start) // increment
    if samples == 0 or steps == 0:
        return ((0, final),)
    return tuple((-(-step * samples // steps), start + step * increment) for step in range(steps + 1))


def deadlocking_batch_sizes(args: Arguments, data_ranks: int) -> list[str]:
    """Describe every batch size of the run with which virtual stages would deadlock.

    Sizes that do not divide among the ranks are checked by the argument rules.

    Raises:
        ValueError: see batch_stages.
    """
    parallel, training = args.parallel, args.training
    layouts = chunk_layouts(args.model, parallel)
    ranks, chunks = len(layouts), len(layouts[0])
    if chunks == 1:
        return []  # every number of microbatches can run
    kind = ScheduleKind.of_flags(parallel, chunks)
    group = parallel.microbatch_group_size_per_vp_stage or ranks
    problems: list[str] = []
    for size in dict.fromkeys(size for _, size in batch_stages(training, data_ranks, args.data.seq_length)):
        count = size // (training.micro_batch_size * data_ranks)
        if not 0 < count % group < ranks:
            continue  # full groups, or a last group that fills the pipeline, cannot deadlock
        try:
            simulate_schedule(kind.orders(ranks, count), chunks)
        except ValueError:
            problems.append(
                f"global batch size {size} makes {count} microbatches per iteration, with which the {chunks} virtual "
                f"stages of {ranks} pipeline ranks would deadlock (wait for each other); choose a multiple of "
                "--microbatch-group-size-per-virtual-pipeline-stage (default: the pipeline size)"
            )
    return problems
