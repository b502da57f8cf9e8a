"""Means of seeds with intervals by Student's t distribution.

scipy has the distribution, and is no dependency of this program; its quantiles are found by bisection of the integral
of its density here, to nine digits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEVEL = 0.95


def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution, for probabilities above one half.

    Args:
        probability: from 0.5 to below 1.
        degrees: of freedom, at least 1.
    """
    # x = tan(a) maps the half line to angles, where the density is a power of the cosine
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def integral(angle: float) -> float:
        angles = angle / 2 * (nodes + 1)
        return float(angle / 2 * (weights * np.cos(angles) ** (degrees - 1)).sum()) * scale

    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + integral(middle) < probability else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval; None if there is only one value."""

    mean: float
    half: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether zero is outside of the interval."""
        return self.half is not None and abs(self.mean) > self.half

    def __str__(self) -> str:
        if self.half is None and float(self.mean).is_integer():  # a count
            return f"{self.mean:,.0f}"
        digits = 4 if abs(self.mean) < 100 else 1
        return f"{self.mean:,.{digits}f}" + ("" if self.half is None else f" +- {self.half:,.{digits}f}")


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of the values of some seeds, with its interval."""
    if len(values) < 2:
        return Interval(values[0])
    half = t_quantile((1 + _LEVEL) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.mean(values), half)


def difference(values: Sequence[float], others: Sequence[float], paired: bool) -> Interval:
    """Return by how much values exceed others.

    Args:
        values: of some seeds.
        others: of some seeds.
        paired: both have the same seeds in the same order, so that what a seed changes cancels. Otherwise the
            variances may differ, and the interval is Welch's.
    """
    if paired:
        return interval([one - other for one, other in zip(values, others, strict=True)])
    mean = statistics.mean(values) - statistics.mean(others)
    if len(values) < 2 or len(others) < 2:
        return Interval(mean)
    parts = [statistics.variance(each) / len(each) for each in (values, others)]
    if not sum(parts):
        return Interval(mean, 0.0)
    degrees = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (values, others)))
    return Interval(mean, t_quantile((1 + _LEVEL) / 2, degrees) * math.sqrt(sum(parts)))
