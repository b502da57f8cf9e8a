"""Packs for groups of ranks of several sizes: every rank has one in every microbatch, long sequences get many ranks."""

import random

import pytest

from arguments.parallel import dynamic_cp_sizes
from moe_trainer.data import group_packing
from moe_trainer.data.group_packing import GroupSizes, pack_into_groups, slowest_load
from moe_trainer.data.packing import Pack, PackFormat, PackingPlan, PackingPlanner
from moe_trainer.errors import UserError


def square(length):
    return float(length * length)


def flops(length):
    """As many in attention as elsewhere at 8192 tokens."""
    return length * (8192.0 + length)


def square_and_linear(length):
    """As many in attention as elsewhere at 128 tokens."""
    return length * (128.0 + length)


def pad(length, size):
    multiple = 2 * size if size > 1 else 1
    return -(-length // multiple) * multiple


def shape(microbatches):
    return [[(group.size, group.positions) for group in groups] for groups in microbatches]


def make_limits(sizes, capacity, max_sequences=None):
    return GroupSizes(sizes, capacity, pad, lambda length, size: square(length), max_sequences)


def test_sizes_are_powers_of_two_that_divide_the_ranks_and_all_ranks():
    assert dynamic_cp_sizes(8, 1) == (1, 2, 4, 8) and dynamic_cp_sizes(8, 4) == (4, 8)
    assert (
        dynamic_cp_sizes(12, 1) == (1, 2, 4, 12) and dynamic_cp_sizes(6, 3) == (6,) and dynamic_cp_sizes(2, 1) == (1, 2)
    )


def test_a_long_sequence_gets_many_ranks_while_others_run_alone():
    limits = make_limits((1, 2, 4), 24)
    assert shape(pack_into_groups([32, 22, 22], limits)) == [[(2, [0]), (1, [1]), (1, [2])]], (
        "two ranks have memory for the first"
    )
    limits = make_limits((1, 2, 4), 32)
    assert [(group.size, group.load) for group in pack_into_groups([16, *[4] * 16], limits)[0]] == [
        (2, 128.0),
        (1, 128.0),
        (1, 128.0),
    ], "one rank has memory for the first, but would take longer than the others"
    limits = make_limits((1, 2, 4), 16)
    assert shape(pack_into_groups([64, 2, 2, 2, 2], limits)) == [[(4, [0])], [(1, [4]), (1, [3]), (1, [2]), (1, [1])]]


def test_free_ranks_enlarge_the_most_expensive_groups():
    assert shape(pack_into_groups([8, 8], make_limits((1, 2, 4), 16))) == [[(2, [0]), (2, [1])]]
    assert shape(pack_into_groups([8], make_limits((1, 2, 4), 16))) == [[(4, [0])]]
    assert shape(pack_into_groups([11, 8, 8], make_limits((1, 2, 4), 16))) == [[(2, [0]), (1, [1]), (1, [2])]]


def test_groups_merge_where_free_ranks_are_too_few():
    """Two groups of four leave four of twelve ranks, which make no group with either of them."""
    limits = make_limits((4, 12), 16)
    assert shape(pack_into_groups([8, 8], limits)) == [[(12, [0, 1])]]


@pytest.mark.parametrize("capacity, max_sequences", [(16, 1), (2, None)])
def test_groups_that_would_be_too_full_do_not_merge(capacity, max_sequences):
    """Too many sequences, or too many tokens with the padding of twelve ranks, 24 for each of 8."""
    limits = make_limits((4, 12), capacity, max_sequences)
    assert sorted(shape(pack_into_groups([8, 8], limits))) == [[(12, [0])], [(12, [1])]]


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed):
    rng = random.Random(seed)
    num_ranks, multiple = rng.choice([2, 4, 6, 8, 12]), rng.choice([1, 1, 2])
    sizes = dynamic_cp_sizes(num_ranks, rng.choice([1, 1, 2]))
    capacity = rng.choice([32, 48])
    limits = make_limits(sizes, capacity, rng.choice([None, None, 4]))
    longest = num_ranks * capacity if seed % 2 else capacity
    lengths = [min(longest, int(rng.lognormvariate(2.5, 1.3)) + 1) for _ in range(rng.randint(40, 120))]
    plan = pack_into_groups(lengths, limits, multiple, seed % 3 == 0)
    assert len(plan) % multiple == 0
    assert sorted(each for groups in plan for group in groups for each in group.positions) == list(range(len(lengths)))
    for groups in plan:
        assert sum(group.size for group in groups) == num_ranks
        start = 0
        for group in groups:
            assert group.size in sizes and start % group.size == 0 and group.positions
            assert sum(pad(lengths[each], group.size) for each in group.positions) <= capacity * group.size
            assert limits.max_sequences is None or len(group.positions) <= limits.max_sequences
            assert group.cost == pytest.approx(sum(square(lengths[each]) for each in group.positions))
            start += group.size
    assert shape(plan) == shape(pack_into_groups(lengths, limits, multiple, seed % 3 == 0)), (
        "every rank makes the same plan"
    )


