"""Pool of rank processes on this machine that runs one small training after the other.

Starting a process takes seconds (torch), joining a group milliseconds. So the processes are forked once, after torch
is imported, and every job creates a group of as many ranks as it needs. A rank that raises returns its traceback. If
one dies or times out, the pool is stopped and the next job starts a new one. Gloo on the CPU, one thread per rank. The
parent process must not have used CUDA.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE_S = 3.0
"""Time for the other ranks to answer after one has failed."""


class RankPoolError(RuntimeError):
    """Failure of some ranks: exceptions, deaths or timeouts, `by_rank`."""

    def __init__(self, by_rank: dict[int, str]):
        self.by_rank = by_rank
        ends: dict[str, list[int]] = {}
        for rank, text in sorted(by_rank.items()):
            ends.setdefault(text.strip().splitlines()[-1], []).append(rank)
        lines = [f"rank {', '.join(map(str, ranks))}: {end}" for end, ranks in ends.items()]
        rank_with_traceback = next((rank for rank, text in sorted(by_rank.items()) if "Traceback" in text), None)
        if rank_with_traceback is not None:
            lines += [f"output of rank {rank_with_traceback}", by_rank[rank_with_traceback].rstrip()]
        super().__init__("\n".join(lines))


class RankPool:
    """Context manager of `size` processes that wait for work."""

    def __init__(self, size: int, timeout_s: float = 120.0):
        self.size, self.timeout_s = size, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool")
        self._ranks: list[tuple[ForkProcess, Connection]] = []
        self._jobs = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, work: Callable, world_size: int, *args: object) -> Any:
        """Call `work(rank, world_size, *args)` on the ranks of one group, and return the result of rank 0.

        Raises:
            RankPoolError: if a rank raised, died or timed out.
        """
        return self._call([(work, rank, world_size, args) for rank in range(world_size)])[0]

    def run_each(self, work: Callable, arguments: Sequence[tuple]) -> list:
        """Call `work(0, 1, *args)` for every args, in parallel and each in a separate world, and return the results.

        Raises:
            RankPoolError: as `run`.
        """
        calls = [(work, 0, 1, args) for args in arguments]
        batches = (calls[start : start + self.size] for start in range(0, len(calls), self.size))
        return [answer for batch in batches for answer in self._call(batch)]

    def refresh(self) -> None:
        """Give the next job new processes, because the device meshes of torch cache the groups of an earlier one."""
        self._stop()

    def _call(self, calls: list[tuple]) -> list:
        world_size = len(calls)
        if world_size > self.size:
            raise ValueError(f"{world_size} ranks requested from a pool of {self.size}")
        if len(self._ranks) < self.size:
            self._start()
        self._jobs += 1
        store = str(Path(self._folder.name, f"store{self._jobs}"))
        for (_, pipe), (work, rank, size, args) in zip(self._ranks, calls):
            pipe.send((work, rank, size, store, self.timeout_s, args))
        answers = self._collect(world_size)
        failed = {rank: str(text) for rank, (ok, text) in answers.items() if not ok}
        if failed:
            self._stop()
            raise RankPoolError(failed)
        return [answers[rank][1] for rank in range(world_size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._stop()
        for _ in range(self.size):
            parent_pipe, child_pipe = context.Pipe()
            inherited = [*(pipe for _, pipe in self._ranks), parent_pipe]
            process = context.Process(target=_serve, args=(child_pipe, inherited), daemon=True)
            process.start()
            child_pipe.close()
            self._ranks.append((process, parent_pipe))

    def _collect(self, world_size: int) -> dict[int, tuple[bool, object]]:
        answers: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < world_size:
            open_pipes = {self._ranks[rank][1]: rank for rank in range(world_size) if rank not in answers}
            ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                has_failure = not all(ok for ok, _ in answers.values())
                reason = "was waiting for the others" if has_failure else "did not answer within the time limit"
                return answers | dict.fromkeys(open_pipes.values(), (False, reason))
            for pipe, rank in open_pipes.items():
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._ranks[rank][0].join(_GRACE_S)
                    answers[rank] = (False, f"died with exit code {self._ranks[rank][0].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _stop(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []


def _serve(pipe: Connection, inherited: list[Connection]) -> None:
    """Run work as a rank until the parent closes the pipe."""
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    while True:
        try:
            work, rank, world_size, store, timeout_s, args = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        try:
            if world_size > 1:
                limit = timedelta(seconds=timeout_s)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=limit
                )
            answer = (True, work(rank, world_size, *args))
            if world_size > 1:
                dist.barrier()
                dist.destroy_process_group()
        except Exception:  # noqa: BLE001 - the exception is the answer of the rank; the parent stops the pool
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
