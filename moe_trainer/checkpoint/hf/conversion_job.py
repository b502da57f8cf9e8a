"""A planned conversion, written file by file in parallel, which a later run can continue.

The plan lists every tensor with its shape and source, split into files of bounded size. A file depends on the plan
only, so workers and ranks write different files without communication, one tensor in memory at a time. Everything is
written to TARGET.converting; a file gets its final name when it is complete and flushed, and a note next to it records
that. The last process writes the index and renames the folder. A kill loses the files in progress; no incomplete folder
has the target's name.
"""

# Rejected: writing into the target itself. A folder with half of the files looks like a model to many readers.

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trainer.checkpoint.directory import flush_folder
from moe_trainer.checkpoint.errors import CheckpointError, StorageError
from moe_trainer.checkpoint.safetensors_format import safetensors_header, tensor_bytes
from moe_trainer.io import atomic_path, flush_file, temporary_path

logger = logging.getLogger(__name__)

_PLAN, _LOCK = "conversion.json", ".finishing"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write; `make` yields it in slices along its first dimension."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]] = field(compare=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ConversionJob:
    """A planned conversion.

    Attributes:
        target: the folder to create.
        source: the fingerprint of source and options.
        files: name and tensors of every file.
        write: (path, tensors) -> what the index needs to know about a file.
        finish: (folder, notes of all files) writes the index and the completion mark.
        publish: called when the folder has its final name.
        single: whether the target is the only file itself.
    """

    target: Path
    source: str
    files: tuple[tuple[str, tuple[PlannedTensor, ...]], ...]
    write: Callable[[Path, Sequence[PlannedTensor]], Any]
    finish: Callable[[Path, Mapping[str, Any]], None]
    publish: Callable[[], None] = lambda: None
    single: bool = False

    @property
    def folder(self) -> Path:
        return self.target.with_name(self.target.name + ".converting")

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for _, items in self.files for item in items)

    @property
    def is_complete(self) -> bool:
        """Whether the target has its final name."""
        return not self.folder.is_dir() and self.target.exists()


def open_job(job: ConversionJob) -> None:
    """Create the staging folder, or check that it belongs to this job.

    Raises:
        CheckpointError: if the target exists or the folder belongs to another conversion.
    """
    head = {"source": job.source, "files": [name for name, _ in job.files], "bytes": job.num_bytes}
    if job.target.exists() and (job.single or not job.target.is_dir() or any(job.target.iterdir())):
        if not _marker_matches(job.target / _PLAN, head):
            raise CheckpointError(f"{job.target} exists already; choose another folder, or remove it")
        _publish(job)  # an earlier run ended before doing this
        return
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        if (job.folder / _PLAN).is_file():
            if json.loads((job.folder / _PLAN).read_text()) != head:
                raise CheckpointError(
                    f"{job.folder} belongs to another conversion, or its source has changed since; remove that "
                    "folder to start again"
                )
        else:
            write_text(job.folder / _PLAN, json.dumps(head))
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{job.folder} cannot be used: {error}") from error


def _marker_matches(path: Path, head: Mapping[str, Any]) -> bool:
    try:
        return json.loads(path.read_text()) == head
    except (OSError, ValueError, RecursionError):
        return False


def _publish(job: ConversionJob) -> None:
    flush_folder(job.target.parent)
    job.publish()
    if not job.single:
        (job.target / _PLAN).unlink(missing_ok=True)


