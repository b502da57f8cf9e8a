"""RankPool runs one job after the other, also after ranks that raise, die or sleep."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from moe_trainer.verification.rank_pool import RankPool, RankPoolError


def total(rank, n, start):
    value = torch.tensor(float(start + rank))
    if n > 1:
        dist.all_reduce(value)
    return value.item()


def misbehave(rank, n, how):
    if rank == 1:
        if how == "raise":
            raise KeyError("lost")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def process_id(rank, n):
    return os.getpid()


def test_one_pool_runs_groups_of_any_size():
    with RankPool(4) as pool:
        assert [pool.run(total, n, 10) for n in (4, 1, 2, 3, 4)] == [46.0, 10.0, 21.0, 33.0, 46.0]
        assert pool.run_each(total, [(1,), (2,), (3,)]) == [1.0, 2.0, 3.0]
        assert pool.run(process_id, 1) == pool.run(process_id, 2), "the ranks are reused"
        with pytest.raises(ValueError, match="5 ranks requested from a pool of 4"):
            pool.run(total, 5, 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "KeyError: 'lost'"),
        ("die", "died with exit code 7"),
        ("sleep", "did not answer within the time limit"),
    ],
)
def test_failed_rank_is_named_and_the_next_job_runs(how, message):
    with RankPool(3, timeout_s=8.0) as pool:
        began = time.monotonic()
        with pytest.raises(RankPoolError) as error:
            pool.run(misbehave, 3, how)
        assert message in error.value.by_rank[1] and time.monotonic() - began < 50
        assert pool.run(total, 3, 0) == 3.0


def test_no_process_is_left():
    with RankPool(2) as pool:
        pid = pool.run(process_id, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
