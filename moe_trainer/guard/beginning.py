"""The beginning of an iteration, remembered so that the iteration can run once more from the same place, or be written down.

What it keeps are references to the batches that the iteration reads, which lie on the host and are there anyway, and the states of
the random generators. What else forward and backward change is the caller's to put back.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class Beginning(Iterator[Batch], Generic[Batch]):
    """An iterator over batches that can go back to where the iteration began.

    batches: what this iteration has read so far. random_state: of all generators when it began; None before the first begin().
    """

    def __init__(self, source: Iterator[Batch], capture: Callable[[], Any], restore: Callable[[Any], None]):
        """source: of the batches. capture, restore: read and set the state of all random generators of this rank."""
        self._source, self._capture, self._restore = source, capture, restore
        self._next = 0
        self.batches: list[Batch] = []
        self.random_state: Any = None

    def __next__(self) -> Batch:
        """The next batch: one of this iteration again after rewind(), else a new one."""
        if self._next == len(self.batches):
            self.batches.append(next(self._source))
        batch = self.batches[self._next]
        self._next += 1
        return batch

    def begin(self) -> None:
        """An iteration begins here. What was remembered of the one before is gone."""
        self.batches, self._next = [], 0
        self.random_state = self._capture()

    def rewind(self) -> None:
        """Go back to the beginning: the same batches come again, and the generators stand where they stood."""
        self._next = 0
        self._restore(self.random_state)
