"""The device check: silent where all is well, and a line for a wrong or slow product and a wrong collective."""

from dataclasses import replace

import pytest
import torch
from commands import run
from harness import run_ranks
from train.tiny import MOCK, TINY

from moe_trainer.guard import device_check
from moe_trainer.guard.device_check import Finding, check_devices, judge, try_products
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

GOOD = Finding("node1", "H100", 1.0, (7, 7, 7), (), 100.0)


@pytest.mark.parametrize(("odd", "told"), [
    (GOOD, None),
    (replace(GOOD, seconds=1.09), None),
    (replace(GOOD, seconds=1.5, host="node2"), "rank 2 (node2, H100) takes 1.50 times as long for a product as the others"),
    (replace(GOOD, hashes=(7, 8, 7)), "rank 2 (node1, H100) gives different results for one product"),
    (replace(GOOD, hashes=(8, 8, 8)), "rank 2 (node1, H100) gives another result for a product than 3 other ranks with such a device"),
    (replace(GOOD, wrong=("all_to_all",)), "rank 2 (node1, H100): all_to_all gave a wrong result"),
    (replace(GOOD, device="A100", hashes=(8, 8, 8), seconds=2.0), None),  # another device may round and hurry as it likes
])
def test_what_is_wrong_is_told(odd, told):
    assert judge([GOOD, GOOD, odd, GOOD]) == ([] if told is None else [f"device check: {told}"])


def test_a_product_comes_out_the_same():
    size, seconds, hashes = try_products(torch.device("cpu"))
    assert len(set(hashes)) == 1 and seconds > 0.0
    state = torch.get_rng_state()
    assert try_products(torch.device("cpu"))[2] == hashes
    assert torch.equal(torch.get_rng_state(), state)


def broken_collective(rank, n):
    """Rank 1 receives something else in a broadcast; nobody leaves before the others."""
    ps = ParallelState.create(n, rank)
    if rank == 1:
        broadcast = collectives.broadcast
        collectives.broadcast = lambda *args, **kwargs: broadcast(*args, **kwargs) + 1.0
    device_check.RATIO = 1e9  # this machine may be busy
    return check_devices(ps, torch.device("cpu"))


def test_every_rank_learns_whose_collective_is_broken():
    first, second = run_ranks(broken_collective, 2)
    assert first == second and len(first) == 2
    assert first[0].startswith("device check: products at ") and "(median of 2 ranks), an all-reduce of 8 MB over all at " in first[0]
    assert first[1].startswith("device check: rank 1 (") and first[1].endswith(", cpu): broadcast gave a wrong result")


def test_the_flag_checks_at_its_interval(tmp_path):
    done = run([*TINY, *MOCK, "--train-iters", "5", "--gpu-sniff-test-interval", "2"], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("device check: products")]
    assert [line.rpartition(", after ")[2] for line in lines] == [f"{count} iterations" for count in (0, 2, 4)]
