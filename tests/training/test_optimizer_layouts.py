"""Flags of the optimizer and the gradient reduction on full models under every kind of parallelism.

The losses, gradients, norms and weights are those of one process. (Every kind of parameter by itself:
tests/optim/test_layouts.py.)
"""

import functools

import pytest
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import create_groups, make_argv, make_run, shallow
from training.resuming import assert_alike, run_steps

from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

SMALL = "--overlap-grad-reduce --ddp-bucket-size 3000"
FULL = f"{SMALL} --use-distributed-optimizer --overlap-param-gather"
EARLY = f"{FULL} --overlap-param-gather-with-optimizer-step --ckpt-format torch"
INSTANCES = f"{FULL} --num-distributed-optimizer-instances 2"
TP, PP, CP = (f"--{name}-parallel-size 2" for name in ("tensor-model", "pipeline-model", "context"))
SP = f"{TP} --sequence-parallel"
EP, ETP1, VPP = (
    "--expert-model-parallel-size 2",
    "--expert-tensor-parallel-size 1",
    "--num-virtual-stages-per-pipeline-rank 2",
)


def row(ranks: int, kind: str, flags: str, model: str = "") -> Row:
    """Four layers where a rank has two stages, else two; two microbatches of each data rank, or one."""
    argv = make_argv(kind) if VPP in flags else shallow(make_argv(kind))
    has_data_ranks = ranks > 2 ** sum(word in flags for word in (TP, PP, CP))
    return Row(ranks, [*argv, *["--global-batch-size", "4"] * (not has_data_ranks), *model.split()], flags)


ROWS = dict(
    enumerate((
        row(2, "plain", f"{PP} {VPP} {FULL}"),
        row(2, "plain", f"{PP} {VPP} {EARLY}"),
        row(2, "biases, tied head", f"{PP} {VPP} {SMALL}"),
        row(2, "biases, tied head", f"{PP} --pipeline-schedule zero-bubble {FULL}"),
        row(4, "biases, tied head", f"{PP} {TP} {ETP1} {FULL}"),
        row(4, "deepseek", f"{PP} {VPP} {SP} {FULL}"),
        row(4, "biases, tied head", f"{PP} {VPP} {EARLY} --ddp-bucket-size 100000"),
        row(4, "deepseek", f"{SP} {EP} {ETP1} {INSTANCES}"),
        row(4, "plain", f"{EP} {INSTANCES} --ddp-average-in-collective"),
        row(4, "plain", f"{TP} {ETP1} {FULL} --ddp-average-in-collective"),
        row(4, "plain", f"{CP} {EP} --expert-tensor-parallel-size 2 {FULL}"),
        row(4, "plain", f"{SP} --expert-model-parallel-size 4 {ETP1} --overlap-grad-reduce --ddp-num-buckets 5"),
        row(4, "per-token loss, MTP, distributed optimizer", f"{PP} {EP} {FULL}"),
        row(4, "per-token loss", f"{PP} {CP} {FULL} --ddp-pad-buckets-for-high-nccl-busbw"),
        row(4, "plain", f"{PP} {INSTANCES} --log-num-zeros-in-grad", "--decoupled-lr 2e-3"),
    ))
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_optimizer_flags_under_every_dimension_equal_one_process(ranks):
    check_rows({name: row for name, row in ROWS.items() if row.ranks == ranks})


def _count_early_gathers(rank: int, n: int, argv: list[str]) -> tuple[int, int, list[int]]:
    """Numbers of buckets gathered early and in total, and of those in flight at each parameter update of a step."""
    run = make_run(argv, rank, create_groups(argv, rank, n), 2)
    gather, updater, seen = run.optimizer._gather, run.optimizer._updater, []
    update = updater._update
    updater._update = lambda *what: seen.append(gather.pending) or update(*what)
    count = run.args.training.global_batch_size // (run.args.training.micro_batch_size * run.ps.dp.size)
    for number in range(2):
        seen.clear()
        train_step(run, TrainState(iteration=number), count)
    run.optimizer.wait_params()
    return len(run.optimizer._early_buckets), len(gather._buckets), seen


def test_the_first_chunk_is_gathered_while_the_second_is_updated():
    for early, total, seen in run_ranks(_count_early_gathers, 4, [*make_argv("plain"), *f"{PP} {VPP} {EARLY}".split()]):
        assert 0 < early < total and set(seen) == {0, early} and seen == sorted(seen)
    for early, _, seen in run_ranks(_count_early_gathers, 4, [*make_argv("plain"), *f"{PP} {VPP} {FULL}".split()]):
        assert early == 0 and set(seen) == {0}


LATE_WRITES = (
    "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "--qk-clip --qk-clip-threshold 0.01",
)
"""Flags with which the update is not the last that writes a parameter."""


def _train_early_and_late(rank: int, n: int, argv: list[str]) -> list[tuple]:
    """With every flag of LATE_WRITES: losses with early gathers and without, the numbers of early buckets and of clips."""
    outcomes = []
    for flags in LATE_WRITES:
        both = []
        for when in (EARLY, FULL):
            line = [*argv, *f"{PP} {VPP} {when} {flags}".split()]
            run, clips = make_run(line, rank, create_groups(line, rank, n), 2), []
            scale = run.optimizer._scale_rows
            run.optimizer._scale_rows = functools.partial(
                lambda scale, clips, *args, **given: clips.append(args[0]) or scale(*args, **given), scale, clips
            )
            both.append((run_steps(run, 0, 2), len(run.optimizer._early_buckets), sum(map(bool, clips))))
        outcomes.append(tuple(both))
    return outcomes


def test_early_gathers_wait_for_quantization_and_clipping():
    for rank in run_ranks(_train_early_and_late, 4, make_argv("plain")):
        for flags, ((early, buckets, clips), (late, none, _)) in zip(LATE_WRITES, rank):
            assert buckets > 0 and none == 0 and (clips > 0) == ("--qk-clip" in flags), flags
            assert_alike(early, late)
