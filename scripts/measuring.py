"""What the benches have in common: the rate of a matrix product, the line that says where figures come from, and where they are kept.

torch is imported where it is used: some benches measure what happens before it is.
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
    """Seconds from an idle device to an idle device."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def square_product(dtype: torch.dtype, size: int, device: str = "cpu") -> Callable[[], object]:
    """A product of two square matrices, to be timed: 2 * size^3 operations."""
    import torch

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.t(), out=out)


def gemm_rate(dtype: torch.dtype, size: int, device: str = "cpu", rounds: int = 20) -> float:
    """Operations per second of a square product: the median of some rounds, after a quarter as many others."""
    product, warm_up = square_product(dtype, size, device), max(2, rounds // 4)
    times = [timed(product, device) for _ in range(warm_up + rounds)][warm_up:]
    return 2.0 * size**3 / statistics.median(times)


def stamp(machine: str = "", software: str = "") -> str:
    """Date, machine and software of a run: what is not given is this processor's kind, and torch."""
    if not software:
        import torch

        software = f"torch {torch.__version__}"
    machine = machine or f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {machine}, {software}"


def load() -> str:
    """How busy the machine is."""
    return f"load average {os.getloadavg()[0]:.1f}"


def record(name: str, text: str, more: bool = False) -> None:
    """Keep a report as scripts/bench_results/<name>; more: behind what is there already."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / name).open("a" if more else "w", encoding="ascii") as file:
        file.write(text.rstrip("\n") + "\n" + ("\n" if more else ""))
