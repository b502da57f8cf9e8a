"""Collectives against their definition, for one rank and for several."""

import pytest
import torch
from harness import RanksFailed, run_ranks

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import Group, ParallelState


def _wait(result, out, async_op):
    if async_op:
        result.wait()
        return out
    return result


def _all(rank, n, async_op):
    group = ParallelState.create(n, rank).world
    mine = torch.arange(4.0) + rank
    every = torch.stack([torch.arange(4.0) + other for other in range(n)])
    for op, expected in (("sum", every.sum(0)), ("max", every.amax(0)), ("min", every.amin(0)), ("avg", every.mean(0))):
        x = mine.clone()
        assert torch.equal(_wait(collectives.all_reduce(x, group, op, async_op=async_op), x, async_op), expected)
    out = torch.empty(4 * n)
    got = _wait(collectives.all_gather_flat(out, mine, group, async_op=async_op), out, async_op)
    assert torch.equal(got, every.flatten())
    inside = torch.zeros(4 * n)
    inside[4 * rank:4 * rank + 4] = mine
    got = collectives.all_gather_flat(inside, inside[4 * rank:4 * rank + 4], group)
    assert torch.equal(got, every.flatten())
    full = torch.arange(4.0 * n) * (rank + 1)
    part = torch.empty(4)
    got = _wait(collectives.reduce_scatter_flat(part, full, group, async_op=async_op), part, async_op)
    assert torch.equal(got, torch.arange(4.0 * n)[4 * rank:4 * rank + 4] * sum(range(1, n + 1)))
    aliased = full.clone()
    collectives.reduce_scatter_flat(aliased[4 * rank:4 * rank + 4], aliased, group)
    assert torch.equal(aliased[4 * rank:4 * rank + 4], got)
    x = mine.clone()
    assert torch.equal(collectives.broadcast(x, group, src=n - 1), every[n - 1])
    collectives.barrier(group)
    assert collectives.broadcast_object({"rank": rank}, group, src=1) == {"rank": 1}
    assert collectives.all_gather_object((rank,), group) == [(other,) for other in range(n)]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_collectives(n, async_op):
    run_ranks(_all, n, async_op)


def test_a_group_of_one_returns_its_input():
    group = Group.single("dp")
    x = torch.arange(4.0)
    assert collectives.all_reduce(x, group) is x
    assert collectives.all_reduce(x, group, async_op=True).wait()
    assert torch.equal(collectives.all_gather_flat(torch.empty(4), x, group), x)
    assert torch.equal(collectives.reduce_scatter_flat(torch.empty(4), x, group), x)
    assert collectives.broadcast_object("a", group) == "a"
    assert collectives.all_gather_object(3, group) == [3]
    collectives.barrier(group)


def _raise_on_one(rank, n):
    if rank == 1:
        raise ValueError("rank one is unwell")
    return rank


def _hang_on_one(rank, n):
    if rank == 1:
        import time
        time.sleep(60)


def test_the_harness_reports_every_traceback():
    with pytest.raises(RanksFailed, match="rank one is unwell"):
        run_ranks(_raise_on_one, 2)


def test_the_harness_ends_a_stuck_rank():
    with pytest.raises(RanksFailed, match="rank 1: did not finish"):
        run_ranks(_hang_on_one, 2, timeout=2.0)
