"""An iteration's beginning: what it read comes again, in order, with the same random numbers."""

import random

import pytest

from moe_trainer.resilience.rewindable import RewindableIterator


def test_the_same_batches_and_numbers_come_again():
    begun = RewindableIterator(iter(range(10)), random.getstate, random.setstate)
    assert next(begun) == 0  # before any iteration, as skipped ones are read
    begun.begin()
    first = [(next(begun), random.random()) for _ in range(3)]
    begun.rewind()
    assert [(next(begun), random.random()) for _ in range(3)] == first
    assert next(begun) == 4, "it continues after what it has saved"
    begun.rewind()
    assert [next(begun) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_the_next_iteration_forgets_the_last():
    begun = RewindableIterator(iter(range(4)), lambda: None, lambda state: None)
    begun.begin()
    next(begun)
    begun.begin()
    assert begun.batches == []
    assert [next(begun) for _ in range(3)] == [1, 2, 3] == begun.batches
    begun.rewind()
    with pytest.raises(StopIteration):
        for _ in range(9):
            next(begun)
