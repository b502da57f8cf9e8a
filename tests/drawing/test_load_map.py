"""The map of loads: colors by distance from the mean, every cell once, tips with the busiest experts."""

import re

from drawing.reading import SVG, assert_texts_are_apart, boxes, root

from moe_trainer.drawing.load_map import Panel, busiest_text, load_color, load_map
from moe_trainer.drawing.svg import BLUE, LIGHT_BLUE, LIGHT_ORANGE, ORANGE, PALE, RED, SLATE


def test_color_tells_the_distance_from_the_mean():
    loads = (0, 4, 5, 7, 8, 10, 12, 13, 20, 40)
    colors = (SLATE, BLUE, LIGHT_BLUE, LIGHT_BLUE, PALE, PALE, PALE, LIGHT_ORANGE, ORANGE, RED)
    assert tuple(load_color(load, 10) for load in loads) == colors


def test_every_expert_of_every_layer_is_one_cell():
    picture = load_map("t", "h", [1, 2], [Panel("", [[0, 2, 2, 4], [1, 1, 1, 1]])])
    paths = [(path.get("fill"), path.get("class"), path.get("d")) for path in root(picture).iter(f"{SVG}path")]
    cells = {color: len(re.findall("M", places)) for color, _, places in paths}
    assert sum(cells.values()) == 8 and cells[SLATE] == 1 and cells[ORANGE] == 1
    assert [box.tip for box in boxes(picture) if box.tip] == [
        "layer 1: busiest experts 3 (50.0%), 1 (25.0%), 2 (25.0%)",
        "layer 2: busiest experts 0 (25.0%), 1 (25.0%), 2 (25.0%)",
    ]


def test_panels_stand_side_by_side():
    """Of any numbers of experts, under names that are wider than they are."""
    panels = [Panel(f"a long name of panel {number}", [[1] * number] * 3) for number in (1, 2, 8)]
    picture = load_map("t", "h", [1, 2, 5], panels)
    assert_texts_are_apart(picture)
    rows = [box for box in boxes(picture) if box.tip]
    assert [row.tip.partition(":")[0] for row in rows[::3]] == [f"{panel.name}, layer 1" for panel in panels]
    assert all(one.x + one.width < other.x for one, other in zip(rows[::3], rows[3::3]))
    assert [round(row.width / rows[0].width, 2) for row in rows[::3]] == [1, 2, 8]


def test_map_of_a_large_model_is_small():
    picture = load_map("t", "h", range(58), [Panel("", [[*range(layer, layer + 256)] for layer in range(58)])])
    assert len(picture) < 500_000


def test_layer_without_tokens():
    assert busiest_text([0, 0]) == "0 (0.0%), 1 (0.0%)"
    assert load_color(0, 0) == SLATE
