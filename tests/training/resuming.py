"""Training by iterations, saved and resumed under another layout, in the ranks of a test."""

from pathlib import Path

import pytest
from training.layouts import create_groups, make_run

from moe_trainer.checkpoint.manager import load, save
from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
from moe_trainer.training.run import TrainRun, TrainState
from moe_trainer.training.step import train_step

Steps = list[tuple[dict[str, float], float]]
"""Losses and gradient norm of every iteration."""


def run_steps(run: TrainRun, first: int, count: int) -> Steps:
    """Run `count` iterations from iteration `first` on."""
    microbatches = run.args.training.global_batch_size // (run.args.training.micro_batch_size * run.ps.dp.size)
    results = [train_step(run, TrainState(iteration=number), microbatches) for number in range(first, first + count)]
    run.optimizer.wait_params()
    return [(result.losses, result.grad_norm) for result in results]


def train_and_save(rank: int, n: int, argv: list[str], folder: Path, steps: int = 2) -> Steps:
    """Two iterations, a checkpoint; returns the next iterations of a run that was not interrupted."""
    run = make_run(argv, rank, create_groups(argv, rank, n), 4)
    run_steps(run, 0, 2)
    _save(run, folder)
    return run_steps(run, 2, steps)


def load_and_save(rank: int, n: int, argv: list[str], source: Path, target: Path, steps: int = 2) -> Steps:
    """Resume under another layout, from other initial values; save at once, and return the next iterations."""
    run = make_run([*argv, "--seed", "99"], rank, create_groups(argv, rank, n), 2, skip=2)
    found = load(source, run.chunks, run.optimizer, run.ps, LoadOptions(run.args.as_dict(), load_rng=False))
    assert found.iteration == 2 and found.optim_loaded
    _save(run, target)
    return run_steps(run, 2, steps)


def _save(run: TrainRun, folder: Path) -> None:
    content = CheckpointState(iteration=2, args=run.args.as_dict())
    save(folder, content, run.chunks, run.optimizer, run.ps, SaveOptions(save_rng=False))


def assert_alike(steps: Steps, expected: Steps, norm: float = 2e-6) -> None:
    """Losses within 1e-6 of each other, gradient norms within `norm`."""
    for (losses, grad_norm), (other_losses, other_grad_norm) in zip(steps, expected, strict=True):
        assert losses == pytest.approx(other_losses, rel=1e-6)
        assert grad_norm == pytest.approx(other_grad_norm, rel=norm)
