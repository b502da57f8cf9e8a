"""Speed against memory: the Pareto front, the places of points, labels, and mappings outside of the scales."""

import random

import pytest
from drawing.reading import SVG, root, text_box, texts

from moe_trainer.drawing.axes import overlap
from moe_trainer.drawing.speed_memory import Candidate, pareto_front, speed_memory

KINDS = {"best": "in the table", "other": "fits too", "own": "your own", "published": "published"}


def draw(candidates):
    return speed_memory("t", "h", candidates, 80.0, ("GiB", "tokens/s"), KINDS)


def test_front_is_what_nothing_beats():
    rng = random.Random(7)
    candidates = [Candidate(rng.randint(0, 30), rng.randint(0, 30), "", str(number)) for number in range(200)]
    front = pareto_front(candidates)
    beaten = {
        one
        for one in candidates
        for other in candidates
        if other.memory <= one.memory
        and other.speed >= one.speed
        and (other.memory, other.speed) != (one.memory, one.speed)
    }
    places = {(each.memory, each.speed) for each in candidates} - {(each.memory, each.speed) for each in beaten}
    assert [(each.memory, each.speed) for each in front] == sorted(places)
    assert pareto_front([]) == []


def test_points_are_at_their_numbers_and_the_front_has_an_edge():
    candidates = [
        Candidate(20, 100, "1: EP8", "one"), Candidate(40, 200, "2: EP4", "two"), Candidate(60, 150, "3: TP2", "three"),
    ]  # fmt: skip
    svg = draw(candidates)
    by_tip = {each.findtext(f"{SVG}title"): each for each in root(svg).iter(f"{SVG}circle")}
    x, y = ({tip: float(each.get(name)) for tip, each in by_tip.items()} for name in ("cx", "cy"))
    assert x["two"] - x["one"] == pytest.approx(x["three"] - x["two"], rel=1e-3)
    assert y["one"] - y["three"] == pytest.approx(y["three"] - y["two"], rel=1e-3) and y["two"] < y["one"]
    assert {tip for tip, each in by_tip.items() if each.get("stroke")} == {"one", "two"}
    assert {"1: EP8", "2: EP4", "3: TP2"} <= {text.text for text in texts(svg)}


def test_mapping_that_does_not_fit_is_on_no_front_and_at_the_edge():
    svg = draw(
        [Candidate(20, 100, "1", "one"), Candidate(30, 120, "2", "two"), Candidate(300, 999, "own", "own", "own")]
    )
    own = next(each for each in root(svg).iter(f"{SVG}circle") if each.findtext(f"{SVG}title") == "own")
    assert not own.get("stroke") and float(own.get("cx")) <= 920 and float(own.get("cy")) >= 66
    assert "own (outside: 999 at 300.0 GiB)" in [text.text for text in texts(svg)]


def test_labels_of_many_points_do_not_overlap():
    rng = random.Random(1)
    candidates = [
        Candidate(60 + rng.random(), 1000 + rng.random(), f"{number}: TP2 CP2 PP8 VPP2 EP16", str(number))
        for number in range(30)
    ]
    shown = [text_box(text) for text in texts(draw(candidates)) if ": TP2" in text.text]
    assert len(shown) > 10
    assert not any(overlap(a, b) for number, a in enumerate(shown) for b in shown[number + 1 :])


def test_one_or_equal_points_are_drawn():
    for candidates in (
        [Candidate(10, 5, "a", "a")],
        [Candidate(0, 0, "a", "a")] * 2,
        [Candidate(99, 5, "a", "a", "own")],
    ):
        assert "nan" not in draw(candidates) and "inf" not in draw(candidates)
