"""A signal that asks a run to save and leave (`--exit-signal-handler`)."""

import signal
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package


class ExitSignal:
    """Remembers that a signal arrived at this rank; all ranks must agree before anybody acts on it (train_agreement.py).

    received: whether it has. Use as a context manager: the previous handler comes back afterwards.
    """

    def __init__(self, name: str):
        self.name = name
        self._number = signal.Signals[name]
        self.received = False
        self._previous = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(self._number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(self._number, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
