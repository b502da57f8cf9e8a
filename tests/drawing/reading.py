"""Reads a picture back: its boxes, texts and tips, from the SVG text."""

from dataclasses import dataclass
from xml.etree import ElementTree

from moe_trainer.drawing.axes import overlap
from moe_trainer.drawing.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Box:
    """A rectangle of a picture."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str


@dataclass(frozen=True)
class Text:
    """A line of text of a picture: where it starts in x, and its base line."""

    x: float
    y: float
    text: str
    anchor: str
    size: float


def root(svg: str) -> ElementTree.Element:
    """Parse a picture, which must be valid XML."""
    return ElementTree.fromstring(svg)


def boxes(svg: str) -> list[Box]:
    return [
        Box(
            *(float(each.get(name)) for name in ("x", "y", "width", "height")),
            each.get("fill"),
            each.findtext(f"{SVG}title") or "",
        )
        for each in root(svg).iter(f"{SVG}rect")
        if each.get("x") is not None
    ]


def texts(svg: str) -> list[Text]:
    return [
        Text(
            float(each.get("x")), float(each.get("y")), each.text, each.get("text-anchor"), float(each.get("font-size"))
        )
        for each in root(svg).iter(f"{SVG}text")
    ]


def text_box(text: Text) -> tuple[float, float, float, float]:
    """Return left, top, right, bottom of a text."""
    width = text_width(text.text, text.size)
    left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    return left, text.y - text.size * 0.8, left + width, text.y + text.size * 0.2


def assert_texts_are_apart(svg: str) -> None:
    """No two texts overlap, and all are inside the picture."""
    found = texts(svg)
    _, _, width, height = (float(number) for number in root(svg).get("viewBox").split())
    for number, text in enumerate(found):
        left, top, right, bottom = text_box(text)
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
        for other in found[number + 1 :]:
            assert not overlap(text_box(text), text_box(other)), (text, other)
