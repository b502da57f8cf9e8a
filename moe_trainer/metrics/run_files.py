"""Metrics files of runs: where they are, what they contain, and the reports that lie with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from moe_trainer.drawing.report_page import report_title
from moe_trainer.metrics.run_data import RunData

METRICS_NAME = "metrics.jsonl"
MAX_PARSED_BYTES = 200_000_000  # of a metrics file


def read_run(path: str | Path, num_runs: int = 1, size: int | None = None) -> RunData | None:
    """Read a run from its metrics file, or a folder with metrics.jsonl; None if there is no such file.

    Args:
        path: of the file or the folder.
        num_runs: see RunData.
        size: bytes to read; None for all.

    Raises:
        OSError: if the file cannot be read.
    """
    file = Path(path)
    file = file / METRICS_NAME if file.is_dir() else file
    if not file.is_file():
        return None
    run = RunData(name_of_run(file), str(file), num_runs)
    for line in _lines(file, size):
        take_line(run, line)
    return run


def find_metrics_files(folder: Path) -> Iterator[Path]:
    """Yield the metrics.jsonl of every run below a folder, without folders that cannot be read or are deleted now."""
    for below, _, files in os.walk(folder):
        if METRICS_NAME in files:
            yield Path(below, METRICS_NAME)


def find_reports(folder: Path) -> list[tuple[Path, str]]:
    """Return the reports (--report-html) in a folder with their titles; none of a folder that cannot be read."""
    try:
        pages = sorted(path for path in folder.iterdir() if path.suffix == ".html" and path.is_file())
    except OSError:
        return []
    return [(path, title) for path in pages if (title := report_title(path)) is not None]


def take_line(run: RunData, line: bytes) -> None:
    """Add a line of a metrics file, unless it was torn by a kill or is of another program."""
    try:
        run.take(json.loads(line))
    except (ValueError, TypeError, LookupError, RecursionError, AttributeError):
        return


def name_of_run(file: Path) -> str:
    """Return a name from the path of a metrics file; "checkpoints" alone tells nothing."""
    folder = file.resolve().parent
    name = (
        f"{folder.parent.name}/{folder.name}" if folder.name in ("checkpoints", "checkpoint", "ckpt") else folder.name
    )
    return name if file.stem == "metrics" else f"{name}/{file.stem}"


def _lines(path: Path, size: int | None) -> Iterator[bytes]:
    """Yield the lines of a metrics file; of a very large one, evenly spaced lines, all events and the last line."""
    size = path.stat().st_size if size is None else size
    stride, newest = size // MAX_PARSED_BYTES + 1, b""
    rare = (
        *(b'{"validation"', b'{"task"', b'{"sample"', b'{"ended"'),
        *(b'"resumed_from"', b'"rejected"', b'"saved"', b'"run": {'),
    )
    with path.open("rb") as file:
        for number, line in enumerate(file):
            size -= len(line)
            if size < 0:
                break
            if number % stride == 0 or any(each in line for each in rare):
                newest = b""
                yield line
            else:
                newest = line
    if newest:
        yield newest
