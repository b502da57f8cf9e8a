"""Run a function on several ranks: forked processes and gloo, without ports.

def work(rank, world_size, x): ...
results = run_ranks(work, 4, x)          # list of return values, by rank
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RanksFailedError(AssertionError):
    """Some ranks raised, died or did not finish; the message carries every rank's traceback."""


def run_ranks(fn: Callable, n: int, *args: Any, timeout: float = 600.0) -> list:
    """Call `fn(rank, n, *args)` on n forked ranks with torch.distributed (gloo) initialized.

    Each rank uses one thread. The parent must not have used CUDA or more than one OpenMP thread before.

    Returns:
        The picklable return values, by rank.

    Raises:
        RanksFailedError: with every rank's traceback, if a rank raised, died, or took longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = [context.Process(target=_rank_main, args=(fn, rank, n, args, folder, timeout)) for rank in range(n)]
        for process in ranks:
            process.start()
        late = _join(ranks, timeout)
        outcomes = [_outcome(folder, rank, process, rank in late, timeout) for rank, process in enumerate(ranks)]
    failures = [f"--- rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RanksFailedError(f"{len(failures)} of {n} ranks failed\n" + "\n".join(failures))
    return [value for _, value in outcomes]


def wait_until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll until `true()`.

    Raises:
        AssertionError: if it is still false after `seconds`, which are generous for busy machines.
    """
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"still false after {seconds:.0f} s"
        time.sleep(0.01)


def _join(ranks: list, timeout: float) -> set[int]:
    """Wait for all ranks, at most 60 s more after one failed. Returns the ranks that had to be killed."""
    deadline = time.monotonic() + timeout
    failed = False
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < deadline:
        if not failed and any(process.exitcode not in (None, 0) for process in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + 60.0)
        wait([process.sentinel for process in alive], timeout=0.2)  # a process that a rank leaves behind has it too
    late = {rank for rank, process in enumerate(ranks) if process.is_alive()}
    for rank in late:
        ranks[rank].kill()
    for process in ranks:
        process.join()
    return late


def _outcome(folder: str, rank: int, process: Any, late: bool, timeout: float) -> tuple[bool, Any]:
    path = Path(folder, f"rank{rank}")
    if path.exists():
        return pickle.loads(path.read_bytes())
    if late:
        return False, f"did not finish within {timeout:.0f} s (or after another rank failed)"
    return False, f"died with exit code {process.exitcode}"


def _rank_main(fn: Callable, rank: int, n: int, args: tuple, folder: str, timeout: float) -> None:
    gc.freeze()  # do not copy the parent's pages
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    code = 0
    try:
        store = dist.FileStore(os.path.join(folder, "store"), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
        outcome = (True, fn(rank, n, *args))
        dist.barrier()
        payload = pickle.dumps(outcome)
    except BaseException:  # noqa: BLE001 - the traceback of anything belongs in the report
        payload = pickle.dumps((False, traceback.format_exc()))
        code = 1
    partial = Path(folder, f"rank{rank}.part")
    partial.write_bytes(payload)
    os.replace(partial, Path(folder, f"rank{rank}"))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: inherited pytest state must not run twice
