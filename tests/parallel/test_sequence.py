"""The zigzag cut of a sequence over context-parallel ranks."""

import pytest
import torch

from moe_trainer.parallel.sequence import SequenceShard, sequential_to_zigzag, zigzag_to_sequential
from moe_trainer.parallel.state import Group, ParallelState
from tests.harness import run_ranks


def shard(rank: int, size: int) -> SequenceShard:
    return SequenceShard(Group("cp", tuple(range(size)), rank, size))


def test_one_rank_keeps_the_full_sequence():
    x = torch.randn(2, 6)
    one = SequenceShard(Group.single("cp"))
    assert one.local(x, 1) is x and one.full(x, 1) is x
    assert one.positions(5).tolist() == [0, 1, 2, 3, 4]


def test_rank_holds_an_early_and_a_late_chunk():
    assert shard(0, 2).positions(8).tolist() == [0, 1, 6, 7]
    assert shard(1, 2).positions(8).tolist() == [2, 3, 4, 5]
    x = torch.arange(16).view(2, 8)
    assert shard(1, 2).local(x, 1).tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(shard(1, 2).local(x.t(), 0), shard(1, 2).local(x, 1).t())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_out_all_positions_and_causal_work(size):
    positions = [shard(rank, size).positions(12 * size) for rank in range(size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(12 * size))
    assert len({int((p + 1).sum()) for p in positions}) == 1, "every rank attends to the same number of keys"
    x = torch.cat(positions)
    assert zigzag_to_sequential(x, size).tolist() == list(range(12 * size))
    assert torch.equal(sequential_to_zigzag(zigzag_to_sequential(x, size), size), x)


def test_length_must_give_every_rank_two_equal_chunks():
    with pytest.raises(ValueError, match="multiple of 4"):
        shard(0, 2).positions(10)


def _round_trip(rank, size):
    ps = ParallelState.create(size, rank, cp=size)
    x = torch.arange((4 * size) ** 3).view([4 * size] * 3)
    mine = SequenceShard(ps.cp)
    return [torch.equal(mine.full(mine.local(x, dim), dim), x) for dim in range(3)]


@pytest.mark.parametrize("size", [2, 4])
def test_full_restores_the_sequence_order(size):
    assert run_ranks(_round_trip, size) == [[True] * 3] * size
