"""Plans of packed global batches: every sample once, as many packs on every rank, in Megatron-LM's order."""

import itertools
import random
from collections import Counter

import pytest

from moe_trainer.data.packing import PackFormat, PackingPlanner, pack_by_cost, pack_in_order, sample_order
from moe_trainer.errors import UserError
from moe_trainer.ops.packed_sequences import PackedSequences


def square(length):
    return float(length * length)


def test_packs_are_filled_in_order():
    assert pack_in_order([4, 4, 3, 8, 2], 8, 1) == [[0, 1], [2], [3], [4]]
    assert pack_in_order([4, 4, 3, 2, 2, 2], 8, 1, max_sequences=2) == [[0, 1], [2, 3], [4, 5]]


def test_last_sequences_of_last_packs_fill_the_missing_packs():
    """As dp_balanced: from the last pack backwards, one sequence at a time, while a pack has two."""
    assert pack_in_order([2, 2, 2, 2, 8], 8, 4) == [[0, 1], [4], [3], [2]]
    assert pack_in_order([1] * 4, 8, 4) == [[0], [3], [2], [1]]
    with pytest.raises(ValueError, match="3 sequences do not fill 4 packs"):
        pack_in_order([1] * 3, 8, 4)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans(seed):
    rng = random.Random(seed)
    dp_size, group_size, micro = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 2])
    fmt = PackFormat(rng.choice([32, 50]), seed % 2 == 1, rng.choice([1, 4]), max_sequences=rng.choice([None, 3]))
    lengths = [rng.randint(1, 32) for _ in range(200)]
    planner = PackingPlanner(lengths.__getitem__, square, fmt, micro, dp_size, group_size)
    size = 12 * micro * dp_size
    plan = planner.plan(24, size)
    assert plan.num_microbatches % group_size == 0 and {len(packs) for packs in plan.packs} == {dp_size}
    assert sorted(sample for packs in plan.packs for pack in packs for sample in pack) == list(range(24, 24 + size))
    for pack in (pack for packs in plan.packs for pack in packs):
        packed = fmt.pack([lengths[sample] for sample in pack])
        assert (
            pack
            and packed.num_tokens <= fmt.capacity
            and all(n % fmt.sequence_multiple == 0 for n in packed.padded_lengths)
        )
        assert fmt.max_sequences is None or len(pack) <= fmt.max_sequences
    ranks = [list(planner.order(200, 24, lambda consumed: size, rank)) for rank in range(dp_size)]
    assert [pack for packs in zip(*ranks) for pack in packs][: plan.num_microbatches * dp_size] == [
        pack for packs in plan.packs for pack in packs
    ]
    later = [list(planner.order(200, 24 + size, lambda consumed: size, rank)) for rank in range(dp_size)]
    assert [packs[plan.num_microbatches :] for packs in ranks] == later, "a resumed run continues with the same packs"


def test_packs_of_similar_cost():
    lengths = [8, 1, 1, 6, 2, 5, 4, 3]
    packs = pack_by_cost(lengths, list(map(square, lengths)), 16, 2)
    assert packs == [[0, 1, 4, 7], [2, 3, 5, 6]]
    assert [sum(square(lengths[position]) for position in pack) for pack in packs] == [78, 78]
    assert pack_by_cost([2, 9, 2], list(map(square, [2, 9, 2])), 16, 2) == [[1], [0, 2]], "the most expensive first"
    assert pack_by_cost([2, 2, 2, 2], [1.0] * 4, 16, 1, max_sequences=2) == [[0, 2], [1, 3]]
    assert pack_by_cost([4, 4, 4], [1.0] * 3, 4, 1) == [[0], [1], [2]], "one sequence fills a pack"
    assert len(pack_by_cost([3, 3, 3, 3], [1.0] * 4, 5, 1)) == 4, "no two fit, though the tokens fill three packs"
    with pytest.raises(ValueError, match="3 sequences do not fill 4 packs"):
        pack_by_cost([1] * 3, [1.0] * 3, 8, 4)


