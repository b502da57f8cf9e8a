"""Signals that make a run save and exit, and those that end it at once.

The first kind is that of `--exit-signal-handler`, `--save-on-interrupt` and `--auto-resume`.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from arguments.output import OutputArgs
from arguments.training import TrainingArgs

# Preemption and `scancel`; `sbatch --signal=USR1@120`; a closed terminal.
SCHEDULER_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")
_INTERRUPT_GRACE_S = 10.0  # torchrun kills after 30 s
_TERMINATION_PAUSE_S = 3.0  # the ranks hear of each other's termination in two seconds


class ExitSignalHandler:
    """Remembers that a signal arrived at this rank. All ranks agree before they act (training/loop.py).

    Use it as a context manager, in the main thread, around everything that the process does. Afterwards the signals are
    ignored, because schedulers send them more than once, also to ranks that are about to exit, and the number of a late
    signal would hide the exit code of the run.

    Args:
        names: of the signals.
        interruptible: whether a second SIGINT ends the run at once. torchrun repeats the first one, so not under it.

    Attributes:
        received: the first of the named signals that has arrived, or None.
    """

    def __init__(self, *names: str, interruptible: bool = False):
        self._numbers = sorted({signal.Signals[name] for name in names})
        self._interruptible = interruptible and "TORCHELASTIC_RUN_ID" not in os.environ
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
        if number == signal.SIGINT and self._interruptible:
            signal.signal(number, signal.default_int_handler)


def make_exit_signal_handler(training: TrainingArgs, output: OutputArgs) -> ExitSignalHandler | None:
    """Return the handler that the flags ask for, or None.

    With --auto-resume it also handles the signals of schedulers, from the very start: a signal during a start-up of
    minutes then ends the run after its first iteration, saved, instead of killing it.
    """
    names: tuple[str, ...] = ()
    if output.auto_resume:
        names = (training.exit_signal, *SCHEDULER_SIGNALS)
    elif training.exit_signal_handler:
        names = (training.exit_signal,)
    saves_on_interrupt = training.save_on_interrupt and output.save is not None
    if saves_on_interrupt:
        names += ("SIGINT", "SIGTERM")
    return ExitSignalHandler(*names, interruptible=saves_on_interrupt) if names else None


class SignalWatch:
    """Ends this process after Ctrl-C or SIGTERM even if its main thread waits in a collective.

    Python runs signal handlers in the main thread between two instructions, so that one that waits for another rank
    notices nothing. Here a thread reads from a socket to which the number of a signal is written at once. After SIGINT,
    unless another handler than Python's is installed, the main thread has some seconds to end by itself. SIGTERM
    without a handler ends the process as it would without this class, but after `report`.

    Use it as a context manager in the main thread; in another thread it does nothing.

    Args:
        report: called with the KeyboardInterrupt or SystemExit that ends the process.
        end: ends the process (replaced in tests).
    """

    def __init__(
        self,
        report: Callable[[BaseException], None],
        end: Callable[[int], None] = os._exit,
    ):
        self._report, self._end = report, end
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._takes_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._takes_term = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes_term:
            # the thread acts; this one trains no further, but gives back the locks that it may hold
            signal.signal(signal.SIGTERM, lambda number, frame: self._stopped.wait(_TERMINATION_PAUSE_S))
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is None:
            return
        self._stopped.set()
        self._restore(self._previous)
        with suppress(OSError):
            self._writer.send(b"\0")  # wakes the thread
        self._thread.join(1.0)

    def _forget(self) -> None:
        """Undo what a forked process has inherited: its signals are not this process's."""
        if not self._stopped.is_set():
            self._restore(-1)

    def _restore(self, wakeup_fd: int) -> None:
        signal.set_wakeup_fd(wakeup_fd)
        if self._takes_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            for number in self._reader.recv(64):
                if number == signal.SIGINT and self._takes_interrupt and not self._stopped.wait(_INTERRUPT_GRACE_S):
                    self._leave(KeyboardInterrupt(), 130)
                if number == signal.SIGTERM and self._takes_term:
                    self._leave(SystemExit(128 + number), 128 + number)

    def _leave(self, error: BaseException, code: int) -> None:
        self._report(error)
        self._end(code)
        self._stopped.set()
