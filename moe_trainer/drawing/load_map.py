"""A map of loads: one row per layer, one column per expert, colored by how far a load is from the mean of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.drawing.svg import (
    BLUE,
    INK,
    LIGHT_BLUE,
    LIGHT_ORANGE,
    ORANGE,
    PALE,
    RED,
    SLATE,
    Picture,
    text_width,
)

_SCALE = ((0.5, BLUE), (0.8, LIGHT_BLUE), (1.25, PALE), (2.0, LIGHT_ORANGE), (4.0, ORANGE))
"""Colors of loads below a multiple of the mean; RED above the last, SLATE for none at all."""
_LEGEND = (
    (SLATE, "no token"),
    (BLUE, "below 0.5 x mean"),
    (LIGHT_BLUE, "0.5 to 0.8 x"),
    (PALE, "0.8 to 1.25 x"),
    (LIGHT_ORANGE, "1.25 to 2 x"),
    (ORANGE, "2 to 4 x"),
    (RED, "4 x and more"),
)
_WIDTH, _MAX_COLUMN, _ROW, _GAP = 900, 60, 18, 24
_NUM_BUSIEST = 3


@dataclass(frozen=True)
class Panel:
    """One of the maps that stand side by side.

    Attributes:
        name: above it; may be empty.
        loads: one row per layer, equally many loads in each.
    """

    name: str
    loads: Sequence[Sequence[float]]


def load_color(load: float, mean: float) -> str:
    """Return the color of a load among others of this mean."""
    if load == 0:
        return SLATE
    return next((color for below, color in _SCALE if load < below * mean), RED)


def busiest_text(loads: Sequence[float]) -> str:
    """Return the busiest experts and their shares, such as "3 (83.3%), 1 (8.3%)"."""
    total = sum(loads) or 1
    order = sorted(range(len(loads)), key=lambda expert: -loads[expert])[:_NUM_BUSIEST]
    return ", ".join(f"{expert} ({loads[expert] / total:.1%})" for expert in order)


def load_map(title: str, heading: str, layers: Sequence[int], panels: Sequence[Panel]) -> str:
    """Draw the maps of the same layers side by side. A pointer on a row shows its busiest experts.

    Args:
        title: for screen readers.
        heading: above the maps.
        layers: the number of each row.
        panels: from left to right.
    """
    left, top = 86, 66 if any(panel.name for panel in panels) else 44
    column = min(
        (_WIDTH - _GAP * (len(panels) - 1)) / sum(len(panel.loads[0]) for panel in panels), _MAX_COLUMN / len(panels)
    )
    picture = Picture(left + _WIDTH + 14, top + len(layers) * _ROW, title, heading)
    for row, layer in enumerate(layers):
        picture.text(left - 8, top + row * _ROW + 13, f"layer {layer}", "end")
    picture.text(left - 8, top + len(layers) * _ROW + 15, "expert", "end", 11)
    x = float(left)
    for panel in panels:
        picture.text(x, top - 8, panel.name)
        _draw_panel(picture, x, top, column, layers, panel)
        x += max(len(panel.loads[0]) * column, text_width(panel.name)) + _GAP
    picture.legend(14, top + len(layers) * _ROW + 42, _LEGEND)
    return picture.svg()


def _draw_panel(picture: Picture, left: float, top: float, column: float, layers: Sequence[int], panel: Panel) -> None:
    num_experts = len(panel.loads[0])
    cells: dict[str, list[str]] = {}
    for row, loads in enumerate(panel.loads):
        mean = sum(loads) / num_experts
        for expert, load in enumerate(loads):
            place = f"M{left + expert * column:.5g} {top + row * _ROW}h{column:.4g}v{_ROW - 1}h-{column:.4g}z"
            cells.setdefault(load_color(load, mean), []).append(place)
    for color, places in cells.items():  # one path per color: a large model has thousands of cells
        picture.path("".join(places), color)
    for row, (layer, loads) in enumerate(zip(layers, panel.loads, strict=True)):
        tip = f"{f'{panel.name}, ' if panel.name else ''}layer {layer}: busiest experts {busiest_text(loads)}"
        picture.box(left, top + row * _ROW, num_experts * column, _ROW - 1, PALE, tip, fill_opacity=0)
    bottom = top + len(layers) * _ROW
    for expert in sorted({0, num_experts // 4, num_experts // 2, 3 * num_experts // 4, num_experts - 1}):
        picture.text(left + (expert + 0.5) * column, bottom + 15, str(expert), "middle", 11, INK)
