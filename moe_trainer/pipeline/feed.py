"""Microbatches for all chunks of a rank from one iterator."""

from collections.abc import Callable
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class MicrobatchFeed(Generic[Batch]):
    """Hands microbatch i of an iteration to every local chunk that asks for it, and forgets it after the last one."""

    def __init__(self, read: Callable[[], Batch], num_chunks: int):
        """read: fetches the next microbatch."""
        self._read = read
        self._num_chunks = num_chunks
        self._next = 0
        self._held: dict[int, tuple[Batch, int]] = {}

    def __call__(self, microbatch: int) -> Batch:
        """Return microbatch number `microbatch` of this iteration; each chunk asks once for each."""
        while self._next <= microbatch:
            self._held[self._next] = self._read(), 0
            self._next += 1
        batch, uses = self._held[microbatch]
        self._held[microbatch] = batch, uses + 1
        if uses + 1 == self._num_chunks:
            del self._held[microbatch]
        return batch
