"""Consecutive numbers as ranges."""

import pytest

from moe_trainer.drawing.number_ranges import group_consecutive


@pytest.mark.parametrize(
    ("numbers", "found"),
    [([], []), ([4], [(4, 4)]), ([2, 8, 9, 10], [(2, 2), (8, 10)]), ([0, 1, 3, 5, 6], [(0, 1), (3, 3), (5, 6)])],
)
def test_consecutive_numbers_are_grouped(numbers, found):
    assert [(each[0], each[-1]) for each in group_consecutive(numbers)] == found
