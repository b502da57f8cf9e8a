"""Point-to-point messages."""

import pytest
import torch
from harness import run_ranks

from moe_trainer.parallel.p2p import Receive, Send, exchange, irecv, isend
from moe_trainer.parallel.state import ParallelState


def send_around_ring(rank, n):
    group = ParallelState.create(n, rank, pp=n).pp
    x, batched, single = torch.full((3,), float(rank)), torch.empty(3), torch.empty(3)
    after, before = (rank + 1) % n, (rank - 1) % n
    exchange([Receive(batched, before), Send(x, after)], group).wait()
    works = [irecv(single, group, before), isend(x + 10, group, after)]
    for work in works:
        work.wait()
    return batched.tolist(), single.tolist()


@pytest.mark.parametrize("n", [2, 3])
def test_message_is_passed_around_the_ring(n):
    for rank, (batched, single) in enumerate(run_ranks(send_around_ring, n)):
        before = float((rank - 1) % n)
        assert batched == [before] * 3 and single == [before + 10] * 3


def send_in_subgroup(rank, n):
    group = ParallelState.create(n, rank, pp=2).pp  # ranks 0 2 and 1 3: members are numbered inside the group
    out = torch.empty(2)
    if group.rank == 0:
        exchange([Send(torch.tensor([1.0, rank]), 1), Send(torch.tensor([2.0, rank]), 1)], group).wait()
        return None
    second = torch.empty(2)
    exchange([Receive(out, 0), Receive(second, 0)], group).wait()
    assert exchange([], group).wait()
    return out.tolist(), second.tolist()


def test_subgroup_messages_arrive_in_the_order_sent():
    assert run_ranks(send_in_subgroup, 4) == [None, None, ([1.0, 0.0], [2.0, 0.0]), ([1.0, 1.0], [2.0, 1.0])]
