"""Stacked horizontal bars: memory of pipeline stages against the device, and the parts of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.drawing.axes import Scale, draw_guide
from moe_trainer.drawing.svg import INK, PALE, Picture, text_width

WIDTH = 940


@dataclass(frozen=True)
class Series:
    """One part of every bar."""

    name: str
    color: str


@dataclass(frozen=True)
class Bar:
    """One bar: its name, the size of each part, and the text behind it."""

    name: str
    sizes: tuple[float, ...]
    total: str

    @property
    def length(self) -> float:
        return sum(self.sizes)


def stacked_bars(
    title: str,
    heading: str,
    series: Sequence[Series],
    bars: Sequence[Bar],
    unit: str,
    end: float = 0.0,
    guides: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw bars below each other, all in one scale.

    Args:
        title: for screen readers.
        heading: above the bars.
        series: the parts of every bar, from left to right.
        bars: from top to bottom.
        unit: of the sizes, in tips.
        end: shortest length of the scale; the area up to it is shaded.
        guides: lengths that a line marks, with their names.
    """
    longest = max([end, *(bar.length for bar in bars), *(length for length, _ in guides)]) or 1.0
    left = 24 + max(text_width(bar.name) for bar in bars)
    right = WIDTH - 24 - max(text_width(bar.total, 11) for bar in bars)
    scale, pitch = Scale(0.0, longest, left, right), 30 if len(bars) <= 16 else 20
    bottom = 44 + pitch * len(bars)
    picture = Picture(WIDTH, bottom, title, heading)
    for number, bar in enumerate(bars):
        y, done = 44 + pitch * number, 0.0
        picture.text(14, y + pitch / 2 + 1, bar.name)
        picture.box(left, y, scale.at(end or longest) - left, pitch - 8, PALE)
        for part, size in zip(series, bar.sizes, strict=True):
            if size > 0:
                tip = f"{bar.name}, {part.name}: {size:.4g} {unit}"
                picture.box(scale.at(done), y, scale.at(done + size) - scale.at(done), pitch - 8, part.color, tip)
                done += size
        picture.text(scale.at(done) + 6, y + pitch / 2 + 1, bar.total, size=11)
    for length, name in guides:
        draw_guide(picture, scale.at(length), 38, bottom, name, bottom + 13)
    shown = [each for index, each in enumerate(series) if any(bar.sizes[index] > 0 for bar in bars)]
    picture.legend(left, bottom + (40 if guides else 22), [(each.color, each.name) for each in shown])
    return picture.svg()


def shares_bar(title: str, heading: str, parts: Sequence[tuple[str, str, float]], unit: str) -> str:
    """Draw one bar over the full width, and what its parts are in a table below.

    Args:
        title: for screen readers.
        heading: above the bar.
        parts: name, color, size.
        unit: of the sizes.
    """
    total = sum(size for _, _, size in parts) or 1.0
    scale = Scale(0.0, total, 14, WIDTH - 14)
    picture, done = Picture(WIDTH, 100, title, heading), 0.0
    for name, color, size in parts:
        x, width = scale.at(done), scale.at(done + size) - scale.at(done)
        picture.box(x, 40, width, 32, color, f"{name}: {size:.4g} {unit}, {size / total:.1%}")
        picture.label(x, 60, width, f"{size / total:.0%}", color)
        done += size
    rows = (len(parts) + 1) // 2
    for number, (name, color, size) in enumerate(parts):
        x, y = 14 + 460 * (number // rows), 98 + 20 * (number % rows)
        picture.box(x, y - 10, 12, 12, color, rx=2)
        picture.text(x + 18, y, name, fill=INK)
        picture.text(x + 340, y, f"{size:.3f} {unit}", "end")
        picture.text(x + 410, y, f"{size / total:.1%}", "end")
    picture.grow(98 + 20 * rows)
    return picture.svg()
