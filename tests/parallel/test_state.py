"""Process groups on real ranks: membership, and communication with the right ranks."""

import pytest
import torch
from harness import run_ranks

from moe_trainer.parallel import collectives
from moe_trainer.parallel.grid import make_layout
from moe_trainer.parallel.state import ParallelState, close_groups


def test_single_needs_no_process_group():
    ps = ParallelState.single()
    for group in ps.groups.values():
        assert (group.size, group.rank, group.handle) == (1, 0, None)
    assert ps.is_last_stage


def test_create_on_one_rank_needs_no_process_group():
    ps = ParallelState.create(1, 0)
    assert ps == ParallelState.single()


def _sum_of_ranks(rank, n, sizes):
    """On every group: all-reduce this rank's number, expect the sum of the group's ranks."""
    ps = ParallelState.create(n, rank, **sizes)
    for name, group in ps.groups.items():
        assert group.ranks[group.rank] == rank and len(group.ranks) == group.size
        assert (group.handle is None) == (group.size == 1)
        x = collectives.all_reduce(torch.tensor([float(rank)]), group)
        assert x.item() == sum(group.ranks), (name, group, x)
    return {name: group.ranks for name, group in ps.groups.items()}


def test_groups_of_a_folded_layout():
    sizes = {"tp": 2, "pp": 2, "ep": 2}
    by_rank = run_ranks(_sum_of_ranks, 8, sizes)
    layout = make_layout(8, **sizes)
    for rank, groups in enumerate(by_rank):
        assert groups["ep"] in layout.groups("ep") and rank in groups["ep"]
        assert groups["dp_cp"] in layout.groups("dp", "cp")
        assert groups["embedding"] == groups["pp"]


def test_groups_of_dynamic_context_parallelism():
    """Consecutive ranks of dp x cp; with their tensor ranks for statistics."""
    by_rank = run_ranks(_sum_of_ranks, 8, {"tp": 2, "cp": 2, "dynamic_cp_sizes": (1, 2, 4)})
    for rank, groups in enumerate(by_rank):
        tensor_rank, first_of_pair = rank % 2, rank // 4 * 4
        assert groups["dynamic_cp_1"] == (rank,) and groups["dynamic_tp_cp_1"] == groups["tp"]
        assert groups["dynamic_cp_2"] == groups["cp"] == (first_of_pair + tensor_rank, first_of_pair + tensor_rank + 2)
        assert groups["dynamic_cp_4"] == groups["dp_cp"] and groups["dynamic_tp_cp_4"] == tuple(range(8))
        assert groups["dynamic_tp_cp_2"] == groups["tp_cp"] == tuple(range(first_of_pair, first_of_pair + 4))


def test_uneven_membership_does_not_hang():
    """Ranks belong to different numbers of groups larger than one: middle stages have no embedding group."""
    by_rank = run_ranks(_sum_of_ranks, 3, {"pp": 3})
    assert [groups["embedding"] for groups in by_rank] == [(0, 2), (1,), (0, 2)]


def _shared_handles(rank, n):
    ps = ParallelState.create(n, rank)
    return ps.dp.handle is ps.dp_cp.handle is ps.edp.handle, ps.dp.handle is ps.tp_dp_cp.handle


def test_gradient_groups_share_a_communicator_without_statistics():
    assert run_ranks(_shared_handles, 2) == [(True, False)] * 2


def _context_levels(rank, n, levels):
    ps = ParallelState.create(n, rank, tp=2, cp=4, cp_levels=levels)
    return ps.cp.ranks, ps.cp_a2a.ranks, ps.cp_p2p.ranks, ps.cp.handle is ps.cp_p2p.handle


def test_hierarchical_context_groups_inner_and_outer_ranks():
    flat, two = run_ranks(_context_levels, 8, None)[2], run_ranks(_context_levels, 8, (2, 2))[2]
    assert flat == ((0, 2, 4, 6), (2,), (0, 2, 4, 6), True)
    assert two == ((0, 2, 4, 6), (0, 2), (2, 6), False)


def test_hierarchical_sizes_must_multiply_to_cp():
    with pytest.raises(ValueError, match="2 \\* 2 are not cp = 1"):
        ParallelState.create(1, 0, cp_levels=(2, 2))


def _find_embedding_ranks(rank, n, stages):
    group = ParallelState.create(n, rank, pp=4, embedding_stages=stages).embedding
    return group.ranks, group.rank, group.handle is None


def test_ranks_of_embedding_groups():
    assert [ranks for ranks, _, _ in run_ranks(_find_embedding_ranks, 8, (0, 2, 3))] == [
        (0, 4, 6),
        (1, 5, 7),
        (2,),
        (3,),
        (0, 4, 6),
        (1, 5, 7),
        (0, 4, 6),
        (1, 5, 7),
    ]
    assert run_ranks(_find_embedding_ranks, 4, (0,)) == [((rank,), 0, True) for rank in range(4)]


def _close_groups(rank, n):
    import torch.distributed as dist

    close_groups(ParallelState.create(n, rank, tp=2))
    closed = not dist.is_initialized()
    # the harness ends with a separate barrier
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return closed


def test_groups_are_closed_on_all_ranks():
    close_groups(ParallelState.single())
    assert run_ranks(_close_groups, 2) == [True, True]
