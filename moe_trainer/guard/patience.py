"""How long ranks wait for each other: at the start, in training, and where one of them works for all.

--distributed-timeout-minutes holds until the first iteration is over, with whatever had to be made for it; from then on
--distributed-timeout-seconds-after-init, so that a hang is told soon. A checkpoint, a validation or an export, though, may
keep one rank busy for longer than any collective of an iteration takes: there the first of them holds again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_trainer.guard.watchdog import Watchdog
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState, communicator_timeout


class Patience:
    """The timeouts of this rank's communicators and of its watchdog.

    at_start, in_training: seconds; in_training None: never any other than at_start.
    """

    def __init__(self, ps: ParallelState, watchdog: Watchdog, device: torch.device, at_start: float, in_training: float | None):
        self._ps = ps
        self._watchdog = watchdog
        self._device = device
        self._at_start = at_start
        self._in_training = in_training
        self._shortened = False

    def shorten(self) -> None:
        """The start is over: give hangs less time from now on. Collective over ps.world."""
        if self._in_training is not None:
            collectives.barrier(self._ps.world)  # nobody is in the middle of anything long any more
            self._set(self._in_training)
            self._shortened = True

    @contextmanager
    def longer(self) -> Iterator[None]:
        """Give what is enclosed, and the ranks that wait for its end, as long as the start had. Collective over ps.world."""
        if not self._shortened:
            yield
            return
        self._set(self._at_start)
        yield
        self.shorten()  # not after an error: nobody waits for this rank at a barrier then

    def _set(self, seconds: float) -> None:
        self._ps.set_timeout(communicator_timeout(seconds, self._device))
        self._watchdog.timeout = seconds
