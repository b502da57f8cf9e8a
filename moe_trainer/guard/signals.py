"""A signal that asks a run to save and leave (`--exit-signal-handler`)."""

import signal
from types import FrameType

import torch
from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import Group


class ExitSignal:
    """Remembers that a signal arrived; all ranks agree before anybody acts on it.

    Use as a context manager: the previous handler comes back afterwards.
    """

    def __init__(self, name: str):
        self.name = name
        self._number = signal.Signals[name]
        self._received = False
        self._previous = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(self._number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(self._number, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def received_by_any(self, world: Group, device: torch.device) -> bool:
        """True on every rank if the signal reached at least one of them.

        Communication: one int64, all-reduce on `world`.
        """
        flag = torch.tensor(int(self._received), device=device)
        return bool(collectives.all_reduce(flag, world, op="max").item())
