"""metrics.jsonl: started next to an older file, or continued without the records that will be repeated.

Once the file is open, a disk error does not end the run: the record is buffered and written with the next one.
Records that are still buffered at the end are an error.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from itertools import count, takewhile
from pathlib import Path

from moe_trainer.errors import UserError, name_write_errors
from moe_trainer.io import atomic_write
from moe_trainer.metrics.run_state import RunEnd

# "iteration" comes first, or after the kind of a validation or an end, the name of a task or the prompt of a sample
_ITERATION = re.compile(
    rb'\s*\{\s*(?:"(?:validation|task|sample|ended)":\s*"(?:[^"\\]|\\.)*",\s*)?"iteration":\s*(\d+)[,}]'
)

logger = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 64 * 2**20
_TAIL_BYTES = 2**16


class MetricsFile:
    """Appends complete lines in order. `existing` lines at the end of the file are not repeated if they come again."""

    def __init__(self, path: Path, existing: frozenset[str] = frozenset()):
        self._path, self._existing = path, existing
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - Python's buffer loses what it could not write
        self._buffered = b""
        self._lock = threading.Lock()  # an end may be recorded by another thread

    def append(self, text: str) -> None:
        """Write a line, after the buffered ones.

        Raises:
            UserError: if more than MAX_BUFFERED_BYTES are buffered.
        """
        if text in self._existing:
            return
        with self._lock:
            self._append(text)

    def _append(self, text: str) -> None:
        was_buffering = bool(self._buffered)
        self._buffered += text.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if len(self._buffered) > MAX_BUFFERED_BYTES:
                raise UserError(f"--metrics-file: cannot write {self._path}: {error.strerror or error}") from error
            if not was_buffering:
                logger.warning(
                    f"--metrics-file: cannot write {self._path} ({error.strerror or error}); the run continues and "
                    "buffers the records until it can"
                )
            return
        if was_buffering:
            logger.warning("--metrics-file: writing to %s again; no record is missing", self._path)

    def _write(self) -> None:
        while self._buffered:
            self._buffered = self._buffered[os.write(self._file.fileno(), self._buffered) :]

    def close(self) -> None:
        """Write the buffered lines and close the file.

        Raises:
            UserError: if they cannot be written.
        """
        if self._file.closed:
            return
        try:
            with name_write_errors("--metrics-file", self._path):
                self._write()
        finally:
            self._file.close()


def open_metrics_file(path: str, start_iteration: int | None) -> MetricsFile:
    """Open metrics.jsonl for appending after `start_iteration`.

    Records of later iterations, which will be repeated, and the torn last line of a killed run are dropped. Iteration 0
    renames an older file to a numbered name. None drops nothing, because the run does not train.
    """
    target = Path(path)
    with name_write_errors("--metrics-file", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if start_iteration is not None and target.exists() and target.stat().st_size > 0:
            if start_iteration == 0:
                target.rename(_free_name(target))
            else:
                _drop_after(target, start_iteration)
        return MetricsFile(target, _last_validations(target))


def _last_validations(target: Path) -> frozenset[str]:
    """Return the validations after the last iteration's record; a finished run that is started again repeats them."""
    return frozenset(takewhile(lambda line: line.startswith(('{"validation"', '{"ended"')), reversed(_tail(target))))


def _tail(target: Path) -> list[str]:
    """Return the last lines of a file; none if there is no file."""
    if not target.is_file():
        return []
    with target.open("rb") as stream:
        stream.seek(max(0, target.stat().st_size - _TAIL_BYTES))
        return stream.read().decode(errors="replace").splitlines()


def read_end(target: Path, since: float) -> RunEnd | None:
    """Return the end that a rank has recorded since that time, in seconds since the epoch; None if there is none."""
    for line in filter(lambda line: line.startswith('{"ended"'), reversed(_tail(target))):
        try:
            record = json.loads(line)
            return RunEnd.of_record(record) if record["time"] >= since else None
        except (ValueError, LookupError, TypeError):
            return None
    return None


def append_end(target: Path, end: RunEnd, since: float) -> RunEnd:
    """Append how the run ended, unless a rank has recorded it since that time, and return what is recorded.

    The first rank that fails knows the cause; the others fail because of it.
    """
    found = read_end(target, since)
    if found is None:
        with target.open("ab") as file:
            file.write(json.dumps(end.as_record()).encode() + b"\n")
    return found or end


def last_iteration(target: Path) -> int:
    """Return the iteration of the last record, 0 without one."""
    matches = (_ITERATION.match(line.encode()) for line in reversed(_tail(target)))
    return next((int(match[1]) for match in matches if match is not None), 0)


def _free_name(target: Path) -> Path:
    names = (target.with_name(f"{target.stem}-{number}{target.suffix}") for number in count(1))
    return next(name for name in names if not name.exists())


def _drop_after(target: Path, iteration: int) -> None:
    """Drop the records after `iteration`. With routing statistics a line can have 100 kB, so lines are not parsed."""
    with target.open("rb") as old:
        damaged = [number for number, line in enumerate(old, 1) if _is_damaged(line, iteration)]
    if damaged:
        logger.warning(
            "--metrics-file: %s: dropping damaged records: %s",
            target,
            f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {damaged[0]}",
        )
    with target.open("rb") as old:
        lines = iter(old)
        end = sum(len(line) for line in takewhile(lambda line: _keep_on_resume(line, iteration), lines))
        if not any(_keep_on_resume(line, iteration) for line in lines):
            os.truncate(target, end)
            return
        old.seek(0)
        with atomic_write(target, "wb") as new:
            new.writelines(line for line in old if _keep_on_resume(line, iteration))


def _keep_on_resume(line: bytes, iteration: int) -> bool:
    """Return whether the line is a complete record of an iteration up to the given one."""
    match = _ITERATION.match(line)
    return match is not None and line.endswith(b"}\n") and int(match[1]) <= iteration


def _is_damaged(line: bytes, iteration: int) -> bool:
    """Return whether the line is torn and does not belong to an iteration that will be repeated."""
    match = _ITERATION.match(line)
    return not line.endswith(b"}\n") and (match is None or int(match[1]) <= iteration)
