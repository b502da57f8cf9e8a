"""The frame of programs that run a model on one rank or several: evaluate and generate."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from moe_trainer.exit_codes import ExitCode

WAIT_S = 5.0


def run(name: str, program: Callable[[], int]) -> int:
    """Run a program; a user error is one message of the first rank. Returns the exit code.

    Args:
        name: of the program, for messages.
        program: returns the exit code.
    """
    try:
        return program()
    except ValueError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":  # rank 0 usually has the same error, and its end ends this process
            time.sleep(WAIT_S)
        print(f"{name}: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr, flush=True)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
