"""The file of metrics.jsonl: begun anew beside an old one, or continued without what is going to be repeated.

Once it is open, a disk that does not take a record does not end the run: the record is held back and written with the next
one. What is still held back at the end is an error.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from moe_trainer.errors import InputError

# "iteration" stands first, or after the kind of a validation
_ITERATION = re.compile(rb'\s*\{\s*(?:"validation":\s*"[^"]*",\s*)?"iteration":\s*(\d+)[,}]')

logger = logging.getLogger(__name__)

MOST_HELD_BACK = 64 * 2**20  # bytes
_TAIL_BYTES = 2**16


class MetricsFile:
    """Whole lines, in order, in a file that is open for appending."""

    def __init__(self, path: Path, told: frozenset[str] = frozenset()):
        """told: lines at the end of the file that may come again, and are not repeated. Raises: OSError."""
        self._path, self._told = path, told
        # not Python's own file: its buffer forgets what it could not write
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._held_back = b""

    def append(self, text: str) -> None:
        """Write a line, after those that were held back.

        Raises: InputError when MOST_HELD_BACK bytes wait for the disk.
        """
        if text in self._told:
            return
        waited = bool(self._held_back)
        self._held_back += text.encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if len(self._held_back) > MOST_HELD_BACK:
                raise InputError(f"--metrics-file: cannot write {self._path}: {error.strerror or error}") from error
            if not waited:
                logger.warning("--metrics-file: cannot write %s (%s); the run goes on, and the records are held back until it can",
                               self._path, error.strerror or error)
            return
        if waited:
            logger.warning("--metrics-file: %s is written again; nothing is missing there", self._path)

    def _write(self) -> None:
        while self._held_back:
            self._held_back = self._held_back[os.write(self._descriptor, self._held_back):]

    def close(self) -> None:
        """Write what is held back. Raises: InputError when that cannot be done."""
        if self._descriptor is None:
            return
        try:
            with writes("--metrics-file", self._path):
                self._write()
        finally:
            os.close(self._descriptor)
            self._descriptor = None


def open_metrics_file(path: str, start_iteration: int | None) -> MetricsFile:
    """Open metrics.jsonl for appending after `start_iteration`.

    Records of later iterations (they will be repeated) and a torn last line (a killed run) are dropped; with
    start_iteration 0 an old file is kept under a numbered name. None: nothing is dropped, whatever is appended comes from no training.
    Raises: InputError if the file cannot be written.
    """
    target = Path(path)
    with writes("--metrics-file", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if start_iteration is not None and target.exists() and target.stat().st_size > 0:
            if start_iteration == 0:
                target.rename(_free_name(target))
            else:
                _drop_after(target, start_iteration)
        return MetricsFile(target, _last_validations(target))


def _last_validations(target: Path) -> frozenset[str]:
    """The validations behind the last iteration's record: a run that had ended and is started again comes to the same."""
    if not target.is_file():
        return frozenset()
    with target.open("rb") as stream:
        stream.seek(max(0, target.stat().st_size - _TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    return frozenset(takewhile(lambda line: line.startswith('{"validation"'), reversed(lines)))


def _free_name(target: Path) -> Path:
    number = 1
    while (free := target.with_name(f"{target.stem}-{number}{target.suffix}")).exists():
        number += 1
    return free


def _drop_after(target: Path, iteration: int) -> None:
    """With routing health a line can have a hundred kilobytes: the lines are looked at one by one, and not parsed."""
    with target.open("rb") as old:
        damaged = [number for number, line in enumerate(old, 1) if _is_damaged(line, iteration)]
    if damaged:
        logger.warning("WARNING: --metrics-file: %s: %s damaged and dropped; what was recorded there is lost", target,
                       f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines, from line {damaged[0]} on, are")
    temporary = target.with_name(f"{target.name}.{os.getpid()}.{time.monotonic_ns()}")
    with target.open("rb") as old:
        lines = iter(old)
        end = sum(len(line) for line in takewhile(lambda line: _stays(line, iteration), lines))
        if not any(_stays(line, iteration) for line in lines):
            os.truncate(target, end)
            return
        old.seek(0)
        with temporary.open("wb") as new:
            new.writelines(line for line in old if _stays(line, iteration))
    os.replace(temporary, target)


def _stays(line: bytes, iteration: int) -> bool:
    """Is this a whole record of an iteration up to the given one?"""
    found = _ITERATION.match(line)
    return found is not None and line.endswith(b"}\n") and int(found[1]) <= iteration


def _is_damaged(line: bytes, iteration: int) -> bool:
    """Is this no whole record, and not one that the run will repeat either?"""
    found = _ITERATION.match(line)
    return not line.endswith(b"}\n") and (found is None or int(found[1]) <= iteration)


@contextmanager
def writes(flag: str, target: str | Path | None) -> Iterator[None]:
    """Name the flag and the place where something could not be written, such as on a full disk."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror or error}") from error