def test_padding_at_the_end_is_that_of_all_ranks_of_a_group():
    fmt = PackFormat(64, tail_multiple=8, cp_sizes=(1, 2, 4))
    for cp_size in (1, 2, 4):
        packed = fmt.pack([5, 16], cp_size)
        assert packed.num_tokens % (8 * cp_size) == 0 and packed.cp_size == cp_size


def one_f_one_b(costs, num_stages):
    """Time of a 1F1B pipeline whose backward passes take twice the time of forward ones."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, len(costs))
        order = [("F", each) for each in range(ahead)]
        for each in range(len(costs) - ahead):
            order += [("F", ahead + each), ("B", each)]
        orders.append(order + [("B", each) for each in range(len(costs) - ahead, len(costs))])
    ends, clocks, done = {}, [0.0] * num_stages, [0] * num_stages
    while any(count < len(order) for count, order in zip(done, orders)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, each = order[done[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                needed = (kind, each, source) if 0 <= source < num_stages else ("F", each, stage)
                if needed not in ends and not (kind == "F" and stage == 0):
                    break
                begin = max(clocks[stage], ends.get(needed, 0.0))
                clocks[stage] = ends[kind, each, stage] = begin + costs[each] * (1 if kind == "F" else 2)
                done[stage] += 1
    return max(clocks)


def test_pipelines_begin_and_end_with_cheap_microbatches():
    lengths, limits = [32, 28, 24, 20, 16, 12, 8, 4] * 2, make_limits((2,), 16)
    falling, serpentine = (
        [slowest_load(groups) for groups in pack_into_groups(lengths, limits, 1, is_pipelined)]
        for is_pipelined in (False, True)
    )
    assert falling == sorted(serpentine, reverse=True)
    peak = serpentine.index(max(serpentine))
    assert serpentine[: peak + 1] == sorted(serpentine[: peak + 1]) and 0 < peak < len(serpentine) - 1
    assert serpentine[peak:] == sorted(serpentine[peak:], reverse=True)
    for num_stages in (2, 4):
        assert one_f_one_b(serpentine, num_stages) < one_f_one_b(falling, num_stages)


def test_every_second_microbatch_has_its_groups_in_reverse():
    plan = pack_into_groups([16, 12, 8, 4, 16, 12, 8, 4], make_limits((1, 2, 4), 16, 1))
    loads = [[group.load for group in groups] for groups in plan]
    assert len(loads) == 2 and loads[0] == sorted(loads[0], reverse=True) and loads[1] == sorted(loads[1])


def test_impossible_plans():
    limits = make_limits((1, 2, 4), 16)
    with pytest.raises(ValueError, match="a sequence of 65 tokens exceeds 4 x 16 tokens"):
        pack_into_groups([65], limits)
    with pytest.raises(ValueError, match="3 sequences do not fill 4 microbatches"):
        pack_into_groups([16, 16, 16], limits, 4)


def make_planner(lengths, sizes, **more):
    return PackingPlanner(lengths.__getitem__, square, PackFormat(64, cp_sizes=sizes), 1, 2, **more)


def test_plans_of_a_data_set():
    rng = random.Random(1)
    lengths = [min(512, int(rng.lognormvariate(3, 1.5)) + 1) for _ in range(256)]
    planner = make_planner(lengths, (1, 2, 4, 8))
    plan = planner.plan(0, 128)
    ranks = [list(planner.order(256, 0, lambda consumed: 128, rank)) for rank in range(8)]
    assert len({len(packs) for packs in ranks}) == 1
    for microbatch, packs in enumerate(plan.packs):
        seen = [ranks[rank][microbatch] for rank in range(8)]
        assert seen == [pack for pack in packs for _ in range(pack.cp_size)], "ranks of a group have the same pack"
        for pack in packs:
            packed = planner.format.pack([lengths[sample] for sample in pack], pack.cp_size)
            assert packed.cp_size == pack.cp_size and packed.num_tokens <= 64 * pack.cp_size
            assert all(n % (2 * pack.cp_size if pack.cp_size > 1 else 1) == 0 for n in packed.padded_lengths)
    assert {sample for packs in plan.packs for pack in packs for sample in pack} == set(range(128))
    later = [list(planner.order(256, 128, lambda consumed: 128, rank)) for rank in range(8)]
    assert [packs[plan.num_microbatches :] for packs in ranks] == later, "a resumed run continues with the same packs"
    summary = planner.summarize(plan)
    assert summary.tokens == sum(lengths[:128]) and summary.cost == sum(map(square, lengths[:128]))
    assert summary.fill == summary.tokens / (64 * 8 * plan.num_microbatches)
    assert sum(size * count for size, count in summary.cp_sizes.items()) == 8 * plan.num_microbatches
    assert summary.metrics["groups of 1"] == summary.cp_sizes[1] and len(summary.cp_sizes) > 2


def test_summary_takes_the_cost_per_rank():
    plan = PackingPlan(((Pack((0,), 2), Pack((1,), 1), Pack((2,), 1)),), {0: 8, 1: 4, 2: 2})
    summary = make_planner([8, 4, 2], (1, 2, 4)).summarize(plan)
    assert summary.imbalance == 32 * 4 / (64 + 16 + 4) and summary.cp_sizes == {1: 2, 2: 1}
    assert [plan.pack(0, rank).samples for rank in range(4)] == [(0,), (0,), (1,), (2,)]


def test_the_exchange_of_keys_keeps_groups_small(monkeypatch):
    """Without it all sequences in the group of all ranks would balance best."""
    lengths = [min(512, int(random.Random(number).lognormvariate(4, 1)) + 2) for number in range(256)]
    mean = {}
    for cost in (0.0, group_packing.KEY_EXCHANGE_COST):
        monkeypatch.setattr(group_packing, "KEY_EXCHANGE_COST", cost)
        planner = PackingPlanner(lengths.__getitem__, square_and_linear, PackFormat(256, cp_sizes=(1, 2, 4, 8)), 1, 8)
        summary = planner.summarize(planner.plan(0, 256))
        mean[cost] = 8 * summary.num_microbatches / sum(summary.cp_sizes.values())
    assert mean[0.0] > 1.2 * mean[group_packing.KEY_EXCHANGE_COST], mean


def test_dynamic_plans_waste_less_than_fixed_groups():
    """Lengths with a long tail: fixed groups are as large as the longest sequence needs."""
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6, 1.4)) + 2) for _ in range(512)]
    fixed = PackingPlanner(lengths.__getitem__, flops, PackFormat(8192, True, 16), 1, 2)
    dynamic = PackingPlanner(lengths.__getitem__, flops, PackFormat(1024, cp_sizes=(1, 2, 4, 8, 16)), 1, 2)
    of_fixed, of_dynamic = (planner.summarize(planner.plan(0, 512)) for planner in (fixed, dynamic))
    assert of_dynamic.imbalance < of_fixed.imbalance * 1.05 and of_dynamic.imbalance < 1.15
    assert sum(of_dynamic.cp_sizes.values()) > 3 * of_dynamic.num_microbatches, "most groups are much smaller than 16"
    assert of_dynamic.fill > 0.95


def test_too_few_samples_are_an_error_that_names_the_flag():
    with pytest.raises(
        UserError, match="3 sequences do not fill 4 microbatches times groups of 4.*--global-batch-size"
    ):
        PackingPlanner(lambda sample: 4, square, PackFormat(8, cp_sizes=(1, 2)), 1, 1, 4).plan(0, 3)
