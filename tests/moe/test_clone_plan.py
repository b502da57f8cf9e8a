"""The plan for clones of hot experts: even loads, few clones, spans that cover every row once."""

import random

import pytest

from moe_trainer.moe.clone_plan import Clone, plan_clones, rank_loads


def test_one_hot_expert_is_cloned_to_all_other_ranks():
    assert plan_clones([90, 2, 4, 4], 4, 1) == (Clone(1, 0, 0, 67, 23), Clone(2, 0, 0, 46, 21), Clone(3, 0, 0, 25, 21))
    assert rank_loads([90, 2, 4, 4], 4, plan_clones([90, 2, 4, 4], 4, 1)) == [25, 25, 25, 25]


def test_an_even_load_needs_no_clone():
    assert plan_clones([5, 5, 7, 3], 2, 4) == ()
    assert plan_clones([5, 5, 5, 6], 4, 4) == (), "a remainder cannot be spread further"
    assert plan_clones([0, 0, 0, 0], 2, 4) == ()
    assert plan_clones([8, 0], 1, 4) == () and plan_clones([8, 0], 2, 0) == ()


def test_the_most_used_experts_are_cloned_into_the_tightest_fit():
    # home 0 has 20 too many: 14 of expert 0 cover them with one clone; rank 1 has space for 15, rank 2 for 5
    counts = [35, 5, 3, 2, 8, 7]
    clones = plan_clones(counts, 3, 2)
    assert clones == (Clone(1, 0, 0, 15, 15), Clone(2, 0, 0, 30, 5)) or rank_loads(counts, 3, clones) == [20, 20, 20]
    assert {clone.expert for clone in clones} == {0}
    # two spills, each has a space of its size: one clone each
    clones = plan_clones([16, 13, 7, 4], 4, 3)
    assert [(clone.rank, clone.expert, clone.num_tokens) for clone in clones] == [(2, 1, 3), (3, 0, 6)]


def test_slots_limit_clones_and_largest_loads_come_first():
    counts = [30, 20, 0, 0]
    clones = plan_clones(counts, 2, 1)
    assert [(clone.expert, clone.num_tokens) for clone in clones] == [(0, 25)]
    assert rank_loads([20, 20, 0, 0], 2, plan_clones([20, 20, 0, 0], 2, 1)) == [20, 20]
    assert rank_loads([9, 8, 8, 0, 0, 0], 2, plan_clones([9, 8, 8, 0, 0, 0], 2, 1)) == [16, 9], (
        "one slot takes one expert's rows"
    )
    assert rank_loads([9, 8, 8, 0, 0, 0], 2, plan_clones([9, 8, 8, 0, 0, 0], 2, 2)) == [13, 12]


def test_experts_must_be_spread_evenly():
    with pytest.raises(ValueError, match="5 experts cannot be divided evenly over 2 ranks"):
        plan_clones([1] * 5, 2, 1)


@pytest.mark.parametrize("seed", range(200))
def test_plans_cover_rows_once_without_raising_the_maximum_load(seed):
    dice = random.Random(seed)
    ranks, local, slots = dice.choice((1, 2, 4, 8)), dice.randint(1, 4), dice.randint(0, 4)
    counts = [dice.choice((0, dice.randint(0, 9), dice.randint(0, 200))) for _ in range(ranks * local)]
    clones = plan_clones(counts, ranks, slots)
    before, after = rank_loads(counts, ranks), rank_loads(counts, ranks, clones)
    average = -(-sum(counts) // ranks)
    assert sum(after) == sum(counts) and all(new <= max(old, average) for old, new in zip(before, after))
    assert clones == tuple(sorted(clones))
    for rank in range(ranks):
        here = [clone for clone in clones if clone.rank == rank]
        assert len(here) <= slots and [clone.slot for clone in here] == list(range(len(here)))
        assert all(clone.expert // local != rank for clone in here), "no rank clones its own experts"
    for expert, count in enumerate(counts):
        spans = sorted((clone.first, clone.first + clone.num_tokens) for clone in clones if clone.expert == expert)
        if spans:
            assert spans[-1][1] == count and all(rows > 0 for rows in (stop - start for start, stop in spans))
            assert all(stop == start for (_, stop), (start, _) in zip(spans, spans[1:])), (
                "spans lie side by side behind home's"
            )
    if slots >= ranks * local:
        assert max(after) <= average, "with slots enough every rank gets down to the average"
        surplus = sum(max(0, load - average) for load in before)
        givers, takers = sum(load > average for load in before), sum(load < average for load in before)
        assert sum(clone.num_tokens for clone in clones) == surplus
        assert len(clones) <= sum(count > 0 for count in counts) + takers and (givers > 0) == bool(clones)
