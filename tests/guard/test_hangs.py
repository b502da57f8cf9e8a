"""A rank that dies, stops, sleeps, raises or goes another way: every other rank ends in time, and says who waited where."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import environment, free_port
from train.tiny import MOCK, TINY

TIMEOUT = 3
EXPERTS = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--global-batch-size", "8",
           "--train-iters", "100000", "--distributed-timeout-seconds-after-init", str(TIMEOUT)]


def start(kind: str, victim: int, call: int, n: int, folder: Path, argv: list[str]) -> list[subprocess.Popen]:
    common = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = str(Path(__file__).with_name("mishap.py"))
    return [subprocess.Popen([sys.executable, script, kind, str(victim), str(call), *TINY, *MOCK, *EXPERTS, *argv], cwd=folder,
                             env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common),
                             stdout=(folder / f"out{rank}").open("w"), stderr=(folder / f"err{rank}").open("w"))
            for rank in range(n)]


def ends(processes: list[subprocess.Popen], victim: int, patience: float = 240.0) -> list[float]:
    """Wait until every rank but the victim has ended; returns when each did, in seconds since the first."""
    deadline, ended = time.monotonic() + patience, {}
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
    assert len(ended) == len(others), f"ranks {sorted(set(others) - set(ended))} are still there"
    return [moment - min(ended.values()) for moment in ended.values()]


def mishap(tmp_path, kind: str, victim: int, n: int = 2, call: int = 9, argv: list[str] = ()) -> dict[int, str]:
    """Let it happen; returns what each other rank said about it, checked for the site."""
    processes = start(kind, victim, call, n, tmp_path, list(argv))
    spread = ends(processes, victim)
    said = {}
    for rank, process in enumerate(processes):
        text = (tmp_path / f"err{rank}").read_text()
        if rank != victim:
            assert process.returncode == 3, text
            assert "Traceback" not in text, text
            said[rank] = text[text.index(f"pretrain_moe.py: rank {rank}: "):]
    # the last one follows the first within the timeout and what it takes to ask around
    assert max(spread) < 3 * TIMEOUT + 10, spread
    return said


def test_a_killed_rank(tmp_path):
    said = mishap(tmp_path, "kill", 1)
    assert "all_to_all number" in said[0] and "of group ep (ranks 0 1) in " in said[0] and "dispatch/alltoall.py:" in said[0]
    assert "decoder.layers.0" in said[0] and "iteration 3" in said[0] and "microbatch" in said[0]
    assert "rank 1: gives no sign of life (killed, stopped, or its node is gone); last seen: " in said[0]


def test_the_rank_that_keeps_the_store_is_killed(tmp_path):
    said = mishap(tmp_path, "kill", 0)
    assert "of group ep (ranks 0 1) in " in said[1]
    assert "the job's store (kept by rank 0, or by its launcher) is gone" in said[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank(tmp_path, victim):
    said = mishap(tmp_path, "stop", victim)[1 - victim]
    assert "of group ep (ranks 0 1) in " in said and "Timed out" in said
    assert "gives no sign of life" in said or "store" in said


def test_a_rank_that_sleeps(tmp_path):
    said = mishap(tmp_path, "sleep", 1)
    assert "rank 1: is alive and waits for nobody: now in " in said[0] and "forward (moe/layer.py:" in said[0]


def test_a_rank_that_raises(tmp_path):
    said = mishap(tmp_path, "raise", 1)
    assert "rank 1: ended: KeyError: 'a mistake on one rank'" in said[0]
    theirs = (tmp_path / "err1").read_text()
    assert theirs.count("Traceback (most recent call last)") == 1


def test_a_rank_that_goes_another_way(tmp_path):
    said = mishap(tmp_path, "diverge", 1)
    assert "all_to_all number" in said[0]
    assert "barrier number" in said[0] and "of group world" in said[0]


def test_ranks_of_other_groups_learn_it_too(tmp_path):
    said = mishap(tmp_path, "sleep", 3, n=4)
    assert "group ep (ranks 2 3)" in said[2]
    for rank in (0, 1, 2):
        assert "rank 3: is alive and waits for nobody" in said[rank], said[rank]
