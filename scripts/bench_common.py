"""Shared by the benchmarks: GEMM rates, the provenance line of a record, and where records are stored.

torch is imported where it is used: some benchmarks measure what happens before the import.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RESULTS = Path(__file__).resolve().parent / "bench_results"


def timed(action: Callable[[], object], device: str = "cpu") -> float:
    """Return the seconds from an idle device to an idle device."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


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


def provenance_line(machine: str = "", software: str = "") -> str:
    """Return date, machine and software of a run; by default this processor and the torch version."""
    if not software:
        import torch

        software = f"torch {torch.__version__}"
    machine = machine or f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {machine}, {software}"


def load_line() -> str:
    """Return the load average as text."""
    return f"load average {os.getloadavg()[0]:.1f}"


def write_result(name: str, text: str, append: bool = False) -> None:
    """Write or append a report to scripts/bench_results/<name>."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / name).open("a" if append else "w", encoding="ascii") as file:
        file.write(text.rstrip("\n") + "\n" + ("\n" if append else ""))
