"""Axes: a linear scale, round ticks, and labels of points that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.drawing.svg import FAINT, INK, PAPER, RED, Picture, text_width


def round_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers from `low` to `high`, one, two or five times a power of ten apart."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """Return a number as an axis shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Scale:
    """A linear map of the numbers from `low` to `high` onto the positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a number."""
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


def draw_x_axis(picture: Picture, scale: Scale, top: float, bottom: float, name: str) -> None:
    """Add vertical grid lines with numbers below them, and the name of the axis."""
    for tick in round_ticks(scale.low, scale.high, max(2, int((scale.end - scale.start) / 90))):
        x = scale.at(tick)
        picture.line(x, top, x, bottom, FAINT)
        picture.text(x, bottom + 15, number_text(tick), "middle", 11)
    picture.text((scale.start + scale.end) / 2, bottom + 32, name, "middle", 12)


def draw_y_axis(picture: Picture, scale: Scale, left: float, right: float, name: str) -> None:
    """Add horizontal grid lines with numbers left of them, and the name of the axis above."""
    for tick in round_ticks(scale.low, scale.high, max(2, int(abs(scale.end - scale.start) / 50))):
        y = scale.at(tick)
        picture.line(left, y, right, y, FAINT)
        picture.text(left - 6, y + 4, number_text(tick), "end", 11)
    picture.text(left, min(scale.start, scale.end) - 10, name, "start", 12)


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def overlap(a: Box, b: Box) -> bool:
    """Return whether two boxes share an area."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def place_labels(
    points: Sequence[tuple[float, float, str]], area: Box, size: float = 11.0, radius: float = 6.0
) -> list[tuple[float, float] | None]:
    """Return where the label of each point starts (its base line), without overlaps; None where no place is free.

    Args:
        points: x, y and label, the most important first.
        area: that labels must not leave.
        size: of the font.
        radius: of the points, which labels do not cover.
    """
    taken: list[Box] = [(x - radius, y - radius, x + radius, y + radius) for x, y, _ in points]
    places: list[tuple[float, float] | None] = []
    for x, y, label in points:
        width, gap = text_width(label, size), radius + 3
        choices = [
            (left, y + down * (size + 2) + 4)
            for down in (0, -1, 1, -2, 2, -3, 3)
            for left in (x + gap, x - gap - width, x - width / 2)
        ]
        boxes = [(left, base - size, left + width, base + 3) for left, base in choices]
        found = next(
            (
                number
                for number, box in enumerate(boxes)
                if area[0] <= box[0] and box[2] <= area[2] and area[1] <= box[1] and box[3] <= area[3]
                if not any(overlap(box, other) for other in taken)
            ),
            None,
        )
        places.append(None if found is None else choices[found])
        if found is not None:
            taken.append(boxes[found])
    return places


def draw_labels(picture: Picture, points: Sequence[tuple[float, float, str]], area: Box, radius: float = 6.0) -> None:
    """Add the labels that `place_labels` finds space for, with a line to points that are not next to them."""
    for (x, y, label), place in zip(points, place_labels(points, area, radius=radius)):
        if place is None or not label:
            continue
        left, base = place
        if abs(base - 4 - y) > radius:
            above = base < y
            end = min(max(x, left), left + text_width(label, 11))
            picture.line(x, y, end, base + 3 if above else base - 10, INK, stroke_opacity=0.5)
        picture.text(left, base, label, size=11, stroke=PAPER, stroke_width=3, paint_order="stroke")


def draw_guide(picture: Picture, x: float, top: float, bottom: float, name: str, name_y: float) -> None:
    """Add a dashed vertical line, and its name at `name_y`, left of it where the picture ends."""
    picture.line(x, top, x, bottom, PAPER, stroke_width=4)  # so that it shows on bars of any color
    picture.line(x, top, x, bottom, RED, stroke_width=1.5, stroke_dasharray="4 3")
    fits = x + 4 + text_width(name, 11) < picture.width
    picture.text(x + 4 if fits else x - 4, name_y, name, "start" if fits else "end", 11, RED)
