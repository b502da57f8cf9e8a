"""Intervals of means over seeds, and of differences."""

import random
import statistics

import pytest

from moe_trainer.comparison.intervals import Interval, difference, interval, t_quantile

# probability, degrees of freedom: quantile, from printed tables
TABLE = {
    (0.975, 1): 12.706,
    (0.975, 2): 4.303,
    (0.975, 9): 2.262,
    (0.975, 30): 2.042,
    (0.95, 5): 2.015,
    (0.995, 3): 5.841,
    (0.975, 1000): 1.962,
}


@pytest.mark.parametrize("case", TABLE)
def test_quantiles_are_those_of_the_tables(case):
    assert t_quantile(*case) == pytest.approx(TABLE[case], abs=6e-4)


def test_interval_holds_the_mean_as_often_as_it_says():
    rng = random.Random(0)
    held = sum(abs((each := interval([rng.gauss(1, 2) for _ in range(3)])).mean - 1) <= each.half for _ in range(600))
    assert 0.92 < held / 600 < 0.975


def test_pairs_cancel_what_a_seed_changes():
    values, others = [1.0, 2.0, 3.0], [0.9, 1.9, 2.91]
    paired, apart = difference(values, others, True), difference(values, others, False)
    assert paired.mean == pytest.approx(apart.mean) and paired.excludes_zero and not apart.excludes_zero
    # of equal variances and numbers Welch's interval is that of 2 n - 2 degrees of freedom
    same = difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], False)
    assert same.half == pytest.approx(t_quantile(0.975, 4) * (2 * statistics.variance([1, 2, 3]) / 3) ** 0.5)


def test_half_width_is_the_quantile_times_the_standard_error():
    found = interval([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.3027 * statistics.stdev([1.0, 2.0, 4.0]) / 3**0.5, rel=1e-4)
    assert not found.excludes_zero and interval([1.0, 1.1, 1.2]).excludes_zero


def test_one_value_has_no_interval():
    assert str(interval([1.5])) == "1.5000" and str(interval([5])) == "5" and not Interval(1.0).excludes_zero
    assert difference([1.0], [2.0, 3.0], False).half is None
