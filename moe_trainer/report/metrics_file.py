"""The file of metrics.jsonl: begun anew beside an old one, or continued without what is going to be repeated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_trainer.errors import InputError


def open_metrics_file(path: str, start_iteration: int):
    """Open metrics.jsonl for appending after `start_iteration`.

    Records of later iterations (they will be repeated) and a torn last line (a killed run) are dropped; with
    start_iteration 0 an old file is kept under a numbered name.
    Raises: InputError if the file cannot be written.
    """
    target = Path(path)
    with writes("--metrics-file", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and target.stat().st_size > 0:
            if start_iteration == 0:
                target.rename(_free_name(target))
            else:
                _drop_after(target, start_iteration)
        return open(target, "a", encoding="utf-8")


def _free_name(target: Path) -> Path:
    number = 1
    while (free := target.with_name(f"{target.stem}-{number}{target.suffix}")).exists():
        number += 1
    return free


def _drop_after(target: Path, iteration: int) -> None:
    kept = []
    for line in target.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            number = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill, or not ours
        if isinstance(number, int) and number <= iteration:
            kept.append(line)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.{time.monotonic_ns()}")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, target)


@contextmanager
def writes(flag: str, target: str | Path | None) -> Iterator[None]:
    """Name the flag and the place where something could not be written, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror or error}") from error
