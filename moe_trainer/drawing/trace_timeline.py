"""What every rank does in a profiled iteration, on one time axis: lanes of computation, communication and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.drawing.axes import Scale, number_text, round_ticks
from moe_trainer.drawing.svg import FAINT, PALE, Picture, text_width

Interval = tuple[float, float]
"""Start and end."""
_LANE = 14


@dataclass(frozen=True)
class Lane:
    """A row of a rank: its name, and the intervals of each kind of work as (kind, intervals)."""

    name: str
    work: tuple[tuple[str, tuple[Interval, ...]], ...]


def merge(intervals: Sequence[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union of intervals in order; those at most `gap` apart are joined."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def trace_timeline(
    title: str,
    heading: str,
    ranks: Sequence[tuple[str, Sequence[Lane]]],
    colors: dict[str, str],
    end: float,
    unit: str,
    width: float = 1180,
) -> str:
    """Draw the lanes of all ranks.

    Args:
        title: for screen readers.
        heading: above the lanes.
        ranks: name and lanes of each rank.
        colors: of the kinds of work.
        end: of the time axis, which starts at 0.
        unit: of the times.
        width: of the picture.
    """
    first = 14 + max(text_width(name, bold=True) for name, _ in ranks) + 12
    left = first + max(text_width(lane.name, 10) for _, lanes in ranks for lane in lanes) + 8
    scale = Scale(0.0, end, left, width - 30)
    picture, y = Picture(width, 60, title, heading), 48.0
    top = y
    for name, lanes in ranks:
        picture.text(14, y + 11, name, font_weight="bold")
        for lane in lanes:
            picture.text(first, y + 10, lane.name, size=10)
            picture.box(left, y, scale.end - left, _LANE - 2, PALE)
            for kind, intervals in lane.work:
                # what is closer than half a pixel looks joined, and long traces stay small
                joined = merge(intervals, end / (scale.end - left) / 2)
                spans = ((scale.at(start), max(scale.at(stop) - scale.at(start), 0.3)) for start, stop in joined)
                shape = "".join(f"M{x:.1f} {y:g}h{size:.1f}v{_LANE - 2}h-{size:.1f}z" for x, size in spans)
                if shape:
                    busy = sum(stop - start for start, stop in merge(intervals))
                    picture.path(shape, colors[kind], f"{name}, {kind}: {busy:.4g} {unit}, {busy / end:.1%}")
            y += _LANE
        y += 8
    for tick in round_ticks(0.0, end, 10):
        picture.line(scale.at(tick), top - 4, scale.at(tick), y, FAINT, stroke_opacity=0.6)
        picture.text(scale.at(tick), y + 12, f"{number_text(tick)} {unit}", "middle" if tick else "start", 11)
    used = {kind for _, lanes in ranks for lane in lanes for kind, intervals in lane.work if intervals}
    picture.legend(left, y + 36, [(color, kind) for kind, color in colors.items() if kind in used])
    return picture.svg()
