"""A rank with an injected fault: `python fault_process.py KIND RANK CALL FLAGS...`, else pretrain_moe.py as it is.

On rank RANK the CALL-th forward of a router kills its process, stops it, sleeps, raises, or waits alone in a barrier over all ranks.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_trainer.commands import train_process  # noqa: E402
from moe_trainer.moe.router import TopKRouter  # noqa: E402
from moe_trainer.parallel import collectives  # noqa: E402
from moe_trainer.training import pretrain


def inject_fault(kind: str, world) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(3600)
    elif kind == "raise":
        raise KeyError("a mistake on one rank")
    else:
        assert kind == "diverge"
        collectives.barrier(world)


def install(kind: str, at: int) -> None:
    run_job, forward, worlds, calls = pretrain.run_job, TopKRouter.forward, [], []

    def watched(args, runtime, *others):
        worlds.append(runtime.ps.world)
        return run_job(args, runtime, *others)

    def patched(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            inject_fault(kind, worlds[0])
        return forward(self, *args, **kwargs)

    pretrain.run_job, TopKRouter.forward = watched, patched


def main(kind: str, victim: str, at: str, argv: list[str]) -> None:
    """Run the rank of this process's environment; does not return."""
    if os.environ["RANK"] == victim:
        install(kind, int(at))
    train_process.leave(train_process.main(argv))


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
