"""Microbatches for all chunks of a rank from one iterator."""

from collections.abc import Callable
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class MicrobatchCache(Generic[Batch]):
    """Returns microbatch i of an iteration to every local chunk, and drops it after the last one.

    Args:
        read: fetches the next microbatch.
    """

    def __init__(self, read: Callable[[], Batch], num_chunks: int):
        self._read, self._num_chunks, self._next = read, num_chunks, 0
        self._cached: dict[int, tuple[Batch, int]] = {}

    def __call__(self, microbatch: int) -> Batch:
        """Return a microbatch of this iteration; each chunk asks once for each."""
        batch, uses = self._get(microbatch)
        self._cached[microbatch] = batch, uses + 1
        if uses + 1 == self._num_chunks:
            del self._cached[microbatch]
        return batch

    def peek(self, microbatch: int) -> Batch:
        """Return a microbatch that some chunk will still ask for."""
        return self._get(microbatch)[0]

    def _get(self, microbatch: int) -> tuple[Batch, int]:
        while self._next <= microbatch:
            self._cached[self._next] = self._read(), 0
            self._next += 1
        return self._cached[microbatch]
