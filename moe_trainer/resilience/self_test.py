"""Self-test of the communication between ranks: every kind of collective once, each checked (scripts/doctor.py).

It uses small tensors, then one all-reduce of 8 MB for its speed, and takes seconds on any number of ranks. A step
that does not finish within STEP_TIMEOUT_S is reported by a timer, which ends the process: a rank that is stuck in a
collective cannot do so itself.
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
from typing import Any

import torch
import torch.distributed as dist

from moe_trainer.exit_codes import ExitCode
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel import collectives
from moe_trainer.parallel.p2p import Receive, Send, exchange
from moe_trainer.parallel.state import Group

STEP_TIMEOUT_S = 20.0
RENDEZVOUS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SelfTestResult:
    """Result of the self-test.

    Attributes:
        passed: names of the collectives that passed.
        problems: one message per failed rank.
        gb_s: speed of an all-reduce of 8 MB, as bytes over seconds.
    """

    backend: str
    world_size: int
    passed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    gb_s: float = 0.0


class StepTimeout:
    """Ends the process, after reporting the step, if the next call of `at` does not come in time."""

    def __init__(self, rank: int, report: Callable[[str], None]):
        self._rank, self._report = rank, report
        self._timer: threading.Timer | None = None

    def at(self, what: str | None, seconds: float | None = None) -> None:
        """Begin a step, which may take `seconds` (None: STEP_TIMEOUT_S). `what` None: no more steps."""
        seconds = STEP_TIMEOUT_S if seconds is None else seconds
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None:
            self._timer = threading.Timer(seconds, self._expire, (what, seconds))
            self._timer.daemon = True
            self._timer.start()

    def _expire(self, what: str, seconds: float) -> None:
        self._report(f"rank {self._rank} on {socket.gethostname()}: {what} did not finish within {seconds:.0f} s")
        os._exit(ExitCode.FAILED)


def run_collectives(
    rank: int, size: int, backend: str, device: torch.device, timeout: StepTimeout
) -> tuple[list[str], float]:
    """Call `try_collectives` on the default group; raise ValueError naming the first whose result is wrong."""

    def wrong(name: str) -> None:
        raise ValueError(f"{name} over {backend} gave a wrong result")

    return try_collectives(Group("world", tuple(range(size)), rank, size, dist.group.WORLD), device, timeout.at, wrong)


def try_collectives(
    world: Group, device: torch.device, at: Callable[[str | None], None], wrong: Callable[[str], None]
) -> tuple[list[str], float]:
    """Run and check every kind of collective on a group.

    Calls `at` with the name of every step as it begins, and with None at the end; `wrong` with the name of every
    collective whose result is wrong.

    Returns:
        The names of those that passed, and GB/s of an all-reduce.
    """
    rank, size = world.rank, world.size
    ranks = torch.arange(size, device=device, dtype=torch.float32)

    def local(num_rows: int) -> torch.Tensor:
        return torch.full((num_rows, 4), float(rank), device=device)

    def all_reduce():
        return collectives.all_reduce(local(2), world), torch.full((2, 4), float(ranks.sum()))

    def all_gather():
        out = local(size)
        collectives.all_gather_flat(out, local(1), world)
        return out, ranks[:, None].expand(size, 4)

    def reduce_scatter():
        out = local(1)
        collectives.reduce_scatter_flat(out, ranks[:, None].expand(size, 4).contiguous(), world)
        return out, torch.full((1, 4), float(rank * size))

    def all_to_all():
        # rank r sends d + 1 rows to rank d: uneven splits, as for tokens
        (rows,) = collectives.all_to_all(
            world, [to + 1 for to in range(size)], [rank + 1] * size, local(size * (size + 1) // 2)
        )
        return rows, ranks.repeat_interleave(rank + 1)[:, None].expand(-1, 4)

    def broadcast():
        return collectives.broadcast(local(1), world, src=size - 1), torch.full((1, 4), float(size - 1))

    def send_and_receive():
        if size == 1:
            return local(1), local(1)
        out = local(1)
        exchange([Send(local(1), (rank + 1) % size), Receive(out, (rank - 1) % size)], world).wait()
        return out, torch.full((1, 4), float((rank - 1) % size))

    passed = []
    for test in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_and_receive):
        at(test.__name__)
        result, expected = test()
        if torch.equal(result.cpu(), expected.cpu()):
            passed.append(test.__name__)
        else:
            wrong(test.__name__)
    at("an all-reduce of 8 MB")
    large, begin = torch.ones(2**21, device=device), time.perf_counter()
    float(collectives.all_reduce(large, world)[0])  # waits for the result
    speed = large.numel() * 4 / (time.perf_counter() - begin) / 1e9
    at("the last barrier")
    collectives.barrier(world)
    at(None)
    return passed, speed


def _run_forked_rank(rank: int, size: int, folder: str) -> None:
    def report(problem: str) -> None:
        Path(folder, f"{rank}.json").write_text(json.dumps({"problem": problem}))

    timeout = StepTimeout(rank, report)
    try:
        timeout.at("joining the other ranks")
        store, limit = dist.FileStore(f"{folder}/store", size), timedelta(seconds=STEP_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        passed, speed = run_collectives(rank, size, "gloo", torch.device("cpu"), timeout)
        Path(folder, f"{rank}.json").write_text(json.dumps({"passed": passed, "gb_s": speed}))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        report(f"rank {rank}: {error}")


def run_local_self_test(size: int = 2) -> SelfTestResult:
    """Fork ranks of this process and run the self-test over gloo."""
    torch.set_num_threads(1)  # a fork after several OpenMP threads have run may hang
    context, begin = multiprocessing.get_context("fork"), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="doctor") as folder:
        processes = [context.Process(target=_run_forked_rank, args=(rank, size, folder)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, begin + 3 * STEP_TIMEOUT_S - time.perf_counter()))
        outcomes: list[dict[str, Any]] = []
        for rank, process in enumerate(processes):
            if process.is_alive():
                process.kill()
                process.join()
            path = Path(folder, f"{rank}.json")
            silent = {"problem": f"rank {rank} exited with {process.exitcode} and wrote no result"}
            outcomes.append(json.loads(path.read_text()) if path.exists() else silent)
    problems = tuple(outcome["problem"] for outcome in outcomes if "problem" in outcome)
    passed = () if problems else tuple(outcomes[0]["passed"])
    return SelfTestResult(
        "gloo", size, passed, problems, time.perf_counter() - begin, 0.0 if problems else outcomes[0]["gb_s"]
    )


def run_distributed_self_test(launch: LaunchEnv, device: torch.device) -> SelfTestResult:
    """Run the self-test over the launched ranks. Every rank prints its own problem, which peers may not receive."""
    begin = time.perf_counter()
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = StepTimeout(launch.rank, lambda problem: print(f"self-test: {problem}", file=sys.stderr, flush=True))
    try:
        timeout.at(
            f"connecting {launch.world_size} ranks at {launch.master_addr}:{launch.master_port}",
            RENDEZVOUS_TIMEOUT_S + 5.0,
        )
        dist.init_process_group(
            backend,
            init_method=f"tcp://{launch.master_addr}:{launch.master_port}" if launch.source == "SLURM" else "env://",
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )
        passed, speed = run_collectives(launch.rank, launch.world_size, backend, device, timeout)
    except (RuntimeError, ValueError, OSError) as error:
        timeout.at(None)
        problem = f"rank {launch.rank} on {socket.gethostname()}: {' '.join(str(error).split())[:300]}"
        print(f"self-test: {problem}", file=sys.stderr, flush=True)
        return SelfTestResult(backend, launch.world_size, problems=(problem,), seconds=time.perf_counter() - begin)
    return SelfTestResult(backend, launch.world_size, tuple(passed), (), time.perf_counter() - begin, speed)
