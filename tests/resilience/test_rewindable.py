"""RewindableIterator repeats the batches and random numbers of an iteration."""

import random

import pytest

from moe_trainer.resilience.rewindable import RewindableIterator


def test_rewind_repeats_batches_and_random_numbers():
    begun = RewindableIterator(iter(range(10)), random.getstate, random.setstate)
    assert next(begun) == 0  # before any iteration, as skipped ones are read
    begun.begin()
    first = [(next(begun), random.random()) for _ in range(3)]
    begun.rewind()
    assert [(next(begun), random.random()) for _ in range(3)] == first
    assert next(begun) == 4, "it continues after what it has saved"
    begun.rewind()
    assert [next(begun) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_new_iteration_drops_the_saved_batches():
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
