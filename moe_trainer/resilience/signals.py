"""Signals that make a run save and exit (`--exit-signal-handler`, `--auto-resume`)."""

import signal
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from arguments.output import OutputArgs
from arguments.training import TrainingArgs

# Preemption and `scancel`; `sbatch --signal=USR1@120`; a closed terminal.
SCHEDULER_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")


class ExitSignalHandler:
    """Remembers that a signal arrived at this rank. All ranks agree before they act (training/loop.py).

    Use it as a context manager, in the main thread, around everything that the process does. Afterwards the signals are
    ignored, because schedulers send them more than once, also to ranks that are about to exit, and the number of a late
    signal would hide the exit code of the run.

    Attributes:
        received: the first of the named signals that has arrived, or None.
    """

    def __init__(self, *names: str):
        self._numbers = sorted({signal.Signals[name] for name in names})
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def make_exit_signal_handler(training: TrainingArgs, output: OutputArgs) -> ExitSignalHandler | None:
    """Return the handler that the flags ask for, or None.

    With --auto-resume it also handles the signals of schedulers, from the very start: a signal during a start-up of
    minutes then ends the run after its first iteration, saved, instead of killing it.
    """
    if output.auto_resume:
        return ExitSignalHandler(training.exit_signal, *SCHEDULER_SIGNALS)
    return ExitSignalHandler(training.exit_signal) if training.exit_signal_handler else None
