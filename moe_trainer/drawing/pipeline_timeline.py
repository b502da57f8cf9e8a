"""The timeline of a pipeline schedule: what every stage computes when, what it waits for, and where it is idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe_trainer.drawing.axes import Scale, number_text, round_ticks
from moe_trainer.drawing.svg import (
    BLUE,
    FAINT,
    GREEN,
    LIGHT_BLUE,
    LIGHT_ORANGE,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    SLATE,
    Picture,
    text_width,
)

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
COLORS = MappingProxyType({FORWARD: (BLUE, LIGHT_BLUE), BACKWARD: (ORANGE, LIGHT_ORANGE), WEIGHT: (GREEN, GREEN)})
"""By kind of action: of even and of odd chunks."""
EXPOSED = PURPLE
_HEIGHT = 30


@dataclass(frozen=True)
class Work:
    """One action of a stage: `kind` is F, B or W (weight gradients)."""

    kind: str
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Span:
    """A step of a stage: one action, or a forward and a backward at the same time.

    Attributes:
        works: the actions.
        start: when it starts.
        end: when it ends.
        exposed: time at its end in which the stage only communicates.
    """

    works: tuple[Work, ...]
    start: float
    end: float
    exposed: float = 0.0


def idle_share(stages: Sequence[Sequence[Span]]) -> float:
    """Return the mean share of the schedule's time in which a stage does nothing."""
    last = max(span.end for spans in stages for span in spans)
    busy = sum(span.end - span.start for spans in stages for span in spans)
    return 1.0 - busy / (last * len(stages))


def pipeline_timeline(
    title: str,
    heading: str,
    stages: Sequence[Sequence[Span]],
    tail: Sequence[tuple[str, float]] = (),
    unit: str = "",
    width: float = 940,
) -> str:
    """Draw one row per stage.

    Args:
        title: for screen readers.
        heading: above the rows.
        stages: the steps of each stage, in order.
        tail: what every stage does after the schedule, with its duration.
        unit: of the times; without one there is no axis.
        width: of the picture.
    """
    last = max(span.end for spans in stages for span in spans)
    total = last + sum(duration for _, duration in tail)
    left = 24 + text_width(f"stage {len(stages) - 1}")
    scale = Scale(0.0, total, left, width - 14)
    widest = text_width(1 + max(work.microbatch for spans in stages for span in spans for work in span.works), 11)
    rows = len(stages) * (_HEIGHT + 6)
    picture = Picture(width, 44 + rows, title, heading)
    for number, spans in enumerate(stages):
        y = 44 + number * (_HEIGHT + 6)
        picture.text(14, y + 20, f"stage {number}")
        picture.box(left, y, scale.at(last) - left, _HEIGHT, PALE)
        for span in spans:
            _draw_span(picture, scale, y, span, unit, widest)
        done = last
        for name, duration in tail:
            size = scale.at(done + duration) - scale.at(done)
            picture.box(scale.at(done), y, size, _HEIGHT, SLATE, f"{name}: {duration:.4g} {unit}".strip())
            picture.label(scale.at(done), y + 20, size, name, SLATE)
            done += duration
    y = 44 + rows
    if unit:
        for tick in round_ticks(0.0, total, 8):
            picture.line(scale.at(tick), 40, scale.at(tick), y, FAINT, stroke_opacity=0.6)
            picture.text(scale.at(tick), y + 14, f"{number_text(tick)} {unit}", "middle" if tick else "start", 11)
        y += 20
    picture.legend(left, y + 22, _legend(stages, tail))
    return picture.svg()


def _draw_span(picture: Picture, scale: Scale, y: float, span: Span, unit: str, widest: float) -> None:
    """Add one step; with the numbers of its microbatches where that of any microbatch would fit."""
    height = _HEIGHT / len(span.works)
    start, busy, end = scale.at(span.start), scale.at(span.end - span.exposed), scale.at(span.end)
    for number, work in enumerate(span.works):
        color = COLORS[work.kind][work.chunk % 2]
        tip = f"{work.kind}{work.microbatch + 1}, chunk {work.chunk}: {span.end - span.start:.4g} {unit}".strip()
        top = y + number * height
        picture.box(start, top, busy - start, height, color, tip, **_edge(busy - start))
        if widest + 2 <= busy - start:
            picture.label(start, top + height / 2 + 4, busy - start, work.microbatch + 1, color)
    if span.exposed > 0:
        tip = f"communication: {span.exposed:.4g} {unit}"
        picture.box(busy, y, end - busy, _HEIGHT, EXPOSED, tip.strip(), **_edge(end - busy))


def _edge(width: float) -> dict[str, object]:
    """Return the line around a box; without one where it would hide the box."""
    return {"stroke": PAPER, "stroke_width": 0.8} if width > 4 else {}


def _legend(stages: Sequence[Sequence[Span]], tail: Sequence[tuple[str, float]]) -> list[tuple[str, str]]:
    works = {(work.kind, work.chunk % 2) for spans in stages for span in spans for work in span.works}
    splits = any(kind == WEIGHT for kind, _ in works)
    names = {
        FORWARD: "forward",
        BACKWARD: "backward of the input" if splits else "backward",
        WEIGHT: "weight gradients",
    }
    has_chunks = any(odd for _, odd in works)
    entries = []
    for kind, name in names.items():
        for odd in (0, 1) if kind != WEIGHT else (0,):
            if (kind, odd) in works:
                suffix = f", {'odd' if odd else 'even'} chunks" if has_chunks and kind != WEIGHT else ""
                entries.append((COLORS[kind][odd], name + suffix))
    if any(span.exposed > 0 for spans in stages for span in spans):
        entries.append((EXPOSED, "exposed communication"))
    if tail:
        entries.append((SLATE, "after the schedule"))
    return [*entries, (PALE, "idle (bubble)")]
