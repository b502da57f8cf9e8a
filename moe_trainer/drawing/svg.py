"""A picture as SVG text: boxes, lines, texts and legends that are readable in light and dark pages. Standard library.

Reports must work on a laptop with nothing but this program, so no plotting library is required. matplotlib is a large
dependency, svgwrite is no longer developed, drawsvg offers only what this file does, and pygal has neither timelines
nor heat maps and writes scripts into its pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from types import MappingProxyType

BLUE, ORANGE, GREEN, GRAY, RED = "#4c78a8", "#f58518", "#54a24b", "#bab0ac", "#e45756"
PURPLE, TEAL, SLATE, YELLOW, BROWN = "#b279a2", "#72b7b2", "#5b6770", "#eeca3b", "#9d755d"
LIGHT_BLUE, LIGHT_ORANGE, WHITE, BLACK = "#8fb3d6", "#f9b878", "#ffffff", "#202124"
CATEGORIES = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, YELLOW, BROWN)
"""Colors of things without an order; they are used again after the last."""

INK, PALE, PAPER, FAINT = "ink", "pale", "paper", "faint"
"""Colors that follow the theme of the page: texts and lines, empty areas, background, grid lines."""
_THEMES = MappingProxyType(
    {
        INK: ("#333333", "#e3e4e8"),
        PALE: ("#f4f4f6", "#2b2e34"),
        PAPER: ("#ffffff", "#1b1d21"),
        FAINT: ("#dcdce0", "#43464d"),
    }
)
"""In light and in dark pages."""

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[]/\\ -"), frozenset("mwMW%@GOQ")


def clean(text: object) -> str:
    """Return a text escaped for XML and HTML; characters that XML does not allow become question marks."""
    return escape(_ILLEGAL.sub("?", str(text)))


def text_width(text: object, size: float = 12.0, bold: bool = False) -> float:
    """Return about how wide a line is in the widest of the common fonts for Helvetica."""
    ems = sum(
        0.38 if char in _NARROW else 0.95 if char in _WIDE else 0.7 if char.isupper() else 0.62 for char in str(text)
    )
    return ems * size * (1.12 if bold else 1.0)


def shorten(text: object, width: float, size: float = 12.0) -> str:
    """Return a text that fits into `width`, with dots for what was cut; empty if not even one character fits."""
    line = str(text)
    if text_width(line, size) <= width:
        return line
    while line and text_width(line + "...", size) > width:
        line = line[:-1]
    return line.rstrip() + "..." if line else ""


def text_on(fill: str) -> str:
    """Return the color of a text on a color: dark on light ones."""
    red, green, blue = (int(fill[start : start + 2], 16) for start in (1, 3, 5))
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else WHITE


class Picture:
    """An SVG picture.

    Args:
        width: of the picture.
        height: of the picture; `grow` makes it higher.
        title: short name, which is also the label for screen readers.
        heading: text above the picture.
    """

    def __init__(self, width: float, height: float, title: str, heading: str | None = None) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        if heading is not None:
            self.text(14, 24, heading, size=14, font_weight="bold")
            self.width = max(width, text_width(heading, 14, bold=True) + 28)

    def grow(self, height: float) -> None:
        """Make the picture at least so high."""
        self.height = max(self.height, height)

    def box(self, x: float, y: float, width: float, height: float, fill: str, tip="", **attributes: object) -> None:
        """Add a rectangle; a pointer on it shows `tip`."""
        size = f'x="{x:.6g}" y="{y:.6g}" width="{max(width, 0.0):.6g}" height="{height:.6g}"'
        self._add("rect", size, {"fill": fill, **attributes}, tip)

    def text(self, x: float, y: float, text: object, anchor="start", size=12.0, fill=INK, **attributes: object) -> None:
        """Add one line of text."""
        place = f'x="{x:.6g}" y="{y:.6g}" text-anchor="{anchor}" font-size="{size:g}"'
        self._parts.append(f"<text {place}{_paint({'fill': fill, **attributes})}>{clean(text)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke=INK, **attributes: object) -> None:
        """Add a straight line."""
        place = f'x1="{x1:.6g}" y1="{y1:.6g}" x2="{x2:.6g}" y2="{y2:.6g}"'
        self._add("line", place, {"stroke": stroke, **attributes})

    def path(self, commands: str, fill: str, tip="", **attributes: object) -> None:
        """Add a path, given in SVG's commands."""
        self._add("path", f'd="{commands}"', {"fill": fill, **attributes}, tip)

    def circle(self, x: float, y: float, radius: float, fill: str, tip="", **attributes: object) -> None:
        """Add a disk."""
        self._add("circle", f'cx="{x:.6g}" cy="{y:.6g}" r="{radius:g}"', {"fill": fill, **attributes}, tip)

    def block(self, x: float, y: float, width: float, height: float, fill: str, title: str, *lines: str) -> None:
        """Add a rounded rectangle with a title and lines below it."""
        self.box(x, y, width, height, fill, rx=6)
        self.text(x + 12, y + 22, title, size=14, fill=WHITE, font_weight="bold")
        for number, line in enumerate(lines):
            self.text(x + 12, y + 42 + 17 * number, line, fill=WHITE)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK) -> None:
        """Add a line with a head at its end."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
        dx, dy = (x2 - x1) / length * 7, (y2 - y1) / length * 7
        corners = ((x2, y2), (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2))
        self.line(x1, y1, x2 - dx, y2 - dy, color, stroke_width=1.5)
        self.path("M" + "L".join(f"{x:.6g} {y:.6g}" for x, y in corners) + "Z", color)

    def label(self, x: float, y: float, width: float, text: object, fill: str, size: float = 11.0) -> None:
        """Add a text in the middle of a box of this color, if it fits into `width`."""
        if text_width(text, size) + 2 <= width:
            self.text(x + width / 2, y, text, "middle", size, text_on(fill))

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> float:
        """Add colored squares with their names, in as many lines as needed; return the y below them."""
        left = x
        for color, name in entries:
            width = 17 + text_width(name) + 18
            if x > left and x + width > self.width:
                x, y = left, y + 20
            self.box(x, y - 10, 12, 12, color, rx=2)
            self.text(x + 17, y, name)
            x += width
        self.grow(y + 14)
        return y + 20

    def svg(self) -> str:
        """Return the picture as text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" class="picture" '
            f'role="img" aria-label="{clean(self.title)}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
        )
        rules = (
            f".picture .fill-{name}{{fill:{dark}}}.picture .stroke-{name}{{stroke:{dark}}}"
            for name, (_, dark) in _THEMES.items()
        )
        style = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
        paper = f'<rect width="{self.width:g}" height="{self.height:g}" rx="6"{_paint({"fill": PAPER})}/>'
        return "\n".join([head, f"<title>{clean(self.title)}</title>", style, paper, *self._parts, "</svg>"]) + "\n"

    def _add(self, name: str, place: str, attributes: dict[str, object], tip: str = "") -> None:
        end = f"><title>{clean(tip)}</title></{name}>" if tip else "/>"
        self._parts.append(f"<{name} {place}{_paint(attributes)}{end}")


def _paint(attributes: dict[str, object]) -> str:
    """Format attributes; those in a color of the theme also get the class by which a dark page changes them."""
    classes, texts = [], []
    for name, value in attributes.items():
        if isinstance(value, str) and value in _THEMES:
            classes.append(f"{name}-{value}")
            value = _THEMES[value][0]
        texts.append(f' {name.replace("_", "-")}="{clean(value)}"')
    return (f' class="{" ".join(classes)}"' if classes else "") + "".join(texts)
