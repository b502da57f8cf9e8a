"""Batch sizes that would deadlock virtual stages are reported before anything is built, by --validate-only and by a run."""

import pytest

from arguments import parse_args
from arguments.mechanisms.schedules import INTERLEAVED, SCHEDULES, ZERO_BUBBLE
from moe_trainer.commands import train_process
from moe_trainer.pipeline.batch_sizes import deadlocking_batch_sizes
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.simulate import simulate_schedule
from tests.arguments.test_tokens import TOY

VIRTUAL = "--num-layers 12 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 --train-samples 400".split()
RAMP = [*VIRTUAL, *"--rampup-batch-size 8 1 120 --global-batch-size 16".split()]


def command_line(words, world_size=4):
    line = [*TOY]
    for flag in ("--train-iters", "--lr-decay-iters"):
        if flag in line:
            del line[line.index(flag) : line.index(flag) + 2]
    return [*line, *words], world_size


@pytest.mark.parametrize(
    "words, sizes",
    [
        (RAMP, [9, 13]),
        ([*RAMP, "--pipeline-schedule", "zero-bubble"], [9, 13]),
        ([*VIRTUAL, *"--rampup-batch-size 4 4 120 --global-batch-size 16".split()], []),
        ([*RAMP[:4], *RAMP[6:]], []),  # without virtual stages
    ],
)
def test_rampup_with_deadlocking_sizes_is_rejected(words, sizes):
    line, world = command_line(words)
    found = deadlocking_batch_sizes(parse_args(line, world), 1)
    assert [int(text.split()[3]) for text in found] == sizes
    assert all("multiple of --microbatch-group-size-per-virtual-pipeline-stage" in text for text in found)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("--microbatch-group-size-per-virtual-pipeline-stage 6", ScheduleKind(INTERLEAVED, 3, 6)),
        ("--pipeline-schedule zero-bubble", ScheduleKind(ZERO_BUBBLE, 3, 4)),
    ],
)
def test_flags_determine_the_kind_of_schedule(words, kind):
    line, world = command_line([*VIRTUAL, "--global-batch-size", "24", *words.split()])
    assert ScheduleKind.of_flags(parse_args(line, world).parallel, 3) == kind


def test_sizes_skipped_by_the_check_can_run():
    """Sizes not simulated: full groups only, or a last group that fills the pipeline."""
    for ranks, chunks, group in ((2, 2, 3), (3, 2, 4), (4, 3, 4), (4, 2, 6)):
        for count in range(1, 4 * group):
            if not 0 < count % group < ranks:
                for schedule in (each for each in SCHEDULES if each.runs(chunks)):
                    simulate_schedule(ScheduleKind(schedule, chunks, group).orders(ranks, count), chunks)


def test_validate_only_reports_deadlocking_batch_sizes(capsys):
    line, _ = command_line(
        [
            *RAMP,
            "--validate-only",
            "--world-size",
            "4",
            "--bf16",
            "--fp16",
        ]
    )
    assert train_process.main(line) == 2
    out = capsys.readouterr().err
    assert (
        "global batch size 9 makes 9 microbatches" in out
        and "global batch size 13" in out
        and "Use only one of --bf16" in out
    )
    assert "3 problems with the arguments:" in out
