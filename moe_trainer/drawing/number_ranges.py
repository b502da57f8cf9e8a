"""Runs of consecutive numbers, for texts that name many."""

from __future__ import annotations

from collections.abc import Sequence


def group_consecutive(numbers: Sequence[int]) -> list[range]:
    """Return ascending numbers as the ranges of consecutive ones: 2, 8, 9, 10 as range(2, 3), range(8, 11)."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
