"""What a training process does before it imports anything that takes time: signals and closed streams.

Only modules of Python that are loaded already are imported here.
"""

import os
import signal
import sys
from collections.abc import Sequence

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that make a run with --auto-resume save."""


def prepare_process(argv: Sequence[str]) -> None:
    """Prepare a process that is to train with these arguments."""
    # Ctrl-C while Python imports ends the process without a traceback; train_process.py catches it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until exit
    if "--auto-resume" in argv:
        # until a handler that can save is installed (resilience/signals.py)
        signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_SIGNALS)


def unblock_signals() -> None:
    """Deliver the signals that `prepare_process` blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVE_SIGNALS)
