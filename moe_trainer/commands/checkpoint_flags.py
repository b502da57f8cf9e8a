"""The trainer's flags on the command line of a tool that plans, explains or checks them, and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trainer.checkpoint.recorded_flags import read_recorded_flags
from moe_trainer.estimate.spelled_flags import spell_recorded


def spell_checkpoint(argv: Sequence[str]) -> list[str]:
    """Return the command line with what --use-checkpoint-args takes from the checkpoint as flags.

    Raises:
        ValueError: if the checkpoint cannot be read, or the command line contradicts it.
    """
    return spell_recorded(argv, read_recorded_flags([*argv]))
