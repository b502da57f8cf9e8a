"""Run torchrun, exit with the exit code of the ranks, and print their error message last.

    python scripts/torchrun.py TORCHRUN_OPTIONS pretrain_moe.py FLAGS

launch.sh starts this file by its path. torchrun itself always exits with 1, but exit code 75 requests a restart. It
also prints its own report after the message of the rank, which hides what a user has to change.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_trainer.errors import UserError, require_packages
from moe_trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def exit_code(codes: set[int]) -> int:
    """Return the exit code of the job from those of its failed ranks; after a signal 128 + its number, as in shells."""
    # a rank reports SIGTERM before it ends with 143
    codes = {-signal.SIGTERM if code == 128 + signal.SIGTERM else code for code in codes}
    # If a rank exits with 75, all ranks have agreed and saved; torchrun terminates those that are still shutting down
    if ExitCode.RESTART in codes and codes <= {ExitCode.RESTART, -signal.SIGTERM}:
        return ExitCode.RESTART
    exited = sorted(code for code in codes if code > 0)
    if exited:
        return exited[0]
    # SIGTERM is what torchrun sends to the other ranks, so another signal is the cause
    signals = sorted(-code for code in codes if code < 0 and code != -signal.SIGTERM) or [signal.SIGTERM.value]
    return 128 + signals[0]


def get_error_message(failures: Mapping[int, ProcessFailure], code: int) -> str | None:
    """Return the message of the first rank with this exit code; pretrain_moe.py writes one for user errors.

    A killed rank writes none. Its signal is then the message, since torchrun terminates the other ranks at once.
    """
    killed = sorted(rank for rank, failure in failures.items() if failure.exitcode == 128 - code < 0)
    if killed:
        return f"rank {killed[0]} was killed by {signal.Signals(code - 128).name}"
    messages: Iterator[Any] = (failure.message for _, failure in sorted(failures.items()) if failure.exitcode == code)
    return next(
        (message["message"] for message in messages if isinstance(message, dict) and "message" in message), None
    )


def run(argv: Sequence[str]) -> int:
    """Run torchrun. Returns the exit code of the ranks."""
    try:
        require_packages("torch")
    except UserError as error:
        print(f"torchrun.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(argv)
    except ChildFailedError as error:
        code = exit_code({failure.exitcode for failure in error.failures.values()})
        reason = get_error_message(error.failures, code)
        if reason is not None:
            print(f"the run failed with exit code {code}: {reason}", file=sys.stderr, flush=True)
        return code
    except SignalException as error:  # Ctrl-C, or a signal to torchrun only; it has terminated the ranks
        print(f"the run was terminated by {signal.Signals(error.sigval).name}", file=sys.stderr, flush=True)
        return 128 + error.sigval
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