def write_share(
    job: ConversionJob, rank: int = 0, world_size: int = 1, after_each: Callable[[], None] = lambda: None
) -> None:
    """Write the files whose number is `rank` modulo `world_size` and that do not exist yet.

    `after_each` is called after every file.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    for name, items in job.files[rank::world_size]:
        if not job.is_complete and not _is_done(job.folder, name):
            part = temporary_path(job.folder / name)
            try:
                known = job.write(part, items)
                flush_file(part)
                os.replace(part, job.folder / name)
                write_text(
                    _note(job.folder, name), json.dumps({"bytes": (job.folder / name).stat().st_size, "known": known})
                )
            except OSError as error:
                if job.is_complete:  # by another process, which has taken this one's file for a rest
                    (job.target / part.name).unlink(missing_ok=True)
                elif not _is_done(job.folder, name):
                    raise StorageError(f"{job.folder / name} cannot be written: {error}") from error
            finally:
                part.unlink(missing_ok=True)
            after_each()


def missing_files(job: ConversionJob) -> list[str]:
    """Return the files that are not written yet."""
    return [] if job.is_complete else [name for name, _ in job.files if not _is_done(job.folder, name)]


def finish_job(job: ConversionJob) -> bool:
    """Complete the target if all files are written, under a lock. Return whether the target is complete."""
    if not job.folder.is_dir():
        return job.target.exists()
    try:
        lock = open(job.folder / _LOCK, "w")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # another process has completed it
        return job.target.exists()
    with lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not job.folder.is_dir():
            return job.target.exists()
        if missing_files(job):
            return False
        notes = {name: json.loads(_note(job.folder, name).read_text())["known"] for name, _ in job.files}
        for path in job.folder.glob("*.tmp-*"):
            path.unlink(missing_ok=True)
        job.finish(job.folder, notes)
        # the plan stays until everything is done, because a later run continues from it
        done = [_note(job.folder, name) for name in notes]
        for path in [*done, job.folder / _LOCK, *([job.folder / _PLAN] if job.single else [])]:
            path.unlink(missing_ok=True)
        flush_folder(job.folder)
        if job.single:
            os.replace(job.folder / job.files[0][0], job.target)
            job.folder.rmdir()
        else:
            if job.target.is_dir():
                job.target.rmdir()
            os.rename(job.folder, job.target)
        _publish(job)
    return True


def _note(folder: Path, name: str) -> Path:
    return folder / f".{name}.done"


def _is_done(folder: Path, name: str) -> bool:
    try:
        return json.loads(_note(folder, name).read_text())["bytes"] == (folder / name).stat().st_size
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, and flush it to disk."""
    with atomic_path(path) as part:
        part.write_text(text)
        flush_file(part)


def split_by_size(items: Sequence[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    """Split a list into runs of at most `max_bytes` (one tensor if that is larger)."""
    runs: list[list[PlannedTensor]] = []
    size = 0
    for item in items:
        if not runs or size + item.num_bytes > max_bytes:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += item.num_bytes
    return runs


def fingerprint(paths: Sequence[Path], **options: Any) -> str:
    """Return the identity of a source and its options: names, sizes and times of the files."""
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return json.dumps([files, {name: str(value) for name, value in sorted(options.items())}])


def write_safetensors(path: Path, items: Sequence[PlannedTensor]) -> list[str]:
    """Write a safetensors file. Returns the names in it."""
    with open(path, "wb") as file:
        file.write(safetensors_header([(item.name, item.dtype, item.shape) for item in items]))
        for item in items:
            written = 0
            for value in item.make():
                written += file.write(tensor_bytes(value))
            assert written == item.num_bytes, f"{item.name}: {written} bytes, {item.num_bytes} planned"
    return [item.name for item in items]


class Progress:
    """Logs how far a conversion is and how fast, every `interval_s` seconds."""

    def __init__(self, job: ConversionJob, interval_s: float = 10.0):
        self._job, self._interval_s = job, interval_s
        self._start = self._last_log = time.monotonic()
        self._done = job.num_bytes - self._left()
        self._first = self._done

    def _left(self) -> int:
        missing = set(missing_files(self._job))
        return sum(item.num_bytes for name, items in self._job.files if name in missing for item in items)

    def update(self, last: bool = False) -> None:
        """Log a line if the interval has passed, or if it is the last."""
        now = time.monotonic()
        if last or now - self._last_log >= self._interval_s:
            self._last_log = now
            self._done = self._job.num_bytes if last else self._job.num_bytes - self._left()
            speed = (self._done - self._first) / max(now - self._start, 1e-9)
            left = f", {(self._job.num_bytes - self._done) / speed / 60:.0f} min left" if speed and not last else ""
            logger.info("%.2f of %.2f GB, %.0f MB/s%s", self._done / 1e9, self._job.num_bytes / 1e9, speed / 1e6, left)