def test_cost_balanced_plans_waste_less_than_plans_in_order():
    rng = random.Random(0)
    lengths = [min(4096, int(rng.lognormvariate(6, 1.2)) + 2) for _ in range(512)]
    imbalance = {}
    for balances in (False, True):
        planner = PackingPlanner(lengths.__getitem__, square, PackFormat(8192, balances), 1, 8)
        summary = planner.summarize(planner.plan(0, 512))
        imbalance[balances] = summary.imbalance
        assert summary.tokens == sum(lengths) and summary.cost == sum(map(square, lengths))
        assert summary.fill == pytest.approx(sum(lengths) / (summary.num_microbatches * 8 * 8192))
    assert imbalance[False] > 1.5 and 1.0 <= imbalance[True] < 1.1, imbalance


@pytest.mark.parametrize("num_samples", [64, 512])  # a few microbatches, or many
def test_cost_balanced_plans_give_all_ranks_the_same_work(num_samples):
    rng = random.Random(0)
    lengths = [min(32768, int(rng.lognormvariate(7, 1.6)) + 2) for _ in range(40 * num_samples)]
    planner = PackingPlanner(lengths.__getitem__, square, PackFormat(32768, True), 1, 8)
    totals = [0.0] * 8
    for first in range(0, len(lengths), num_samples):
        for packs in planner.plan(first, num_samples).packs:
            for rank, pack in enumerate(packs):
                totals[rank] += sum(square(lengths[sample]) for sample in pack)
    assert max(totals) < 1.1 * sum(totals) / 8, totals


def test_samples_are_ordered_by_data_rank():
    assert sample_order(8, 8, 2, 2) == [8, 9, 12, 13, 10, 11, 14, 15]


def test_order_ends_with_the_last_full_batch():
    planner = PackingPlanner(lambda sample: 4, square, PackFormat(8), 1, 1)
    samples = [pack.samples for pack in planner.order(7, 0, lambda consumed: 3, 0)]
    assert samples == [(0, 1), (2,), (3, 4), (5,)]
    samples = [pack.samples for pack in planner.order(6, 0, lambda consumed: min(4, 6 - consumed), 0)]
    assert samples == [(0, 1), (2, 3), (4, 5)]
    assert planner.count_microbatches(0, 6, 4) == 3


def test_lengths_are_read_once_however_far_the_loader_is_ahead():
    """Plans of one microbatch each, 32 of them before the first is used."""
    reads = Counter()

    def get_length(sample):
        reads[sample] += 1
        return 4

    planner = PackingPlanner(get_length, square, PackFormat(8), 1, 1, read_ahead=32)
    ahead, used = (planner.order(200, 0, lambda consumed: 2, 0) for _ in range(2))
    for _ in itertools.islice(ahead, 32):
        pass
    for _ in zip(used, ahead):
        pass
    assert set(reads.values()) == {1}


def test_sequences_beyond_the_capacity_have_no_plan():
    with pytest.raises(ValueError, match="2 sequences do not fill"):
        pack_by_cost([9, 2], [81.0, 4.0], 8, 1)


def test_too_few_samples_are_an_error_that_names_the_flag():
    planner = PackingPlanner(lambda sample: 4, square, PackFormat(8), 1, 2, 4)
    with pytest.raises(UserError, match="4 sequences do not fill 8 packs.*2 data-parallel ranks.*--global-batch-size"):
        planner.plan(0, 4)


def test_padding_of_a_pack_is_a_sequence_or_part_of_the_last():
    packed = PackedSequences.of([3, 5], 4)
    assert packed.padded_lengths == (4, 8) and packed.cu_seqlens == (0, 3, 8) and packed.cu_seqlens_padded == (0, 4, 12)
    assert packed.pad_tail(16) == PackedSequences((3, 5, 0), (4, 8, 4))
    assert packed.pad_tail(16, extend_last=True) == PackedSequences((3, 5), (4, 12))
    assert packed.pad_tail(6) is packed
    assert packed.is_valid().tolist() == [True] * 3 + [False] + [True] * 5 + [False] * 3
    assert packed.positions().tolist() == [*range(4), *range(8)] and packed.ids().tolist() == [[0] * 4 + [1] * 8]
    assert PackFormat(16, False, 4, 16, max_sequences=3).max_samples == 2
    assert PackFormat(16, False, 4, 16, extend_last=True, max_sequences=3).max_samples == 3
