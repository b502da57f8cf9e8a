"""A model as a column of its layers, each part colored by how a comparison of it came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moe_trainer.drawing.svg import FAINT, GREEN, INK, ORANGE, PALE, RED, YELLOW, Picture, shorten, text_on, text_width

State = Literal["equal", "tie", "differs", "first", "unknown"]
_COLORS = MappingProxyType({"equal": GREEN, "tie": YELLOW, "differs": ORANGE, "first": RED})
_LABELS = MappingProxyType(
    {"equal": "equal", "tie": "near ties only", "differs": "differs", "first": "first difference"}
)
_MAX_TALL = 24


@dataclass(frozen=True)
class Part:
    """A part of a layer: its name, how its comparison came out, and details."""

    name: str
    state: State
    tip: str


@dataclass(frozen=True)
class Layer:
    """A row of the drawing.

    Attributes:
        name: of the layer.
        halves: its parts in each half of the drawing.
    """

    name: str
    halves: tuple[tuple[Part, ...], ...]


def model_column(title: str, heading: str, halves: Sequence[str], layers: Sequence[Layer], first: str) -> str:
    """Draw the layers from the input of the model down to its losses.

    Args:
        title: for screen readers.
        heading: above the drawing.
        halves: names of the halves.
        layers: from top to bottom.
        first: description of the first difference, below the layers.
    """
    pitch = 26 if len(layers) <= _MAX_TALL else 15
    left, gap, top = 24 + max(text_width(layer.name) for layer in layers), 24, 66
    width = (940 - left - 14 - gap * (len(halves) - 1)) / len(halves)
    picture = Picture(940, top + pitch * len(layers), title, heading)
    for half, name in enumerate(halves):
        picture.text(left + half * (width + gap), top - 10, name, font_weight="bold")
    mark = None
    for row, layer in enumerate(layers):
        y = top + row * pitch
        picture.text(14, y + pitch / 2 + 3, layer.name, size=12 if pitch > 20 else 10)
        for half, parts in enumerate(layer.halves):
            for number, part in enumerate(parts):
                size = width / len(parts)
                x = left + half * (width + gap) + number * size
                _draw_part(picture, part, x, y, size - 3, pitch - 3)
                if part.state == "first":
                    mark = (x, y, size - 3, pitch - 3)
    bottom = top + pitch * len(layers)
    if mark is not None:
        x, y, size, height = mark
        picture.box(x - 2, y - 2, size + 4, height + 4, "none", stroke=INK, stroke_width=2.5)
        picture.text(14, bottom + 18, f"first difference: {first}", fill=RED, font_weight="bold")
        bottom += 22
    states = {part.state for layer in layers for parts in layer.halves for part in parts}
    entries = [(color, _LABELS[state]) for state, color in _COLORS.items() if state in states]
    entries += [(PALE, "not compared, or equal as far as it is")] if "unknown" in states else []
    picture.legend(14, bottom + 22, entries)
    return picture.svg()


def _draw_part(picture: Picture, part: Part, x: float, y: float, width: float, height: float) -> None:
    color = _COLORS.get(part.state, PALE)
    edge = {"stroke": FAINT} if color == PALE else {}
    picture.box(x, y, width, height, color, part.tip, rx=2, **edge)
    size = 11 if height > 16 else 9
    text = shorten(part.name, width - 6, size)
    ink = INK if color == PALE else text_on(color)
    picture.text(x + width / 2, y + height / 2 + size * 0.36, text, "middle", size, ink)
