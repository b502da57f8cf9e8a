"""Signals that ask a run to save and leave (`--exit-signal-handler`, `--auto-resume`)."""

import signal
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from arguments.output import OutputArgs
from arguments.training import TrainingArgs

BATCH_SYSTEM = ("SIGTERM", "SIGUSR1", "SIGHUP")  # preemption and `scancel`; `sbatch --signal=USR1@120`; the terminal was closed


class ExitSignal:
    """Remembers that a signal arrived at this rank; all ranks must agree before anybody acts on it (training/agreement.py).

    received: the first of the named signals that has arrived, or None. Use as a context manager, in the main thread, around all
    that the process does: afterwards the signals are ignored, since batch systems send them more than once, and to ranks that
    have just agreed to leave. The exit code is the run's answer; the number of a late signal would hide it.
    """

    def __init__(self, *names: str):
        self._numbers = sorted({signal.Signals[name] for name in names})
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup means it
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


def exit_signal(training: TrainingArgs, output: OutputArgs) -> ExitSignal | None:
    """What these flags listen to, None for nothing.

    With --auto-resume that is also what batch systems send, and from the very start: a signal during a start-up of minutes
    then ends the run after its first iteration, saved, instead of killing it.
    """
    if output.auto_resume:
        return ExitSignal(training.exit_signal, *BATCH_SYSTEM)
    return ExitSignal(training.exit_signal) if training.exit_signal_handler else None
