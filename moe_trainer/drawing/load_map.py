"""A map of loads: one row per layer, one column per expert, colored by how far a load is from the mean of its row."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trainer.drawing.svg import BLUE, INK, LIGHT_BLUE, LIGHT_ORANGE, ORANGE, PALE, RED, SLATE, Picture

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
_WIDTH, _MAX_COLUMN, _ROW = 900, 60, 18
_NUM_BUSIEST = 3


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


def load_map(title: str, heading: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw the map. A pointer on a row shows its busiest experts.

    Args:
        title: for screen readers.
        heading: above the map.
        rows: the name of each and its loads, equally many in all rows.
    """
    left, top, num_columns = 86, 44, len(rows[0][1])
    column = min(_WIDTH / num_columns, _MAX_COLUMN)
    picture = Picture(left + _WIDTH + 14, top + len(rows) * _ROW, title, heading)
    cells: dict[str, list[str]] = {}
    for row, (_, loads) in enumerate(rows):
        mean = sum(loads) / num_columns
        for expert, load in enumerate(loads):
            place = f"M{left + expert * column:.5g} {top + row * _ROW}h{column:.4g}v{_ROW - 1}h-{column:.4g}z"
            cells.setdefault(load_color(load, mean), []).append(place)
    for color, places in cells.items():  # one path per color: a large model has thousands of cells
        picture.path("".join(places), color)
    for row, (name, loads) in enumerate(rows):
        y = top + row * _ROW
        picture.text(left - 8, y + 13, name, "end")
        tip = f"{name}: busiest experts {busiest_text(loads)}"
        picture.box(left, y, num_columns * column, _ROW - 1, PALE, tip, fill_opacity=0)
    bottom = top + len(rows) * _ROW
    marks = sorted({0, num_columns // 4, num_columns // 2, 3 * num_columns // 4, num_columns - 1})
    for expert in marks:
        picture.text(left + (expert + 0.5) * column, bottom + 15, str(expert), "middle", 11, INK)
    picture.text(left - 8, bottom + 15, "expert", "end", 11, INK)
    picture.legend(14, bottom + 42, _LEGEND)
    return picture.svg()
