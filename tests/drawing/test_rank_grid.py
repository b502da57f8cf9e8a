"""Ranks over nodes: which links groups cross, and that every rank is drawn once in each panel."""

import re

import pytest
from drawing.reading import SVG, assert_texts_are_apart, root, texts

from moe_trainer.drawing.rank_grid import Axis, count_links, describe_links, rank_grid


def strided(num_ranks: int, stride: int, size: int) -> list[tuple[int, ...]]:
    return [
        tuple(range(start + offset, start + offset + stride * size, stride))
        for start in range(0, num_ranks, stride * size)
        for offset in range(stride)
    ]


@pytest.mark.parametrize(
    "stride, size, links, expected",
    [
        (1, 8, "ring", (0, 16)),
        (1, 16, "ring", (2, 16)),  # 7-8 and 15-0
        (4, 4, "ring", (8, 16)),
        (8, 2, "chain", (8, 8)),
        (8, 2, "ring", (8, 8)),  # a ring of two has one link
        (1, 16, "all", (64, 120)),
        (1, 1, "ring", (0, 0)),
    ],
)
def test_links_between_nodes_are_counted(stride, size, links, expected):
    axis = Axis("a", strided(16, stride, size), links)
    assert count_links(axis, 8) == expected
    assert (describe_links(axis, 8) == "inside a node") == (expected[0] == 0)


def test_description_of_links():
    assert describe_links(Axis("ep", strided(64, 1, 32), "all"), 8) == (
        "over 4 nodes; between nodes: 77% of the pairs of ranks"
    )


@pytest.mark.parametrize("num_ranks, ranks_per_node", [(16, 8), (256, 8), (256, 72), (1024, 8), (4096, 8), (6, 8)])
def test_every_rank_is_drawn_once_in_a_panel(num_ranks, ranks_per_node):
    size = 2 if num_ranks < 16 else 16
    axes = [
        Axis(f"first ({size})", strided(num_ranks, 1, size), "all"),
        Axis("second (2)", strided(num_ranks, num_ranks // 2, 2), "ring"),
    ]
    svg = rank_grid("ranks", "heading", num_ranks, ranks_per_node, axes)
    paths = [path for path in root(svg).findall(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    squares = [re.findall(r"M([\d.]+) ([\d.]+)h", path.get("d")) for path in paths]
    assert [len(each) for each in squares] == [size] * (num_ranks // size) + [2] * (num_ranks // 2)
    places = [square for each in squares for square in each]
    assert len(set(places)) == 2 * num_ranks, "no rank covers another"
    width, height = (float(each) for each in root(svg).get("viewBox").split()[2:])
    assert all(float(x) < width and float(y) < height for x, y in places)
    assert paths[0].findtext(f"{SVG}title").startswith("group 0: ranks 0, 1")
    assert f"first ({size}): {num_ranks // size:,} group" + "s" * (num_ranks > size) in [
        text.text for text in texts(svg)
    ]
    assert_texts_are_apart(svg)
