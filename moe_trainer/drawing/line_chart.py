"""Curves over a common axis: lines, areas around them, and what a caller adds at the places that the scales give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_trainer.drawing.axes import Scale, draw_x_axis, draw_y_axis
from moe_trainer.drawing.svg import Picture

LEFT, RIGHT, TOP, BOTTOM = 76, 900, 62, 360
_MARGIN = 0.06  # of the range of the values, below and above

Points = Sequence[tuple[float, float]]


class LineChart:
    """A picture with axes, to which curves are added.

    Args:
        title: for screen readers.
        heading: above the axes.
        x_range: first and last number of the x axis.
        y_values: numbers that are inside the y axis; curves are cut off above and below them.
        names: of the x and the y axis.
    """

    def __init__(
        self,
        title: str,
        heading: str,
        x_range: tuple[float, float],
        y_values: Sequence[float],
        names: tuple[str, str],
    ):
        self.picture = Picture(RIGHT + 30, BOTTOM + 54, title, heading)
        margin = _MARGIN * ((max(y_values) - min(y_values)) or 1.0)
        self._x = Scale(x_range[0], x_range[1], LEFT, RIGHT)
        self._y = Scale(min(y_values) - margin, max(y_values) + margin, BOTTOM, TOP)
        draw_x_axis(self.picture, self._x, TOP, BOTTOM, names[0])
        draw_y_axis(self.picture, self._y, LEFT, RIGHT, names[1])

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is in the picture."""
        return self._x.at(x), min(max(self._y.at(y), TOP), BOTTOM)

    def line(self, points: Points, color: str, tip: str = "", width: float = 2.0, opacity: float = 1.0) -> None:
        """Add a line; a pointer on it shows `tip`."""
        self.picture.path(self._path(points), "none", tip, stroke=color, stroke_width=width, stroke_opacity=opacity)

    def area(self, lower: Points, upper: Points, color: str) -> None:
        """Add the area between two lines."""
        self.picture.path(self._path([*lower, *reversed(upper)]) + "Z", color, fill_opacity=0.18)

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        """Add (color, name) of the curves below the axes."""
        self.picture.legend(LEFT, BOTTOM + 54, entries)

    def svg(self) -> str:
        """Return the picture as text."""
        return self.picture.svg()

    def _path(self, points: Points) -> str:
        places = (self.at(*point) for point in points)
        return "M" + "L".join(f"{x:.6g} {y:.6g}" for x, y in places)
