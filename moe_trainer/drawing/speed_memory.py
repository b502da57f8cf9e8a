"""Speed against memory of several configurations: those that no other one beats in both form the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.drawing.axes import Scale, draw_guide, draw_labels, draw_x_axis, draw_y_axis
from moe_trainer.drawing.svg import BLUE, GRAY, INK, ORANGE, PURPLE, Picture

_KINDS = (("best", BLUE), ("other", GRAY), ("own", ORANGE), ("published", PURPLE))


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        memory: that it needs.
        speed: that it reaches.
        label: next to the point, if there is space.
        tip: everything else about it.
        kind: "best", "other", "own" or "published", which gives the color.
    """

    memory: float
    speed: float
    label: str
    tip: str
    kind: str = "best"


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that no other one beats, from the least memory to the highest speed.

    One beats another if it needs no more memory and is no slower, and is better in one of the two.
    """
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda one: (one.memory, -one.speed)):
        if not front or each.speed > front[-1].speed:
            front.append(each)
    return front


def speed_memory(
    title: str,
    heading: str,
    candidates: Sequence[Candidate],
    usable: float,
    names: tuple[str, str],
    kinds: dict[str, str],
) -> str:
    """Draw the candidates.

    Args:
        title: for screen readers.
        heading: above the points.
        candidates: the most important first; their labels are placed in this order, after those of the front. The
            scales are those of the best and other ones; one outside of them is at the edge, with its numbers.
        usable: memory of a device, marked by a line.
        names: of the two axes: memory, speed.
        kinds: what the kinds of candidates are called in the legend.
    """
    left, right, top, bottom = 90, 920, 66, 480
    scaled = [each for each in candidates if each.kind in ("best", "other")] or candidates
    memory, speed = [each.memory for each in scaled], [each.speed for each in scaled]
    wide, high = max(max(memory), usable) - min(memory), max(speed) - min(speed) or max(speed) or 1.0
    x = Scale(max(0.0, min(memory) - 0.12 * wide), max(max(memory), usable) + 0.06 * wide, left, right)
    y = Scale(max(0.0, min(speed) - 0.12 * high), max(speed) + 0.12 * high, bottom, top)
    picture = Picture(960, bottom + 50, title, heading)
    draw_x_axis(picture, x, top, bottom, names[0])
    draw_y_axis(picture, y, left, right, names[1])
    draw_guide(picture, x.at(usable), top, bottom, f"{usable:.1f} usable", top - 8)
    front = pareto_front([each for each in candidates if each.memory <= usable])
    if front:
        commands = f"M{x.at(front[0].memory):.6g} {y.at(front[0].speed):.6g}"
        for each in front[1:]:
            commands += f"H{x.at(each.memory):.6g}V{y.at(each.speed):.6g}"
        picture.path(commands, "none", stroke=INK, stroke_width=1.5, stroke_opacity=0.6)
    colors, points = dict(_KINDS), []
    for each in candidates:
        clamped = min(max(each.memory, x.low), x.high), min(max(each.speed, y.low), y.high)
        is_outside = clamped != (each.memory, each.speed)
        label = f"{each.label} (outside: {each.speed:,.0f} at {each.memory:.1f} GiB)" if is_outside else each.label
        points.append((x.at(clamped[0]), y.at(clamped[1]), label))
    # own and published mappings are below the others, and larger, since they often coincide with one of them
    for each, (at_x, at_y, _) in sorted(zip(candidates, points), key=lambda pair: pair[0].kind in ("best", "other")):
        edge = {"stroke": INK, "stroke_width": 2} if each in front else {}
        radius = 6 if each.kind in ("best", "other") else 10
        picture.circle(at_x, at_y, radius, colors[each.kind], each.tip, **edge)
    order = sorted(zip(candidates, points), key=lambda pair: pair[0] not in front)
    draw_labels(picture, [point for _, point in order], (left, top, right, bottom - 4))
    entries = [(color, kinds[kind]) for kind, color in _KINDS if any(each.kind == kind for each in candidates)]
    picture.legend(left, bottom + 60, [*entries, (INK, "with an edge: Pareto front")])
    return picture.svg()
