"""Timeouts of collectives and of the watchdog: long at start-up and where one rank works for all, short in training.

--distributed-timeout-minutes applies until the first iteration is over, including whatever is built during it. From
then on --distributed-timeout-seconds-after-init applies, so that a hang is reported soon. A checkpoint, a validation
or an export may keep one rank busy for longer than any collective of an iteration takes; the start-up timeout applies
to them again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState, communicator_timeout
from moe_trainer.resilience.watchdog import Watchdog


class TimeoutManager:
    """Switches the timeouts of this rank's communicators and of its watchdog. `training_s` None keeps `startup_s`."""

    def __init__(
        self, ps: ParallelState, watchdog: Watchdog, device: torch.device, startup_s: float, training_s: float | None
    ):
        self._ps, self._watchdog, self._device = ps, watchdog, device
        self._startup_s, self._training_s = startup_s, training_s
        self._is_training = False

    def use_training_timeout(self) -> None:
        """Switch to the training timeout. Collective over ps.world."""
        if self._training_s is not None:
            collectives.barrier(self._ps.world)  # no rank is in the middle of a long operation any more
            self._set(self._training_s)
            self._is_training = True

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Apply the start-up timeout to the block. Collective over ps.world."""
        if not self._is_training:
            yield
            return
        self._set(self._startup_s)
        yield
        self.use_training_timeout()  # not after an error: the peers would not come to the barrier

    def _set(self, seconds: float) -> None:
        self._ps.set_timeout(communicator_timeout(seconds, self._device))
        self._watchdog.timeout = seconds
