"""Shared by the benchmarks: command line, timing, gloo ranks, GEMM rates, and the Markdown report.

torch is imported where it is used: some benchmarks measure what happens before the import.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from scripts.provenance import write_result

if TYPE_CHECKING:
    import torch


def make_parser(description: str, record: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints the docstring of a benchmark; with --write if the benchmark has a record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if record is not None:
        text = f"record the result in scripts/bench_results/{record}"
        parser.add_argument("--write", action="store_true", help=text)
    return parser


def timed(action: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds from an idle device to an idle device."""
    if device == "cpu":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    import torch

    torch.cuda.synchronize()
    return timed(lambda: (action(), torch.cuda.synchronize()))


def run_on_ranks(work: Callable, size: int, *args: object) -> list:
    """Call work(rank, size, *args) on forked gloo ranks of one thread each. Returns the results by rank."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rank_args = (size, folder, work, args)
        torch.multiprocessing.start_processes(_run_rank, rank_args, nprocs=size, start_method="fork")
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(size)]


def _run_rank(rank: int, size: int, folder: str, work: Callable, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    store, timeout = dist.FileStore(f"{folder}/store", size), datetime.timedelta(seconds=1800)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    torch.save(work(rank, size, *args), f"{folder}/result{rank}")
    dist.barrier()
    os._exit(0)  # without destroying communicators that still have helper threads


def make_square_gemm(dtype: torch.dtype, size: int, device: str = "cpu") -> Callable[[], object]:
    """Return a function that multiplies two square matrices: 2 * size^3 operations."""
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.t(), out=out)


def gemm_rate(dtype: torch.dtype, size: int, device: str = "cpu", rounds: int = 20) -> float:
    """Return the operations per second of a square GEMM: the median of `rounds`, after warm-up rounds."""
    gemm, warm_up = make_square_gemm(dtype, size, device), max(2, rounds // 4)
    times = [timed(gemm, device) for _ in range(warm_up + rounds)][warm_up:]
    return 2.0 * size**3 / statistics.median(times)


class Report:
    """A Markdown report that is printed while it grows, and can be recorded."""

    def __init__(self, *head: str):
        self.lines: list[str] = []
        self.add(*head, "")

    def add(self, *lines: str) -> None:
        """Add lines."""
        print(*lines, sep="\n", flush=True)
        self.lines += lines

    def start_table(self, *columns: str) -> None:
        """Add the heading of a table."""
        self.add(f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")

    def add_row(self, *cells: object) -> None:
        """Add a row of the table."""
        self.add(f"| {' | '.join(map(str, cells))} |")

    def write(self, name: str, append: bool = False) -> None:
        """Write or append the report to scripts/bench_results/<name>."""
        write_result(name, "\n".join(self.lines), append)
