"""A planned conversion: written file by file, in parallel, to be continued after a kill.

What is to be written is planned first: every tensor with its shape and what it is made of, dealt out to files of bounded size. A file
depends on nothing but the plan, so workers and ranks write different ones without speaking to each other, one tensor in memory at a
time. All is written into a folder beside the target (TARGET.converting); a file gets its name when it is complete and flushed, and a
note beside it then says so. Whoever is last adds what stands for completeness and gives the folder its name. So a kill at any moment
costs the files under way, the next run of the same command continues, and nothing unfinished has the target's name.

Rejected: writing into the target itself (a folder with half the files looks like a model to many readers).
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trainer.checkpoint.directory import flush_file, flush_folder
from moe_trainer.checkpoint.errors import CheckpointError, StorageError
from moe_trainer.checkpoint.hf_files import bytes_of, table_of
from moe_trainer.checkpoint.hf_names import num_bytes

logger = logging.getLogger(__name__)

_PLAN, _LOCK = "conversion.json", ".finishing"


@dataclass(frozen=True)
class Item:
    """One tensor to be written. make: yields it, in pieces along its first dimension."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]] = field(compare=False)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Job:
    """A planned conversion. target: the folder that appears in the end. source: what tells its source from another one.

    write: (path, items) -> what the index must know of a file. finish: (folder, notes of all files) adds what stands for completeness.
    publish: after the folder has its name. single: the target is the one file.
    """

    target: Path
    source: str
    files: tuple[tuple[str, tuple[Item, ...]], ...]
    write: Callable[[Path, Sequence[Item]], Any]
    finish: Callable[[Path, Mapping[str, Any]], None]
    publish: Callable[[], None] = lambda: None
    single: bool = False

    @property
    def folder(self) -> Path:
        """Where everything is until then."""
        return self.target.with_name(self.target.name + ".converting")

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for _, items in self.files for item in items)

    @property
    def is_complete(self) -> bool:
        """Whether the target has its name."""
        return not self.folder.is_dir() and self.target.exists()


def open_job(job: Job) -> None:
    """Make the folder, or see that what is in it belongs to this job. Raises: CheckpointError."""
    head = {"source": job.source, "files": [name for name, _ in job.files], "bytes": job.num_bytes}
    if job.target.exists() and (job.single or not job.target.is_dir() or any(job.target.iterdir())):
        if not _says(job.target / _PLAN, head):
            raise CheckpointError(f"{job.target} is there already; choose another folder, or remove it")
        _publish(job)  # an earlier run was ended before it had
        return
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        if (job.folder / _PLAN).is_file():
            if json.loads((job.folder / _PLAN).read_text()) != head:
                raise CheckpointError(f"{job.folder} belongs to another conversion, or its source has changed since; remove that folder to begin anew")
        else:
            write_text(job.folder / _PLAN, json.dumps(head))
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, CheckpointError) else StorageError(f"{job.folder} cannot be used: {error}") from error


def _says(path: Path, head: Mapping[str, Any]) -> bool:
    try:
        return json.loads(path.read_text()) == head
    except (OSError, ValueError, RecursionError):
        return False


def _publish(job: Job) -> None:
    flush_folder(job.target.parent)
    job.publish()
    if not job.single:
        (job.target / _PLAN).unlink(missing_ok=True)


def run_share(job: Job, rank: int = 0, world: int = 1, after_each: Callable[[], None] = lambda: None) -> None:
    """Write the files whose number is `rank` modulo `world` and that are not there yet. after_each: is called after every file.

    Raises: CheckpointError.
    """
    for name, items in job.files[rank::world]:
        if not job.is_complete and not _is_done(job.folder, name):
            part = _part(job.folder / name)
            try:
                known = job.write(part, items)
                flush_file(part)
                os.replace(part, job.folder / name)
                write_text(_note(job.folder, name), json.dumps({"bytes": (job.folder / name).stat().st_size, "known": known}))
            except OSError as error:
                if job.is_complete:  # by another process, which has taken this one's file for a rest
                    (job.target / part.name).unlink(missing_ok=True)
                elif not _is_done(job.folder, name):
                    raise StorageError(f"{job.folder / name} cannot be written: {error}") from error
            finally:
                part.unlink(missing_ok=True)
            after_each()


def missing_files(job: Job) -> list[str]:
    """The files that are not written yet."""
    return [] if job.is_complete else [name for name, _ in job.files if not _is_done(job.folder, name)]


def finish_job(job: Job) -> bool:
    """Complete the target if all files are there; whoever comes first does it. Returns: whether the target is complete."""
    if not job.folder.is_dir():
        return job.target.exists()
    try:
        lock = open(job.folder / _LOCK, "w")
    except FileNotFoundError:  # completed since
        return job.target.exists()
    with lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not job.folder.is_dir():
            return job.target.exists()
        if missing_files(job):
            return False
        notes = {name: json.loads(_note(job.folder, name).read_text())["known"] for name, _ in job.files}
        for path in job.folder.glob("*.part-*"):
            path.unlink(missing_ok=True)
        job.finish(job.folder, notes)
        # the plan stays until all is said and done: with it in the target the next run knows what is left
        for path in [_note(job.folder, name) for name in notes] + [job.folder / _LOCK] + ([job.folder / _PLAN] if job.single else []):
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


def _part(path: Path) -> Path:
    """Where this process writes what will be `path`."""
    return path.with_name(f"{path.name}.part-{socket.gethostname()}-{os.getpid()}")


def write_text(path: Path, text: str) -> None:
    """Complete or not at all."""
    part = _part(path)
    part.write_text(text)
    flush_file(part)
    os.replace(part, path)


def deal_out(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Cut a list into runs of at most `most` bytes (one item where that is larger)."""
    runs: list[list[Item]] = []
    size = 0
    for item in items:
        if not runs or size + item.num_bytes > most:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += item.num_bytes
    return runs


def fingerprint(paths: Sequence[Path], **options: Any) -> str:
    """What tells one source, converted one way, from another: names, sizes and times of its files, and the options."""
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return json.dumps([files, {name: str(value) for name, value in sorted(options.items())}])


def write_safetensors(path: Path, items: Sequence[Item]) -> list[str]:
    """A safetensors file. Returns: the names in it."""
    with open(path, "wb") as file:
        file.write(table_of([(item.name, item.dtype, item.shape) for item in items]))
        for item in items:
            written = 0
            for value in item.make():
                written += file.write(bytes_of(value))
            assert written == item.num_bytes, f"{item.name}: {written} bytes, {item.num_bytes} planned"
    return [item.name for item in items]


class Progress:
    """Says from time to time how far a conversion is, and how fast. seconds: between two lines."""

    def __init__(self, job: Job, seconds: float = 10.0):
        self._job, self._seconds = job, seconds
        self._begun = self._told = time.monotonic()
        self._done = job.num_bytes - self._left()
        self._first = self._done

    def _left(self) -> int:
        missing = set(missing_files(self._job))
        return sum(item.num_bytes for name, items in self._job.files if name in missing for item in items)

    def look(self, last: bool = False) -> None:
        """Log a line if it is time for one."""
        now = time.monotonic()
        if last or now - self._told >= self._seconds:
            self._told = now
            self._done = self._job.num_bytes if last else self._job.num_bytes - self._left()
            speed = (self._done - self._first) / max(now - self._begun, 1e-9)
            left = f", {(self._job.num_bytes - self._done) / speed / 60:.0f} min left" if speed and not last else ""
            logger.info("%.2f of %.2f GB, %.0f MB/s%s", self._done / 1e9, self._job.num_bytes / 1e9, speed / 1e6, left)
