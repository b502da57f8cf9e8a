"""Collectives against their definition, for one rank and for several."""

import pytest
import torch
from harness import RanksFailedError, run_ranks

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
    inside[4 * rank : 4 * rank + 4] = mine
    got = collectives.all_gather_flat(inside, inside[4 * rank : 4 * rank + 4], group)
    assert torch.equal(got, every.flatten())
    full = torch.arange(4.0 * n) * (rank + 1)
    part = torch.empty(4)
    got = _wait(collectives.reduce_scatter_flat(part, full, group, async_op=async_op), part, async_op)
    assert torch.equal(got, torch.arange(4.0 * n)[4 * rank : 4 * rank + 4] * sum(range(1, n + 1)))
    aliased = full.clone()
    collectives.reduce_scatter_flat(aliased[4 * rank : 4 * rank + 4], aliased, group)
    assert torch.equal(aliased[4 * rank : 4 * rank + 4], got)
    x = mine.clone()
    assert torch.equal(collectives.broadcast(x, group, src=n - 1), every[n - 1])
    collectives.barrier(group)
    assert collectives.broadcast_object({"rank": rank}, group, src=1) == {"rank": 1}
    assert collectives.all_gather_object((rank,), group) == [(other,) for other in range(n)]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_equal_their_definition(n, async_op):
    run_ranks(_all, n, async_op)


def _rows(rank, n, sizes):
    """The differentiable collectives: values, and gradients by the transposed collective."""
    group = ParallelState.create(n, rank).world
    x = (torch.arange(sizes[rank] * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    every = [torch.arange(size * 2.0).view(-1, 2) + 100 * other for other, size in enumerate(sizes)]
    out = collectives.all_gather_rows(x, sizes, group)
    assert torch.equal(out, torch.cat(every))
    (out * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, sum(range(1, n + 1))))

    full_tensor = torch.cat(every).requires_grad_()
    part = collectives.reduce_scatter_rows(full_tensor, sizes, group)
    assert torch.equal(part, every[rank] * n)
    (part * (rank + 1)).sum().backward()
    weights = torch.cat([torch.full((size, 2), other + 1.0) for other, size in enumerate(sizes)])
    assert torch.equal(full_tensor.grad, weights)

    # member i gets i rows from everybody
    send, receive = list(range(n)), [rank] * n
    y = (torch.arange(sum(send) * 1.0) + 100 * rank).requires_grad_()
    z = y.detach().to(torch.float64).unsqueeze(1).requires_grad_()
    got, twin = collectives.all_to_all(group, send, receive, y, z)
    first = sum(send[:rank])
    assert got.tolist() == [100.0 * other + first + row for other in range(n) for row in range(rank)]
    assert torch.equal(twin.squeeze(1), got.double())
    (got.sum() * (rank + 1) + twin.sum()).backward()
    assert y.grad.tolist() == [other + 1.0 for other in range(n) for _ in range(other)]
    assert torch.equal(z.grad, torch.ones_like(z))

    counts = torch.arange(2 * n) + 10 * rank
    got = collectives.all_to_all_flat(torch.empty_like(counts), counts, group)
    assert got.tolist() == [10 * other + 2 * rank + i for other in range(n) for i in range(2)]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0), (0, 0), (1, 4, 2)])
def test_collectives_of_rows_and_their_gradients(sizes):
    run_ranks(_rows, len(sizes), sizes)


def test_collectives_in_a_group_of_one_return_the_input():
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


def test_harness_reports_every_traceback():
    with pytest.raises(RanksFailedError, match="rank one is unwell"):
        run_ranks(_raise_on_one, 2)


def test_harness_kills_a_stuck_rank():
    with pytest.raises(RanksFailedError, match="rank 1: did not finish"):
        run_ranks(_hang_on_one, 2, timeout=5.0)
