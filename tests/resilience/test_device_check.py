"""The device check: no line without a fault, and a line for a wrong or slow GEMM and a wrong collective."""

from dataclasses import replace

import pytest
import torch
from commands import run
from harness import run_ranks
from training.tiny import MOCK, TINY

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.resilience import device_check
from moe_trainer.resilience.device_check import DeviceReport, check_devices, find_problems, run_gemm_check

GOOD = DeviceReport("node1", "H100", 1.0, (7, 7, 7), (), 100.0)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (GOOD, None),
        (replace(GOOD, seconds=1.09), None),
        (
            replace(GOOD, seconds=1.5, host="node2"),
            "rank 2 (node2, H100): GEMM takes 1.50 times as long as on the others",
        ),
        (replace(GOOD, hashes=(7, 8, 7)), "rank 2 (node1, H100) gives different results for the same GEMM"),
        (
            replace(GOOD, hashes=(8, 8, 8)),
            "rank 2 (node1, H100): GEMM result differs from that of 3 other ranks with the same device model",
        ),
        (replace(GOOD, wrong=("all_to_all",)), "rank 2 (node1, H100): all_to_all gave a wrong result"),
        (
            replace(GOOD, device="A100", hashes=(8, 8, 8), seconds=2.0),
            None,
        ),  # other device models have other results and speeds
    ],
)
def test_device_check_reports_every_fault(odd, message):
    assert find_problems([GOOD, GOOD, odd, GOOD]) == ([] if message is None else [f"device check: {message}"])


def test_gemm_check_is_repeatable_and_keeps_the_random_state():
    size, seconds, hashes = run_gemm_check(torch.device("cpu"))
    assert len(set(hashes)) == 1 and seconds > 0.0
    state = torch.get_rng_state()
    assert run_gemm_check(torch.device("cpu"))[2] == hashes
    assert torch.equal(torch.get_rng_state(), state)


def check_with_broken_broadcast(rank, n):
    """Rank 1 receives a wrong value in a broadcast; all ranks complete the check."""
    ps = ParallelState.create(n, rank)
    if rank == 1:
        broadcast = collectives.broadcast
        collectives.broadcast = lambda *args, **kwargs: broadcast(*args, **kwargs) + 1.0
    device_check.MAX_TIME_RATIO = 1e9  # this machine may be busy
    return check_devices(ps, torch.device("cpu"))


def test_all_ranks_report_the_rank_with_a_broken_collective():
    first, second = run_ranks(check_with_broken_broadcast, 2)
    assert first == second and len(first) == 2
    assert (
        first[0].startswith("device check: GEMMs at ")
        and "(median of 2 ranks), an all-reduce of 8 MB over all ranks at " in first[0]
    )
    assert first[1].startswith("device check: rank 1 (") and first[1].endswith(", cpu): broadcast gave a wrong result")


def test_gpu_sniff_test_runs_at_its_interval(tmp_path):
    done = run([*TINY, *MOCK, "--train-iters", "5", "--gpu-sniff-test-interval", "2"], tmp_path, 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("device check: GEMMs")]
    assert [line.rpartition(", after ")[2] for line in lines] == [f"{count} iterations" for count in (0, 2, 4)]
