"""Rank arithmetic: hand values of Megatron's orders, and properties of every folding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trainer.parallel.grid import make_layout

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
SIZES = st.sampled_from((1, 2, 3, 4))


def test_default_order_by_hand():
    layout = make_layout(16, tp=2, pp=2, ep=4)
    assert layout.groups("tp")[:2] == ((0, 1), (2, 3))
    assert layout.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert layout.groups("pp")[:2] == ((0, 8), (1, 9))
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert layout.groups("tp", "pp")[0] == (0, 1, 8, 9)


def test_pipeline_before_data_order_by_hand():
    layout = make_layout(8, tp=2, pp=2, etp=2, order="tp-cp-ep-pp-dp")
    assert layout.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("edp") == layout.groups("dp")


def test_context_parallel_folds_under_experts():
    layout = make_layout(8, tp=1, cp=2, ep=8)
    assert layout.groups("ep") == (tuple(range(8)),)
    assert layout.groups("cp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("dp", "cp") == (tuple(range(8)),)
    assert layout.size("edp") == 1 and layout.size("dp") == 4


@given(tp=SIZES, cp=SIZES, pp=SIZES, ep=SIZES, etp=SIZES, extra=SIZES, order=st.sampled_from(ORDERS))
def test_every_folding_partitions_the_world(tp, cp, pp, ep, etp, extra, order):
    world = tp * cp * pp * ep * etp * extra
    try:
        layout = make_layout(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
    except ValueError as error:
        assert order == ORDERS[1] and "pipelines would differ" in str(error)
        return
    sides = (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))
    for axes in sides:
        assert world == layout.size(axes[0]) * layout.size(axes[1]) * layout.size(axes[2]) * layout.size(axes[3])
        for mask in range(1, 16):
            chosen = [axis for bit, axis in enumerate(axes) if mask >> bit & 1]
            if chosen == ["pp"] and axes is sides[1]:
                continue
            groups = layout.groups(*chosen)
            size = 1
            for axis in chosen:
                size *= layout.size(axis)
            assert all(len(group) == size and list(group) == sorted(group) for group in groups)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
    # a tensor group and a data group of the same rank meet in that rank only
    position = {rank: index for index, group in enumerate(layout.groups("tp")) for rank in group}
    for group in layout.groups("dp"):
        assert len({position[rank] for rank in group}) == len(group)
    # the two sides agree where the pipeline cuts the world
    assert layout.dense.groups("pp") == layout.expert.groups("pp")


def test_coordinates_invert_the_order():
    grid = make_layout(24, tp=2, cp=3, pp=2).dense
    seen = {tuple(grid.coordinates(rank).values()) for rank in range(24)}
    assert len(seen) == 24
    assert grid.coordinates(0) == {"tp": 0, "cp": 0, "ep": 0, "dp": 0, "pp": 0}
    assert grid.coordinates(23) == {"tp": 1, "cp": 2, "ep": 0, "dp": 1, "pp": 1}


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"tp": 3}, "not divisible by tp"),
        ({"ep": 16}, "not divisible by etp"),
        ({"pp": 0}, "pp must be at least 1"),
        ({"order": "tp-cp-dp-pp", "ep": 2}, "lacks ep"),
        ({"order": "tp-tp-ep-dp-pp"}, "at most once"),
        ({"order": "tp-cp-ep-pp-dp", "pp": 2, "ep": 2}, "pipelines would differ"),
    ],
)
def test_impossible_sizes_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make_layout(8, **sizes)
