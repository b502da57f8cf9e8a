"""Decisions that all ranks take together between two iterations.

Clocks, signals and disks differ by rank, so the ranks share one small reduction, made only if a flag requires it or a
checkpoint is being written.
"""

from __future__ import annotations

import time
from signal import Signals
from typing import NamedTuple

import torch

from moe_trainer.parallel import collectives
from moe_trainer.resilience.signals import ExitSignalHandler
from moe_trainer.training.context import TrainContext, TrainState


class ExitDecision(NamedTuple):
    """Decision that is equal on every rank.

    Attributes:
        saving: some rank is still writing a checkpoint.
        reason: why to save and exit now, in Megatron-LM's words, or None.
        interrupted: a signal or the time limit asked for it, not the plan.
    """

    saving: bool
    reason: str | None
    interrupted: bool = False


def sync_exit_decision(
    ctx: TrainContext, state: TrainState, started: float, exit_signal: ExitSignalHandler | None
) -> ExitDecision:
    """Return the decision of all ranks. `started` is time.monotonic() at the start of the program.

    Communication: a maximum of three float32 over the world, if the decision depends on the ranks.
    """
    training = ctx.args.training
    signalled, minutes, saving = 0, 0.0, False
    if exit_signal is not None or training.exit_duration_in_mins is not None or ctx.saver.in_progress:
        received = None if exit_signal is None else exit_signal.received
        local = [received or 0, (time.monotonic() - started) / 60.0, ctx.saver.writing]
        facts = torch.tensor(local, dtype=torch.float32, device=ctx.runtime.device)
        # one signal is enough, the slowest clock decides, and so does the slowest disk
        signalled, minutes, saving = collectives.all_reduce(facts, ctx.ps.world, op="max").tolist()
    if signalled:
        return ExitDecision(bool(saving), f"exiting program after receiving {Signals(int(signalled)).name}.", True)
    if training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins:
        return ExitDecision(bool(saving), f"exiting program after {minutes} minutes", True)
    if training.exit_interval is not None and state.iteration % training.exit_interval == 0:
        return ExitDecision(bool(saving), f"exiting program at iteration {state.iteration}")
    return ExitDecision(bool(saving), None)
