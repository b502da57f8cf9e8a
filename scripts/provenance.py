"""When, where and by what a recorded result was made, and the folder of the records."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "bench_results"


def provenance_line(machine: str = "", software: str = "") -> str:
    """Return date, machine and software of a run; by default this processor and the torch version."""
    if not software:
        import torch

        software = f"torch {torch.__version__}"
    machine = machine or f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {machine}, {software}"


def get_commit(*options: str) -> str:
    """Return `git describe` of this checkout; "unknown" without git or a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", *options]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def load_line() -> str:
    """Return the load average as text."""
    return f"load average {os.getloadavg()[0]:.1f}"


def write_result(name: str, text: str, append: bool = False) -> None:
    """Write or append a text to scripts/bench_results/<name>."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / name).open("a" if append else "w", encoding="ascii") as file:
        file.write(text.rstrip("\n") + "\n" + ("\n" if append else ""))
