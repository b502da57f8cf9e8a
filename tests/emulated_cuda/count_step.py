"""Count the host waits and kernel launches of one training iteration on the emulated device, by source line.

    python tests/emulated_cuda/count_step.py FLAGS

FLAGS are pretrain_moe.py's, for one process; with --triton-kernels none it is fastest. The second of two iterations is counted, on random
tokens. Loading, logging and saving are not part of it.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINES = 20


def count(argv: list[str]) -> None:
    import emulation

    from arguments import ArgumentError, parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    try:
        args = parse_args(argv, 1)
    except ArgumentError as error:
        sys.exit(f"count_step.py: {error}")
    microbatches = args.training.global_batch_size // args.training.micro_batch_size
    run, state = make_run(args, 0, ParallelState.single(), 2, device="cuda"), TrainState()
    train_step(run, state, microbatches)
    state.iteration += 1
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        result = train_step(run, state, microbatches)
    waits = Counter()
    for (_, line), times in ledger.waits.items():
        waits[line] += times
    print(
        f"one iteration of {microbatches} microbatches: {sum(waits.values())} host waits, {sum(ledger.kernels.values())} kernels, "
        f"{ledger.peak / 2**20:.1f} MiB allocated at the peak beyond what was there before"
    )
    if result.num_repeats:
        print(
            "The iteration was repeated, with counts on the host, because a buffer of experts or the paged stash was too "
            "small: the numbers are of both times."
        )
    for title, found in (("host waits", waits), ("kernels", ledger.kernels)):
        print(f"\n{title}\n" + "\n".join(f"{times:8,d}  {line}" for line, times in found.most_common(LINES)))


if __name__ == "__main__":
    if os.environ.get("EMULATED_CUDA"):
        count(sys.argv[1:])
    else:
        import build

        try:
            sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=build.environment(1)).returncode)
        except build.CannotBuildError as error:
            sys.exit(f"count_step.py: {error}")
