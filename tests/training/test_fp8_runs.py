"""Runs in 8 and 4 bits: fully sharded ones equal replicated ones, and losses stay near those of bf16."""

import pytest
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run

from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step
from scripts.benchmarks.bench_precision import BATCH, HELD_OUT, RECIPES, read_text_bytes, train

SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor".split()
QUANTISED = [name for name in RECIPES if name not in ("bf16", "fp32")]


def _steps(rank: int, n: int, argv: list[str]) -> list[tuple[float, float]]:
    run = make_run([*make_argv("plain"), *argv], rank, create_groups(make_argv("plain"), rank, n), 2)
    results = [train_step(run, TrainState(iteration=number), 2) for number in range(2)]
    return [(result.losses["lm loss"], result.grad_norm) for result in results]


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_fully_sharded_fp8_runs_equal_replicated_runs(recipe):
    """Without fp64: the same weights on the same ranks, so no sum before a rounding changes its order."""
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
    replicated, sharded = (run_ranks(_steps, 2, [*fp8, *extra])[0] for extra in ([], SHARDED))
    assert sharded[0] == (pytest.approx(replicated[0][0], rel=1e-6), pytest.approx(replicated[0][1], rel=1e-6))
    assert sharded[1] == (pytest.approx(replicated[1][0], rel=1e-3), pytest.approx(replicated[1][1], rel=1e-2))


@pytest.mark.slow
def test_quantized_losses_stay_close_to_bf16():
    """A hundred iterations of a tiny model on real text; gaps over more are in scripts/bench_results/precision.md."""
    iterations = 120
    text = read_text_bytes(iterations * BATCH + HELD_OUT)
    start = 5.5  # bytes at random: log(256)
    reference = train(RECIPES["bf16"], text, iterations, 0)
    assert reference[0] < start - 1.5, "it has learned something"
    for name in QUANTISED:
        last, held_out, _ = train(RECIPES[name], text, iterations, 0)
        assert abs(last - reference[0]) < 0.05 * reference[0] and abs(held_out - reference[1]) < 0.05 * reference[1], (
            name,
            last,
            held_out,
            reference,
        )
