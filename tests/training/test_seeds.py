"""Seeds of the ranks: dropout differs between data-parallel ranks, everything else only between pipeline stages."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import run_ranks

from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.training.initialize import set_seeds

ARGS = SimpleNamespace(training=SimpleNamespace(seed=1234))


def _draw(args=ARGS, **ranks):
    groups = {name: Group(name, (0, 1), rank, 2) for name, rank in ranks.items()}
    set_seeds(args, replace(ParallelState.single(), **groups))
    return random.random(), np.random.rand(), torch.rand(8).tolist()


def test_data_parallel_ranks_differ_only_in_torch_seed():
    first, second = (_draw(dp=rank, dp_cp=rank) for rank in range(2))
    assert first[:2] == second[:2] and not set(first[2]) & set(second[2])
    assert _draw(dp=1, dp_cp=1) == second


def test_pipeline_stages_and_seeds_have_different_random_numbers():
    drawn = [_draw(), _draw(pp=1), _draw(SimpleNamespace(training=SimpleNamespace(seed=1235)))]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert all(a != b for a, b in zip(drawn[one], drawn[other]))


def _draw_on_rank(rank, n, sizes):
    ps = ParallelState.create(n, rank, **sizes)
    set_seeds(ARGS, ps)
    return (ps.dp.rank, ps.cp.rank), (random.random(), np.random.rand(), tuple(torch.rand(8).tolist()))


@pytest.mark.parametrize("sizes", [{"tp": 2, "cp": 2}, {"cp": 2}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
def test_dp_and_cp_ranks_have_own_random_streams_and_tp_ranks_share(sizes):
    drawn = run_ranks(_draw_on_rank, 4, sizes)
    by_place = dict(drawn)
    assert all(numbers == by_place[place] for place, numbers in drawn)
    assert len({numbers[2] for numbers in by_place.values()}) == len(by_place) > 1
