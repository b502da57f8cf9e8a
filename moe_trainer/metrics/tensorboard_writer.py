"""A TensorBoard writer whose disk errors do not end a run, because metrics.jsonl holds the same numbers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def report_thread_error(error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, but for a disk error of TensorBoard's: its writer raises it again, in `_do`."""
    is_writer = type(error.thread).__module__.partition(".")[0] == "tensorboard"
    if not (is_writer and issubclass(error.exc_type, OSError)):
        threading.__excepthook__(error)


class TensorBoardWriter:
    """Scalars, images and texts for TensorBoard. Once it is open, no method raises OSError.

    A value that cannot be written is lost, which is logged. Every flush tries to open a new event file, because one
    that ends in the middle of an event cannot be continued. `open_writer` returns a SummaryWriter.
    """

    def __init__(self, folder: str, open_writer: Callable[[], Any]):
        self._folder, self._open = folder, open_writer
        self._writer: Any = open_writer()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._do("add_scalar", name, value, step)

    def add_image(self, name: str, image: Any, step: int) -> None:
        self._do("add_image", name, image, step)

    def add_text(self, name: str, text: str, step: int) -> None:
        self._do("add_text", name, text, step)

    def flush(self) -> None:
        """Write everything; after a disk error, start a new file."""
        if self._writer is None:
            try:
                self._writer = self._open()
            except OSError as error:
                logger.debug("cannot write %s yet: %s", self._folder, error)
                return
            logger.warning(
                "--tensorboard-dir: writing to %s again, in a new file; scalars logged in between are lost",
                self._folder,
            )
        self._do("flush")

    def close(self) -> None:
        self._do("close")
        self._writer = None

    def _do(self, method: str, *args: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*args)
        except OSError as error:
            logger.warning(
                f"--tensorboard-dir: cannot write {self._folder} ({error.strerror or error}); the run continues and "
                "retries. metrics.jsonl is not affected"
            )
            broken, self._writer = self._writer, None
            try:
                broken.close()  # ends its thread
            except OSError as again:
                logger.debug("%s: %s", self._folder, again)
