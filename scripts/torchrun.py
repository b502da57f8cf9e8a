"""torchrun, with the exit code of the ranks: torchrun itself says 1 whatever theirs was, and 75 asks to be started again. And with their
last words: where a user can mend it, what to mend stands last, and not above torchrun's own report.

    python scripts/torchrun.py TORCHRUN_OPTIONS pretrain_moe.py FLAGS
"""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.exit_codes import ExitCode


def exit_code(codes: set[int]) -> int:
    """The job's code from those of its failed ranks; where signals have killed them, what a shell says of it, 137 for kill -9.

    When the first rank has left with 75, all of them have agreed and saved; torchrun ends those that are still closing down
    by SIGTERM.
    """
    if ExitCode.RESTART in codes and codes <= {ExitCode.RESTART, -15}:
        return ExitCode.RESTART
    own = sorted(code for code in codes if code > 0)
    killed = sorted(-code for code in codes if code < 0 and code != -15) or [15]  # 15: what torchrun itself sends to the others
    return own[0] if own else 128 + killed[0]


def last_words(failures: Mapping[int, ProcessFailure], code: int) -> str | None:
    """What the first rank that left with the job's code wrote of the reason (pretrain_moe.py does for what a user can mend). None: nothing."""
    told = (failure.message for _, failure in sorted(failures.items()) if failure.exitcode == code)
    return next((message["message"] for message in told if isinstance(message, dict) and "message" in message), None)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        code = exit_code({failure.exitcode for failure in error.failures.values()})
        reason = last_words(error.failures, code)
        if reason is not None:
            print(f"the run has ended with exit code {code}: {reason}", file=sys.stderr, flush=True)
        sys.exit(code)
    except SignalException as error:  # Ctrl-C, or a signal for torchrun alone; it has ended the ranks, whose words stand above
        print(f"the run has been ended by {signal.Signals(error.sigval).name}", file=sys.stderr, flush=True)
        sys.exit(128 + error.sigval)
