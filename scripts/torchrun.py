"""torchrun, with the exit code of the ranks: torchrun itself says 1 whatever theirs was, and 75 asks to be started again.

    python scripts/torchrun.py TORCHRUN_OPTIONS pretrain_moe.py FLAGS
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

AGAIN = 75


def exit_code(codes: set[int]) -> int:
    """The job's code from those of its failed ranks; where signals have killed them, what a shell says of it, 137 for kill -9.

    When the first rank has left with 75, all of them have agreed and saved; torchrun ends those that are still closing down
    by SIGTERM.
    """
    if AGAIN in codes and codes <= {AGAIN, -15}:
        return AGAIN
    own = sorted(code for code in codes if code > 0)
    killed = sorted(-code for code in codes if code < 0 and code != -15) or [15]  # 15: what torchrun itself sends to the others
    return own[0] if own else 128 + killed[0]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(exit_code({failure.exitcode for failure in error.failures.values()}))
