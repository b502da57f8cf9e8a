"""`moe-trainer train`: pretrain_moe.py."""

import runpy
from collections.abc import Sequence

from moe_trainer.exit_codes import ExitCode


def main(argv: Sequence[str]) -> int:
    """Become the trainer, whose flags are those of sys.argv: it handles signals before it imports anything."""
    runpy.run_module("pretrain_moe", run_name="__main__")
    return ExitCode.OK
