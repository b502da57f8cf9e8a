"""What all ranks settle together: between two iterations, has the checkpoint under way been written, and is it time to leave? And
where a file had to be written for the run to go on, was it?

Clocks, signals and disks differ by rank, so none of them may decide for itself. Between iterations everything goes into one small
reduction, and that only where a flag asks for it or a checkpoint is being written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals
from typing import NamedTuple

import torch

from moe_trainer.errors import InputError
from moe_trainer.guard.signals import ExitSignal
from moe_trainer.parallel import collectives
from moe_trainer.run import Run, TrainState


class Agreement(NamedTuple):
    """The same on every rank. saving: some rank still writes its share of a checkpoint. reason: why to save and leave now, in
    Megatron-LM's words, or None. interrupted: it was the machine that asked for it (a signal, the clock), not the plan."""

    saving: bool
    reason: str | None
    interrupted: bool = False


def agree(run: Run, state: TrainState, started: float, exit_signal: ExitSignal | None) -> Agreement:
    """Ask every rank. started: when the program began, by time.monotonic().

    Communication: three float32 to a maximum over the world, if anything depends on the ranks.
    """
    training = run.args.training
    signalled, minutes, saving = 0, 0.0, False
    if exit_signal is not None or training.exit_duration_in_mins is not None or run.saver.under_way:
        received = None if exit_signal is None else exit_signal.received
        mine = [received or 0, (time.monotonic() - started) / 60.0, run.saver.writing]
        facts = torch.tensor(mine, dtype=torch.float32, device=run.runtime.device)
        # one signal is enough, the slowest clock decides, and so does the slowest disk
        signalled, minutes, saving = collectives.all_reduce(facts, run.ps.world, op="max").tolist()
    if signalled:
        return Agreement(bool(saving), f"exiting program after receiving {Signals(int(signalled)).name}.", True)
    if training.exit_duration_in_mins is not None and minutes > training.exit_duration_in_mins:
        return Agreement(bool(saving), f"exiting program after {minutes} minutes", True)
    if training.exit_interval is not None and state.iteration % training.exit_interval == 0:
        return Agreement(bool(saving), f"exiting program at iteration {state.iteration}")
    return Agreement(bool(saving), None)


@contextmanager
def sent_by_all(gathered: Iterator[object]) -> Iterator[None]:
    """Rank 0 writes what is gathered in the enclosed step, with its own policy for errors; whatever becomes of the file, the gathering is completed.

    gathered: collective over the world (model/weights.py): what the step leaves of it is passed over, so that every rank has sent what it holds.
    """
    try:
        yield
    finally:
        for _ in gathered:
            pass


@contextmanager
def written_by_all(run: Run, what: str = "") -> Iterator[None]:
    """Ranks write files in the enclosed step; what one of them cannot write ends all. Collective over the world, as long as the step's own
    communication is completed whatever fails in it.

    what: the flag that asked for the files, where the errors do not name it. Raises: InputError on every rank, with the first failing rank's words.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = str(error)
    for text in collectives.all_gather_object(problem, run.ps.world):
        if text is not None:
            raise InputError(f"{what}: {text}" if what else text)
