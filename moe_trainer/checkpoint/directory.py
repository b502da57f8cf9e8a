"""Folders and small files of a checkpoint directory, and how a new checkpoint comes into being without ever being half there.

    SAVE/iter_0000010/                       complete, or not there
    SAVE/iter_0000015.tmp-<host>-<pid>/      being written; left behind by a killed run, removed at the next save
    SAVE/iter_0000010.old-<host>-<pid>/      replaced by a new save of the same iteration, about to be removed
    SAVE/latest_checkpointed_iteration.txt   the tracker: a number, or the word release
    SAVE/progress.txt                        with --log-progress
    SAVE/.in_use                             locked by the run that saves here

A save writes everything beside, flushes it to disk, writes metadata.json last, renames, and then replaces the tracker.
Both renames are atomic, so a kill leaves the tracker pointing at a complete checkpoint at every moment. When the same
iteration is saved again, the old folder steps aside for an instant; `find` takes it back if a kill falls between.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
from pathlib import Path

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.errors import CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
COMPLETE = "metadata.json"
INDEX = ".metadata"
INTEGRITY = "integrity.json"
LOCK = ".in_use"
_ITERATION = re.compile(r"^iter_(\d{7,})$")
_ASIDE = re.compile(r"^iter_(\d{7,})\.(tmp|old)-(.+)-(\d+)$")
_PARTIAL_TRACKER = re.compile(rf"^{re.escape(TRACKER)}\.tmp-(.+)-(\d+)$")
# a leftover of another host is taken for dead when nothing in it has changed for this long
_FOREIGN_AGE_SECONDS = 900.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt", "chat_template.jinja")


def folder_name(iteration: int) -> str:
    """iter_0000010"""
    return f"iter_{iteration:07d}"


def aside(directory: Path, iteration: int, kind: str) -> Path:
    """Where this process keeps an unfinished ("tmp") or replaced ("old") checkpoint."""
    return directory / f"{folder_name(iteration)}.{kind}-{socket.gethostname()}-{os.getpid()}"


MAX_ITERATION_DIGITS = 18


def read_tracker(directory: Path) -> int | str | None:
    """The tracker's iteration, or "release", or None when there is no tracker.

    Raises: CheckpointError when it holds anything else.
    """
    path = directory / TRACKER
    try:
        text = regular_file(path).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if text == "release":
        return text
    if not text.isdecimal() or len(text) > MAX_ITERATION_DIGITS:
        raise CheckpointError(f"{path} holds {text[:40]!r}; an iteration number or the word release is needed. "
                              + describe_complete(directory))
    return int(text)


def write_tracker(directory: Path, iteration: int | str) -> None:
    """Replace the tracker at once, and flush it."""
    partial = directory / f"{TRACKER}.tmp-{socket.gethostname()}-{os.getpid()}"
    with open(partial, "w") as stream:
        stream.write(str(iteration))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, directory / TRACKER)
    flush_folder(directory)


def flush_folder(folder: Path) -> None:
    """Put the folder's entries (not the files' content) on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_file(path: Path) -> None:
    """Put a file's content on disk."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def is_complete(folder: Path) -> bool:
    """Whether a folder has the mark of a complete distributed checkpoint, or is one of the legacy format, which has no mark."""
    return (folder / COMPLETE).is_file() or any(folder.glob("mp_rank_*"))


def complete_iterations(directory: Path) -> list[int]:
    """Iterations whose folder holds a complete checkpoint, by its mark, ascending."""
    found = []
    if directory.is_dir():
        for entry in directory.iterdir():
            match = _ITERATION.match(entry.name)
            if match and is_complete(entry) and ((entry / INDEX).is_file() or not (entry / COMPLETE).is_file()):
                found.append(int(match[1]))
    return sorted(found)


def describe_complete(directory: Path, without: int | None = None) -> str:
    """A sentence on what can be loaded instead."""
    others = [iteration for iteration in complete_iterations(directory) if iteration != without]
    if not others:
        return f"No other complete checkpoint is in {directory}."
    shown = ", ".join(map(str, others[-5:]))
    return (f"Complete checkpoints in {directory}: iteration {shown}. "
            f"To go on from the latest of them: --ckpt-step {others[-1]}")


def advice(folder: Path) -> str:
    """What to load instead of this checkpoint folder."""
    match = _ITERATION.match(folder.name)
    return describe_complete(folder.parent, int(match[1]) if match else None)


def publish(temporary: Path, directory: Path, iteration: int) -> None:
    """Give a complete temporary folder its final name and make the tracker point at it."""
    final = directory / folder_name(iteration)
    replaced = None
    if final.exists():
        replaced = aside(directory, iteration, "old")
        remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    flush_folder(directory)
    write_tracker(directory, iteration)
    if replaced is not None:
        remove(replaced)


def remove(folder: Path) -> None:
    """Delete a folder if it is there; what cannot be deleted is named in a warning."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("cannot remove %s: %s", folder, error)


