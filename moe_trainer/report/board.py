"""TensorBoard's writer, which must not end a run: metrics.jsonl holds the same numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Board:
    """Scalars and images for TensorBoard. Once it is open, nothing here raises OSError.

    What cannot be written is lost, which is told; a new event file is tried at every flush (an event file that ends in the
    middle of an event cannot be continued).
    """

    def __init__(self, folder: str, open_writer: Callable[[], Any]):
        """open_writer: makes a SummaryWriter. Raises: OSError if the folder cannot be written."""
        self._folder, self._open = folder, open_writer
        self._writer: Any = open_writer()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Hand over a number."""
        self._do("add_scalar", name, value, step)

    def add_image(self, name: str, image: Any, step: int) -> None:
        """Hand over a picture, [channels, height, width]."""
        self._do("add_image", name, image, step)

    def flush(self) -> None:
        """Have everything written; where the disk had refused, begin a new file."""
        if self._writer is None:
            try:
                self._writer = self._open()
            except OSError as error:
                logger.debug("%s still cannot be written: %s", self._folder, error)
                return
            logger.warning("--tensorboard-dir: %s is written again, in a new file; what was logged meanwhile is missing there", self._folder)
        self._do("flush")

    def close(self) -> None:
        """Write the rest and close the file."""
        self._do("close")
        self._writer = None

    def _do(self, what: str, *given: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, what)(*given)
        except OSError as error:
            logger.warning("--tensorboard-dir: cannot write %s (%s); the run goes on, and tries again. %s", self._folder,
                           error.strerror or error, "metrics.jsonl is written apart from it")
            broken, self._writer = self._writer, None
            try:
                broken.close()  # ends its thread
            except OSError as again:
                logger.debug("%s: %s", self._folder, again)
