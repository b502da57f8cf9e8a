"""A rank that dies, stops, sleeps, raises or diverges: every peer exits in time and reports which rank waited for what.

The ranks run pretrain_moe.py with torchrun's variables, as forked processes (quick) or as commands.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import environment, rank_variables
from training.tiny import MOCK, TINY

from tests.resilience import fault_process as script

TIMEOUT = 3
JOB = [
    *TINY,
    *MOCK,
    "--global-batch-size",
    "8",
    "--train-iters",
    "100000",
    "--distributed-timeout-seconds-after-init",
    str(TIMEOUT),
]
EXPERTS = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


class Forked:
    """A rank forked from this process, with the interface of Popen."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str]):
        self._process = multiprocessing.get_context("fork").Process(target=self._main, args=(argv, folder, env))
        self._process.start()

    def _main(self, argv, folder, env):
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}{env['RANK']}", os.O_WRONLY | os.O_CREAT), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(env)
        os.chdir(folder)
        torch.set_num_threads(1)
        try:
            script.main(*argv[:3], argv[3:])
        finally:
            sys.stderr.flush()

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()

    @property
    def returncode(self):
        return self._process.exitcode


def command(argv: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """Start a rank as a command."""
    rank = env["RANK"]
    return subprocess.Popen(
        [sys.executable, script.__file__, *argv],
        cwd=folder,
        env=environment(**env),
        stdout=(folder / f"out{rank}").open("w"),
        stderr=(folder / f"err{rank}").open("w"),
    )


def wait_for_peers(processes: list, victim: int, timeout_s: float = 240.0) -> list[float]:
    """Wait until every rank but the victim has exited. Return when each did, in seconds after the first."""
    deadline, ended = time.monotonic() + timeout_s, {}
    others = [rank for rank in range(len(processes)) if rank != victim]
    try:
        while len(ended) < len(others) and time.monotonic() < deadline:
            for rank in others:
                if rank not in ended and processes[rank].poll() is not None:
                    ended[rank] = time.monotonic()
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(ended) == len(others), f"ranks {sorted(set(others) - set(ended))} are still running"
    return [moment - min(ended.values()) for moment in ended.values()]


def inject_fault(
    folder: Path, kind: str, victim: int, n: int = 2, start=Forked, layout: str = EXPERTS
) -> dict[int, str]:
    """Return what each peer of the victim prints."""
    with rank_variables(n) as ranks:
        processes = [start([kind, str(victim), "9", *JOB, *layout.split()], folder, variables) for variables in ranks]
        spread = wait_for_peers(processes, victim)
    printed = {}
    for rank, process in enumerate(processes):
        text = (folder / f"err{rank}").read_text()
        if rank != victim:
            assert process.returncode == 3, text
            assert "Traceback" not in text, text
            printed[rank] = text[text.index(f"pretrain_moe.py: rank {rank}: ") :]
    # the last one follows the first within the timeout and the time to read the peers' statuses
    assert max(spread) < 3 * TIMEOUT + 10, spread
    return printed


@pytest.mark.parametrize("start", [Forked, pytest.param(command, marks=pytest.mark.slow)])
def test_killed_rank_is_reported_with_the_waiting_collective(tmp_path, start):
    printed = inject_fault(tmp_path, "kill", 1, start=start)
    assert (
        "all_to_all number" in printed[0]
        and "of group ep (ranks 0 1) in " in printed[0]
        and "dispatch/alltoall.py:" in printed[0]
    )
    assert "decoder.layers.0" in printed[0] and "iteration 3" in printed[0] and "microbatch" in printed[0]
    assert "rank 1: no heartbeat (killed, stopped, or node lost); last seen: " in printed[0]


def test_killed_rank_0_is_reported_as_a_lost_store(tmp_path):
    printed = inject_fault(tmp_path, "kill", 0)
    assert "of group ep (ranks 0 1) in " in printed[1]
    assert "lost connection to the rendezvous store (hosted by rank 0 or the launcher)" in printed[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_reported_as_a_timeout(tmp_path, victim):
    printed = inject_fault(tmp_path, "stop", victim)[1 - victim]
    assert "of group ep (ranks 0 1) in " in printed and "Timed out" in printed
    assert "no heartbeat" in printed or "store" in printed


def test_sleeping_rank_is_reported_with_its_code_location(tmp_path):
    printed = inject_fault(tmp_path, "sleep", 1)
    assert (
        "rank 1: running, not blocked in a collective: now in " in printed[0] and "forward (moe/layer.py:" in printed[0]
    )


@pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        (
            "--pipeline-model-parallel-size 2",
            r"receive from rank 1 .*of group pp \(ranks 0 1\)|send to rank 1 .*of group pp \(ranks 0 1\)",
        ),
        ("--tensor-model-parallel-size 2 --sequence-parallel", r"of group tp \(ranks 0 1\) in .*decoder\.layers\.0"),
        ("--use-torch-fsdp2", r"(all_gather|reduce_scatter|all_reduce) number \d+ of group dp_cp_inner \(ranks 0 1\)"),
    ],
)
def test_every_kind_of_communication_is_named_in_a_hang(tmp_path, layout, pattern):
    printed = inject_fault(tmp_path, "sleep", 1, layout=layout)
    assert re.search(pattern, printed[0]), printed[0]
    assert "rank 1: running, not blocked in a collective: now in " in printed[0]


@pytest.mark.parametrize("start", [Forked, pytest.param(command, marks=pytest.mark.slow)])
def test_exception_of_a_rank_is_reported_by_its_peer(tmp_path, start):
    printed = inject_fault(tmp_path, "raise", 1, start=start)
    assert "rank 1: exited: KeyError: 'a mistake on one rank'" in printed[0]
    theirs = (tmp_path / "err1").read_text()
    assert theirs.count("Traceback (most recent call last)") == 1


def test_rank_in_another_collective_is_reported(tmp_path):
    printed = inject_fault(tmp_path, "diverge", 1)
    assert "all_to_all number" in printed[0]
    assert "barrier number" in printed[0] and "of group world" in printed[0]


def test_hang_also_ends_ranks_of_other_groups(tmp_path):
    printed = inject_fault(tmp_path, "sleep", 3, n=4)
    assert "group ep (ranks 2 3)" in printed[2]
    for rank in (0, 1, 2):
        assert "rank 3: running, not blocked in a collective" in printed[rank], printed[rank]