def retire(directory: Path, iteration: int) -> None:
    """Delete a complete checkpoint; a kill half-way leaves a folder that the next save cleans away."""
    final = directory / folder_name(iteration)
    if final.is_dir():
        moved = aside(directory, iteration, "old")
        remove(moved)
        (final / COMPLETE).unlink(missing_ok=True)
        os.rename(final, moved)
        remove(moved)


def take_back(directory: Path, iteration: int) -> bool:
    """Restore a complete checkpoint that a kill caught between the two renames of `publish`.

    Returns: whether there was one.
    """
    final = directory / folder_name(iteration)
    if final.exists() or not directory.is_dir():
        return False
    for entry in sorted(directory.iterdir()):
        match = _ASIDE.match(entry.name)
        if match and int(match[1]) == iteration and is_complete(entry):
            try:
                os.rename(entry, final)
            except OSError:
                return final.exists()  # another process was faster
            logger.warning("%s was being replaced when its run ended; restored from %s", final, entry.name)
            return True
    return False


def clean(directory: Path) -> None:
    """Remove what dead saves have left behind. Leaves alone what a live process of this host may still write."""
    for entry in list(directory.iterdir()):
        folder, tracker = _ASIDE.match(entry.name), _PARTIAL_TRACKER.match(entry.name)
        if tracker and not _alive(entry, tracker[1], int(tracker[2])):
            entry.unlink()
        elif folder and not _alive(entry, folder[3], int(folder[4])):
            final = directory / folder_name(int(folder[1]))
            if folder[2] == "old" and not final.exists() and is_complete(entry):
                os.rename(entry, final)
            else:
                remove(entry)


def _alive(entry: Path, host: str, pid: int) -> bool:
    if host != socket.gethostname():
        inside = entry.iterdir() if entry.is_dir() else ()
        newest = max(path.stat().st_mtime for path in (entry, *inside))
        return time.time() - newest < _FOREIGN_AGE_SECONDS
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def claim(directory: Path) -> str | None:
    """Lock the folder for this process, until `release` or until it ends in whatever way.

    The lock is the kernel's (a POSIX record lock, which NFS knows too): it goes with its process, so none is ever left over.
    The descriptor stays open on purpose. On a file system without locks nothing is claimed, which is logged.
    Returns: None, or who holds the lock.
    """
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return path.read_text(errors="replace").strip() or "it has not said who it is"
            logger.warning("%s cannot be locked (%s): that no other run saves there is not checked", path, error.strerror)
            return None
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)  # another run has ended and removed the file between the two calls
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
                          f"{_job()}\n".encode(), 0)
    return None


def release(directory: Path) -> None:
    """Remove the file of this process's lock at the end of a run; the lock itself ends with the process."""
    try:
        if f"host {socket.gethostname()}, process {os.getpid()}," in (directory / LOCK).read_text(errors="replace"):
            (directory / LOCK).unlink()
    except OSError as error:
        logger.debug("%s is left behind: %s", directory / LOCK, error)


def file_system(directory: Path) -> int:
    """The number of the file system that holds the folder, or would hold it."""
    return next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists()).stat().st_dev


def still_there(directory: Path, number: int | None) -> None:
    """Refuse to write where the disk of the save folder should be and is not: under a mount point lies a folder of another disk.

    number: what `file_system` said at the start of the run. A disk that comes back may have another number, but it has
    the file of the run's lock; a folder that somebody has deleted has the number, and is made again.
    Raises: OSError.
    """
    if number is not None and not (directory / LOCK).exists() and file_system(directory) != number:
        raise OSError("another file system is there than at the start of the run: the one of the save folder is no longer mounted")


def _job() -> str:
    return f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""


def append_progress(directory: Path, num_ranks: int, text: str) -> None:
    """Add a line to progress.txt: time, job, ranks, event, tab-separated."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    job = os.environ.get("SLURM_JOB_ID", "")
    with open(directory / "progress.txt", "a") as stream:
        stream.write(f"{stamp}\tJob ID: {job}\t# GPUs: {num_ranks}\t{text}\n")


def tokenizer_files(*given: str | None) -> tuple[Path, ...]:
    """The tokenizer's own files behind --tokenizer-model, --vocab-file, --merge-file: what a checkpoint keeps a copy of."""
    found: list[Path] = []
    for path in (Path(text) for text in given if text):
        if path.is_dir():
            found += [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
        elif path.is_file():
            found.append(path)
    return tuple(found)
