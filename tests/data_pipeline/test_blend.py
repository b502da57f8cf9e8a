"""Blend indices against the greedy rule step by step; the forms of a blend on the command line."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arguments.blend import parse_blend, read_blend_file, read_split_blends_file
from moe_trainer.data import blend
from moe_trainer.data.blend import (
    BlendOrder,
    build_blend_index,
    build_exhaustive_index,
    normalize,
)


def greedy(weights, size, limits=None):
    """The greedy rule as it is defined, in plain Python floats."""
    counts = [0] * len(weights)
    picks, inside = [], []
    for k in range(size):
        lags = [w * max(k, 1.0) - c for w, c in zip(weights, counts)]
        open_ = [d for d in range(len(weights)) if limits is None or counts[d] < limits[d]]
        pick = max(open_, key=lambda d: (lags[d], -d))
        picks.append(pick)
        inside.append(counts[pick])
        counts[pick] += 1
    return picks, inside


@pytest.fixture
def always_use_lockstep(monkeypatch):
    monkeypatch.setattr(blend, "_PLAIN_LOOP_BELOW", 0)


WEIGHTS = [
    [0.3, 0.7],
    [5, 1, 2],
    [1] * 7,
    [0.999, 0.0005, 0.0005],
    [100, 50, 3, 1, 0.1, 0.01],
    [1, 0, 3],
    list(np.random.default_rng(0).pareto(1, 12) + 0.001),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: f"{len(w)}_of_{w[0]:.3g}")
def test_lockstep_blend_equals_greedy_rule(always_use_lockstep, weights):
    weights = normalize(weights)
    picks, inside = greedy(weights, 12_000)
    got = build_blend_index(weights, 12_000)
    assert got[0].tolist() == picks and got[1].tolist() == inside
    assert got[0].dtype == np.int16 and got[1].dtype == np.int64


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.001, 100), min_size=1, max_size=6), size=st.integers(0, 300))
def test_plain_loop_blend_equals_greedy_rule(weights, size):
    weights = normalize(weights)
    got = build_blend_index(weights, size)
    assert (got[0].tolist(), got[1].tolist()) == greedy(weights, size)


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: f"{len(w)}_of_{w[0]:.3g}")
def test_an_order_without_end_equals_greedy_rule(monkeypatch, weights):
    monkeypatch.setattr(blend, "_ORDER_BLOCK", 100)
    expected = list(zip(*greedy(normalize(weights), 1500)))
    order, resumed = BlendOrder(weights), BlendOrder(weights)
    assert [order.find(index) for index in range(0, 1500, 7)] == expected[::7]
    assert [order.find(index) for index in (1499, 1398, 3, 250)] == [expected[index] for index in (1499, 1398, 3, 250)]
    order.find(705)
    assert order.state()[0] == sum(order.state()[1:]) == 700
    resumed.load_state(json.loads(json.dumps(order.state())))
    assert [resumed.find(index) for index in (*range(1000, 1100), 9)] == [*expected[1000:1100], expected[9]]


def test_the_samples_of_a_microbatch_may_lie_in_two_blocks(monkeypatch):
    monkeypatch.setattr(blend, "_ORDER_BLOCK", 10)
    order, begins = BlendOrder([1, 3]), []
    plain_loop = blend._plain_loop
    monkeypatch.setattr(blend, "_plain_loop", lambda *args: begins.append(args[3]) or plain_loop(*args))
    for index in (17, 18, 19, 20, 21, 18, 21, 22):
        order.find(index)
    assert begins == [10, 20]


def test_an_order_without_end_reads_a_state_of_any_length():
    order = BlendOrder([1, 3])
    order.load_state([4_000_000_000, 1_000_000_000, 3_000_000_000])
    assert [order.find(4_000_000_000 + k) for k in range(4)] == [
        (d, 1_000_000_000 * (3 if d else 1) + n) for d, n in ((0, 0), (1, 0), (1, 1), (1, 2))
    ]


@pytest.mark.parametrize("sizes", [[276, 298], [4000, 1, 3000], [5, 0, 7], [2500, 2500, 2500, 2500], [9]])
def test_exhaustive_blend_equals_greedy_rule(always_use_lockstep, sizes):
    picks, inside = build_exhaustive_index(sizes)
    expected = greedy([size / sum(sizes) for size in sizes], sum(sizes), sizes)
    assert (picks.tolist(), inside.tolist()) == expected
    assert np.bincount(picks, minlength=len(sizes)).tolist() == sizes


def test_blend_spellings_are_parsed(tmp_path):
    assert parse_blend(["a"]) == (("a",), None)
    assert parse_blend(["0.3", "a", "7", "b"]) == (("a", "b"), (0.3, 7.0))
    assert parse_blend(["a", "b"]) == (("a", "b"), None)
    assert parse_blend(["a", "b", "c"]) == (("a", "b", "c"), None)
    assert parse_blend(["1.0 /data/a_text_document"]) == (("/data/a_text_document",), (1.0,))
    (tmp_path / "with blank.idx").touch()
    assert parse_blend([str(tmp_path / "with blank")]) == ((str(tmp_path / "with blank"),), None)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no data prefix"), (["0.5", "a", "x", "b"], '"x" is given where a weight'), (["-1", "a"], "non-negative")],
)
def test_invalid_blends_are_rejected(words, message):
    with pytest.raises(ValueError, match=f"--data-path.*{message}"):
        parse_blend(words)


def test_blend_files(tmp_path):
    words = tmp_path / "blend.txt"
    words.write_text("0.3 a\n0.7 b\n")
    assert read_blend_file(str(words)) == (("a", "b"), (0.3, 0.7))
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": "c d", "test": None}))
    assert read_split_blends_file(str(splits)) == ((("a", "b"), (1.0, 2.0)), (("c", "d"), None), None)
    splits.write_text("{")
    with pytest.raises(ValueError, match="splits.json: not JSON"):
        read_split_blends_file(str(splits))
    splits.write_text("[]")
    with pytest.raises(ValueError, match="needed an object"):
        read_split_blends_file(str(splits))
    with pytest.raises(ValueError, match="--data-args-path .*absent"):
        read_blend_file(str(tmp_path / "absent"))
    words.write_text("1 a\n2 b\0")
    with pytest.raises(ValueError, match=r"--data-args-path .*blend.txt: 'b.x00' has a zero byte"):
        read_blend_file(str(words))
    splits.write_text(json.dumps({"train": ["a\ud800"]}))
    with pytest.raises(ValueError, match=r"--per-split-data-args-path .*splits.json, train: 'a.ud800' has a zero byte"):
        read_split_blends_file(str(splits))
