"""Ranks as a grid over nodes, one panel per parallel axis: ranks of one color form a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_trainer.drawing.svg import CATEGORIES, GREEN, ORANGE, PALE, Picture, text_width

_COLUMNS = 8
_MARGIN = 14


@dataclass(frozen=True)
class Axis:
    """A parallel axis.

    Attributes:
        name: of the axis, with its size.
        groups: that it divides the ranks into.
        links: whom a rank sends to: the next one in a ring, the neighbors in a chain, or all.
    """

    name: str
    groups: Sequence[Sequence[int]]
    links: Literal["ring", "chain", "all"]


def count_links(axis: Axis, ranks_per_node: int) -> tuple[int, int]:
    """Return the links between ranks of a group that connect two nodes, and all links, over all groups."""
    crossing = total = 0
    for group in axis.groups:
        if axis.links == "all":
            links = list(itertools.combinations(group, 2))
        else:
            links = list(itertools.pairwise(group))
            if axis.links == "ring" and len(group) > 2:
                links.append((group[-1], group[0]))
        total += len(links)
        crossing += sum(a // ranks_per_node != b // ranks_per_node for a, b in links)
    return crossing, total


def describe_links(axis: Axis, ranks_per_node: int) -> str:
    """Say which links the groups of an axis use."""
    crossing, total = count_links(axis, ranks_per_node)
    if not crossing:
        return "inside a node"
    nodes = sorted({len({rank // ranks_per_node for rank in group}) for group in axis.groups})
    spans = f"{nodes[0]}" if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    what = {"ring": "links of the rings", "chain": "links between stages", "all": "pairs of ranks"}[axis.links]
    return f"over {spans} nodes; between nodes: {crossing / total:.0%} of the {what}"


def rank_grid(
    title: str, heading: str, num_ranks: int, ranks_per_node: int, axes: Sequence[Axis], width: float = 1180
) -> str:
    """Draw one panel per axis.

    Args:
        title: for screen readers.
        heading: above the panels.
        num_ranks: of the job.
        ranks_per_node: consecutive ranks with fast links between them.
        axes: that have more than one rank.
        width: of the picture.
    """
    cell = next(size for most, size in ((64, 24), (256, 17), (2048, 8), (1 << 62, 5)) if num_ranks <= most)
    gap = 8 if cell > 8 else 4
    columns = min(_COLUMNS, ranks_per_node, num_ranks)
    rows_per_node = -(-min(ranks_per_node, num_ranks) // columns)
    node_width, node_height = columns * cell + 4, rows_per_node * cell + 4
    label = 12 if cell >= 8 else 0
    num_nodes = -(-num_ranks // ranks_per_node)
    names = [f"{axis.name}: {len(axis.groups):,} group{'s' if len(axis.groups) != 1 else ''}" for axis in axes]
    notes = [describe_links(axis, ranks_per_node) for axis in axes]
    aside = max([text_width(name, bold=True) for name in names] + [text_width(note, 11) + 18 for note in notes]) + 28
    is_small = num_nodes * (node_width + gap) <= width - aside
    left = aside if is_small else _MARGIN
    per_row = max(1, int((width - left) // (node_width + gap)))
    per_row = num_nodes if is_small else 1 << per_row.bit_length() - 1  # groups are powers of two, too
    pitch = node_height + label + 6
    picture, y = Picture(width, 60, title, heading), 44.0
    for axis, name, note in zip(axes, names, notes, strict=True):
        color = GREEN if note == "inside a node" else ORANGE
        picture.text(_MARGIN, y + 10, name, font_weight="bold")
        note_x, note_y = (_MARGIN, y + 27) if is_small else (_MARGIN + text_width(name, bold=True) + 20, y + 10)
        picture.circle(note_x + 5, note_y - 4, 5, color)
        picture.text(note_x + 16, note_y, note, size=11)
        top = y if is_small else y + 20
        corners = [
            (left + node % per_row * (node_width + gap), top + node // per_row * pitch + label)
            for node in range(num_nodes)
        ]
        boxes = (f"M{x:g} {node_top:g}h{node_width}v{node_height}h-{node_width}z" for x, node_top in corners)
        picture.path("".join(boxes), PALE)
        for node, (x, node_top) in enumerate(corners if label else ()):
            picture.text(x + 2, node_top - 3, node * ranks_per_node, size=9)
        for number, group in enumerate(axis.groups):
            _draw_group(picture, number, group, corners, ranks_per_node, columns, cell)
        y = top + (num_nodes - 1) // per_row * pitch + max(pitch, 36 if is_small else 0) + 10
    picture.text(
        _MARGIN, y + 8, f"Boxes are nodes of {ranks_per_node} ranks; the number above is the first rank.", size=11
    )
    picture.grow(y + 22)
    return picture.svg()


def _draw_group(
    picture: Picture,
    number: int,
    group: Sequence[int],
    corners: Sequence[tuple[float, float]],
    ranks_per_node: int,
    columns: int,
    cell: int,
) -> None:
    """Add the ranks of a group as one shape; with its number on each rank where there is space."""
    color, commands, labels = CATEGORIES[number % len(CATEGORIES)], [], []
    for rank in group:
        node, place = divmod(rank, ranks_per_node)
        x = corners[node][0] + 2 + place % columns * cell
        y = corners[node][1] + 2 + place // columns * cell
        size = cell - 1
        commands.append(f"M{x:g} {y:g}h{size}v{size}h-{size}z")
        labels.append((x, y))
    shown = f"{', '.join(map(str, group[:12]))}{', ...' if len(group) > 12 else ''}"
    picture.path("".join(commands), color, f"group {number}: ranks {shown}")
    if cell >= 17:
        for x, y in labels:
            picture.label(x, y + cell / 2 + 3, cell - 1, number, color, 10 if cell > 20 else 8)
