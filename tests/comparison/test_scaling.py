"""Fits of scaling laws recover the constants of made-up runs, and their intervals hold them."""

import math
import random

import pytest

from moe_trainer.comparison.scaling import Point, check_points, fit


def make_points(form, noise, seed=0):
    rng = random.Random(seed)
    points = []
    for parameters in (1e7, 4e7, 1.6e8, 6e8):
        for tokens in (3e8, 1.2e9, 5e9):
            for granularity in (1.0, 4.0, 16.0) if form == "granularity" else (1.0,):
                if form == "compute":
                    loss = 1.8 + 2500 / (6 * parameters * tokens) ** 0.2
                else:
                    extra = 300 / granularity**0.6 if form == "granularity" else 0.0
                    loss = 1.7 + (400 + extra) / parameters**0.34 + 410 / tokens**0.28
                points.append(Point(parameters, tokens, granularity, loss * math.exp(rng.gauss(0, noise))))
    return points


def test_constants_of_exact_runs_are_recovered():
    found = fit("compute", make_points("compute", 0.0), num_samples=1)
    assert found.constants == pytest.approx({"E": 1.8, "A": 2500, "a": 0.2}, rel=0.02) and found.error < 1e-4
    found = fit("tokens", make_points("tokens", 0.0), num_samples=1)
    assert (found.constants["E"], found.constants["a"], found.constants["b"]) == pytest.approx(
        (1.7, 0.34, 0.28), rel=0.03
    )


def test_prediction_beyond_the_runs_is_inside_its_interval():
    found = fit("tokens", make_points("tokens", 0.003, seed=1), num_samples=30)
    truth = 1.7 + 400 / 2e9**0.34 + 410 / 2e10**0.28
    value, low, high = found.predict(2e9, 2e10)
    assert low <= truth <= high and low <= value <= high and high - low < 0.3
    low, high = found.interval("E")
    assert low < 1.7 < high


def test_granularity_lowers_the_loss():
    found = fit("granularity", make_points("granularity", 0.001, seed=2), num_samples=1)
    coarse, fine = (found.predict(1e9, 1e10, granularity)[0] for granularity in (1.0, 16.0))
    truth = [1.7 + (400 + 300 / g**0.6) / 1e9**0.34 + 410 / 1e10**0.28 for g in (1.0, 16.0)]
    assert (coarse, fine) == pytest.approx(truth, abs=0.02) and fine < coarse


def test_runs_that_do_not_determine_a_law_are_refused():
    points = make_points("tokens", 0.0)
    assert "needs 9 runs or more" in check_points("granularity", points[:5])
    assert "three values or more of G" in check_points("granularity", points)
    same_tokens = [point for point in points if point.tokens == 3e8] * 3
    assert "three values or more of D" in check_points("tokens", same_tokens)
    with pytest.raises(ValueError, match="compute: needs 5 runs"):
        fit("compute", points[:2])
