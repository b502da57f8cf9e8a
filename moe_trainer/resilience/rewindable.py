"""A batch iterator that can rewind to the start of an iteration, so that the iteration can be rerun or recorded.

It holds references to the batches of the iteration, which are on the host anyway, and the states of the random
generators. The caller restores whatever else forward and backward change.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class RewindableIterator(Iterator[Batch], Generic[Batch]):
    """An iterator over batches that can go back to the start of the iteration.

    `capture` and `restore` get and set the state of all random generators of this rank.

    Attributes:
        batches: the batches that this iteration has read so far.
        random_state: the state of the generators at its start; None before the first begin().
    """

    def __init__(self, source: Iterator[Batch], capture: Callable[[], Any], restore: Callable[[Any], None]):
        self._source, self._capture, self._restore = source, capture, restore
        self._next = 0
        self.batches: list[Batch] = []
        self.random_state: Any = None

    def __next__(self) -> Batch:
        if self._next == len(self.batches):
            self.batches.append(next(self._source))
        batch = self.batches[self._next]
        self._next += 1
        return batch

    def begin(self) -> None:
        """Mark the start of an iteration and drop the batches of the previous one."""
        self.batches, self._next = [], 0
        self.random_state = self._capture()

    def rewind(self) -> None:
        """Go back to the start: repeat the batches and restore the random generators."""
        self._next = 0
        self._restore(self.random_state)
