"""Can the ranks talk to each other? Every kind of collective once, over all ranks, each result compared (scripts/doctor.py).

Small tensors, then one all-reduce of 8 MB for its speed: seconds on any number of ranks. What does not end within PATIENCE_S is named by a
timer, which then ends the process: a rank that is stuck in a collective can do nothing else, and on NCCL not even that is told.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_trainer.parallel import collectives
from moe_trainer.parallel.p2p import Receive, Send, exchange
from moe_trainer.parallel.state import Group
from moe_trainer.place import Place

PATIENCE_S = 20.0
MEETING_S = 60.0


@dataclass(frozen=True)
class SelfTest:
    """What the ranks could do together. problems: by rank, empty where all is well. gb_s: of an all-reduce of 8 MB, bytes by seconds."""

    backend: str
    world_size: int
    passed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    gb_s: float = 0.0


class Deadline:
    """Ends the process, saying in what, when the next `at` does not come in time."""

    def __init__(self, rank: int, report: Callable[[str], None]):
        self._rank, self._report = rank, report
        self._timer: threading.Timer | None = None

    def at(self, what: str | None, seconds: float | None = None) -> None:
        """Begin `what`, which may take so long (None: PATIENCE_S); None: nothing more to come."""
        seconds = PATIENCE_S if seconds is None else seconds
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None:
            self._timer = threading.Timer(seconds, self._expire, (what, seconds))
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, what: str, seconds: float) -> None:
        self._report(f"rank {self._rank} on {socket.gethostname()}: {what} has not ended after {seconds:.0f} s")
        os._exit(1)


def run_collectives(rank: int, size: int, backend: str, device: torch.device, deadline: Deadline) -> tuple[list[str], float]:
    """Run and check every kind of collective on the default group. Returns: the names of those that passed, and GB/s of an all-reduce.

    Raises: ValueError that names the first whose result is wrong.
    """
    def wrong(name: str) -> None:
        raise ValueError(f"{name} over {backend} gave a wrong result")

    return try_collectives(Group("world", tuple(range(size)), rank, size, dist.group.WORLD), device, deadline.at, wrong)


def try_collectives(world: Group, device: torch.device, at: Callable[[str | None], None],
                    wrong: Callable[[str], None]) -> tuple[list[str], float]:
    """Run and check every kind of collective on a group. at: told what begins, None at the end. wrong: told whose result is wrong.

    Returns: the names of those that passed, and GB/s of an all-reduce.
    """
    rank, size = world.rank, world.size
    everyone = torch.arange(size, device=device, dtype=torch.float32)

    def own(rows: int) -> torch.Tensor:
        return torch.full((rows, 4), float(rank), device=device)

    def all_reduce():
        return collectives.all_reduce(own(2), world), torch.full((2, 4), float(everyone.sum()))

    def all_gather():
        out = own(size)
        collectives.all_gather_flat(out, own(1), world)
        return out, everyone[:, None].expand(size, 4)

    def reduce_scatter():
        out = own(1)
        collectives.reduce_scatter_flat(out, everyone[:, None].expand(size, 4).contiguous(), world)
        return out, torch.full((1, 4), float(rank * size))

    def all_to_all():
        # rank r sends d + 1 rows to rank d: uneven, as tokens are
        rows, = collectives.all_to_all(world, [to + 1 for to in range(size)], [rank + 1] * size, own(size * (size + 1) // 2))
        return rows, everyone.repeat_interleave(rank + 1)[:, None].expand(-1, 4)

    def broadcast():
        return collectives.broadcast(own(1), world, src=size - 1), torch.full((1, 4), float(size - 1))

    def send_and_receive():
        if size == 1:
            return own(1), own(1)
        out = own(1)
        exchange([Send(own(1), (rank + 1) % size), Receive(out, (rank - 1) % size)], world).wait()
        return out, torch.full((1, 4), float((rank - 1) % size))

    passed = []
    for test in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_and_receive):
        at(test.__name__)
        got, want = test()
        if torch.equal(got.cpu(), want.cpu()):
            passed.append(test.__name__)
        else:
            wrong(test.__name__)
    at("an all-reduce of 8 MB")
    large, begin = torch.ones(2**21, device=device), time.perf_counter()
    float(collectives.all_reduce(large, world)[0])  # waits for it
    speed = large.numel() * 4 / (time.perf_counter() - begin) / 1e9
    at("the last barrier")
    collectives.barrier(world)
    at(None)
    return passed, speed


def _forked(rank: int, size: int, folder: str) -> None:
    def report(problem: str) -> None:
        Path(folder, f"{rank}.json").write_text(json.dumps({"problem": problem}))

    deadline = Deadline(rank, report)
    try:
        deadline.at("joining the other ranks")
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size,
                                timeout=timedelta(seconds=PATIENCE_S))
        passed, speed = run_collectives(rank, size, "gloo", torch.device("cpu"), deadline)
        Path(folder, f"{rank}.json").write_text(json.dumps({"passed": passed, "gb_s": speed}))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        report(f"rank {rank}: {error}")


def talk_alone(size: int = 2) -> SelfTest:
    """Fork ranks of this process and let them talk over gloo."""
    torch.set_num_threads(1)  # a fork after several OpenMP threads have run may hang
    context, begin = multiprocessing.get_context("fork"), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="doctor") as folder:
        ranks = [context.Process(target=_forked, args=(rank, size, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, begin + 3 * PATIENCE_S - time.perf_counter()))
        outcomes = []
        for rank, process in enumerate(ranks):
            if process.is_alive():
                process.kill()
                process.join()
            path = Path(folder, f"{rank}.json")
            ended = {"problem": f"rank {rank} ended with {process.exitcode} and said nothing"}
            outcomes.append(json.loads(path.read_text()) if path.exists() else ended)
    problems = tuple(outcome["problem"] for outcome in outcomes if "problem" in outcome)
    passed = () if problems else tuple(outcomes[0]["passed"])
    return SelfTest("gloo", size, passed, problems, time.perf_counter() - begin, 0.0 if problems else outcomes[0]["gb_s"])


def join_and_talk(place: Place, device: torch.device) -> SelfTest:
    """Join the ranks that the launcher started and let them talk. Every rank prints its own problem: others may not hear of it."""
    begin = time.perf_counter()
    backend = "nccl" if device.type == "cuda" else "gloo"
    deadline = Deadline(place.rank, lambda problem: print(f"self-test: {problem}", file=sys.stderr, flush=True))
    try:
        deadline.at(f"meeting {place.world_size} ranks at {place.master_addr}:{place.master_port}", MEETING_S + 5.0)
        dist.init_process_group(backend, init_method=f"tcp://{place.master_addr}:{place.master_port}" if place.source == "SLURM" else "env://",
                                rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=MEETING_S))
        passed, speed = run_collectives(place.rank, place.world_size, backend, device, deadline)
    except (RuntimeError, ValueError, OSError) as error:
        deadline.at(None)
        problem = f"rank {place.rank} on {socket.gethostname()}: {' '.join(str(error).split())[:300]}"
        print(f"self-test: {problem}", file=sys.stderr, flush=True)
        return SelfTest(backend, place.world_size, problems=(problem,), seconds=time.perf_counter() - begin)
    return SelfTest(backend, place.world_size, tuple(passed), (), time.perf_counter() - begin, speed)
