"""Folders and small files of a checkpoint directory, and how a checkpoint is committed atomically.

SAVE/iter_0000010/                       complete
SAVE/iter_0000015.tmp-<host>-<pid>/      being written; a killed run leaves it, and the next save removes it
SAVE/iter_0000010.old-<host>-<pid>/      replaced by a new save of the same iteration, about to be removed
SAVE/iter_0000005.deleted-<host>-<pid>/  deleted, about to be removed
SAVE/latest_checkpointed_iteration.txt   the tracker: a number, or the word release
SAVE/progress.txt                        with --log-progress
SAVE/.in_use                             locked by the run that saves here
"""

# A save writes everything to a staging folder, flushes it to disk, writes metadata.json last, renames the folder, and
# then replaces the tracker. Both renames are atomic, so the tracker names a complete checkpoint at every moment. When
# the same iteration is saved again, the old folder is renamed first; `checkpoint_folder` finds it if a kill falls
# between the two renames, and `recover_interrupted_rename` restores its name where saving or loading starts.

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from arguments.checkpoint_args import TOKENIZER_FILES
from arguments.regular_file import regular_file
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.io import atomic_write

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
COMPLETE = "metadata.json"
INDEX = ".metadata"
INTEGRITY = "integrity.json"
LOCK = ".in_use"
_FLOCK = struct.Struct("hhqqi0q")
"""Linux's struct flock: type, whence, start, length, process."""
_ITERATION = re.compile(r"^iter_(\d{7,})$")
_STAGING = re.compile(r"^iter_(\d{7,})\.(tmp|old|deleted)-(.+)-(\d+)$")
_PARTIAL_TRACKER = re.compile(rf"^{re.escape(TRACKER)}\.tmp-(.+)-(\d+)$")
# a temporary of another host is stale when nothing in it has changed for this long
_STALE_AGE_S = 900.0


def folder_name(iteration: int) -> str:
    """Return the name of an iteration's folder, as iter_0000010."""
    return f"iter_{iteration:07d}"


def staging_path(directory: Path, iteration: int, kind: str) -> Path:
    """Return where this process keeps an unfinished ("tmp"), replaced ("old") or "deleted" checkpoint."""
    return directory / f"{folder_name(iteration)}.{kind}-{socket.gethostname()}-{os.getpid()}"


MAX_ITERATION_DIGITS = 18


def is_same_folder(first: str | Path, second: str | Path) -> bool:
    """Whether two paths name the same folder, which need not exist."""
    return os.path.realpath(first) == os.path.realpath(second)


def read_tracker(directory: Path) -> int | str | None:
    """Return the tracker's iteration, or "release", or None without a tracker.

    Raises:
        CheckpointError: if it holds anything else.
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
        raise CheckpointError(
            f"{path} holds {text[:40]!r}; an iteration number or the word release is needed. "
            + describe_complete(directory)
        )
    return int(text)


def write_tracker(directory: Path, iteration: int | str) -> None:
    """Replace the tracker atomically and flush it to disk."""
    with atomic_write(directory / TRACKER, sync=True) as file:
        file.write(str(iteration))
    flush_folder(directory)


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries (not the files' content) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(folder: Path) -> bool:
    """Whether a folder has the completion mark, or is in the legacy format, which has no mark."""
    return (folder / COMPLETE).is_file() or any(folder.glob("mp_rank_*"))


def complete_iterations(directory: Path) -> list[int]:
    """Return the iterations whose folder has the completion mark, ascending."""
    numbers = []
    if directory.is_dir():
        for entry in directory.iterdir():
            match = _ITERATION.match(entry.name)
            if match and is_complete(entry) and ((entry / INDEX).is_file() or not (entry / COMPLETE).is_file()):
                numbers.append(int(match[1]))
    return sorted(numbers)


def describe_complete(directory: Path, without: int | None = None) -> str:
    """Return a sentence that names the checkpoints that can be loaded instead."""
    others = [iteration for iteration in complete_iterations(directory) if iteration != without]
    if not others:
        return f"No other complete checkpoint is in {directory}."
    shown = ", ".join(map(str, others[-5:]))
    return (
        f"Complete checkpoints in {directory}: iteration {shown}. "
        f"To resume from the latest of them: --ckpt-step {others[-1]}"
    )


def describe_alternatives(folder: Path) -> str:
    """Return a sentence that names what to load instead of this checkpoint folder."""
    match = _ITERATION.match(folder.name)
    return describe_complete(folder.parent, int(match[1]) if match else None)


def publish(temporary: Path, directory: Path, iteration: int) -> None:
    """Rename a complete staging folder to its final name and update the tracker."""
    final = directory / folder_name(iteration)
    replaced = None
    if final.exists():
        replaced = staging_path(directory, iteration, "old")
        remove_directory(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    flush_folder(directory)
    write_tracker(directory, iteration)
    if replaced is not None:
        remove_directory(replaced)


def remove_directory(folder: Path) -> None:
    """Delete a folder if it exists; log a warning if that fails."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("cannot remove %s: %s", folder, error)


def delete_checkpoint(directory: Path, iteration: int) -> None:
    """Delete a complete checkpoint. After a kill it is whole or no checkpoint, and the next save removes the rest."""
    final = directory / folder_name(iteration)
    if final.is_dir():
        moved = staging_path(directory, iteration, "deleted")
        remove_directory(moved)
        os.rename(final, moved)
        remove_directory(moved)


def interrupted_rename(directory: Path, iteration: int) -> Path | None:
    """Return the complete checkpoint that a kill caught between the two renames of `publish`, if there is one."""
    if not directory.is_dir() or (directory / folder_name(iteration)).exists():
        return None
    for entry in sorted(directory.iterdir()):
        match = _STAGING.match(entry.name)
        if match and int(match[1]) == iteration and match[2] != "deleted" and is_complete(entry):
            return entry
    return None


def checkpoint_folder(directory: Path, iteration: int) -> Path:
    """Return the folder of an iteration, under whichever name an interrupted rename left it. Changes nothing."""
    return interrupted_rename(directory, iteration) or directory / folder_name(iteration)


def recover_interrupted_rename(directory: Path, iteration: int) -> None:
    """Give a checkpoint that `interrupted_rename` finds its final name again."""
    entry, final = interrupted_rename(directory, iteration), directory / folder_name(iteration)
    if entry is None:
        return
    try:
        os.rename(entry, final)
    except OSError:
        if not final.exists():  # else another process was faster
            raise
        return
    logger.warning("%s was being replaced when its run ended; restored from %s", final, entry.name)


def remove_stale(directory: Path) -> None:
    """Remove what killed saves left, unless a live process of this host may still write it."""
    for entry in list(directory.iterdir()):
        folder, tracker = _STAGING.match(entry.name), _PARTIAL_TRACKER.match(entry.name)
        if tracker and not _alive(entry, tracker[1], int(tracker[2])):
            entry.unlink()
        elif folder and not _alive(entry, folder[3], int(folder[4])):
            final = directory / folder_name(int(folder[1]))
            if folder[2] == "old" and not final.exists() and is_complete(entry):
                os.rename(entry, final)
            else:
                remove_directory(entry)


def _alive(entry: Path, host: str, pid: int) -> bool:
    if host != socket.gethostname():
        inside = entry.iterdir() if entry.is_dir() else ()
        newest = max(path.stat().st_mtime for path in (entry, *inside))
        return time.time() - newest < _STALE_AGE_S
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def acquire_lock(directory: Path) -> str | None:
    """Lock the folder for this process until `release_lock` or the end of the process.

    The lock is a POSIX record lock of the kernel, which NFS supports: it ends with its process. The descriptor stays
    open on purpose. On a file system without locks a warning is logged and nothing is locked.

    Returns:
        None, or a description of the process that holds the lock.

    Raises:
        OSError: if the file cannot be made, or its name is that of a link or a device.
    """
    path = directory / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return path.read_text(errors="replace").strip() or "unknown process"
            logger.warning("%s cannot be locked (%s): cannot check that no other run saves there", path, error.strerror)
            return None
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            break
        os.close(descriptor)  # another run has ended and removed the file between the two calls
    os.ftruncate(descriptor, 0)
    job = f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}, since {since}{job}\n".encode(), 0)
    return None


def holds_lock(directory: Path) -> bool:
    """Return whether the lock of a folder is this process's. For its end: closing the file gives the lock up."""
    with suppress(OSError), open(directory / LOCK, "r+", errors="replace") as file:
        return _is_own_lock(file)
    return False


def is_locked(directory: Path) -> bool | None:
    """Return whether another process holds the lock of a folder, without taking it.

    Never call it in the process that holds the lock: closing the file would give the lock up.

    Returns:
        None if there is no lock, or the kernel of another machine would have to know it.
    """
    if sys.platform != "linux":
        return None
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with suppress(OSError, ValueError):
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, errors="replace") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            if _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))[0] != fcntl.F_UNLCK:
                return True
            return False if file.read().startswith(f"host {socket.gethostname()}, ") else None
    return None


def release_lock(directory: Path) -> None:
    """Remove the file of this process's lock; the lock itself ends with the process."""
    path = directory / LOCK
    try:
        with open(path, "r+", errors="replace") as file:
            if _is_own_lock(file):
                path.unlink()
    except OSError as error:
        logger.debug("%s is not removed: %s", path, error)


def _is_own_lock(file: TextIO) -> bool:
    """Whether this process made the file of a lock, and no other process holds the lock.

    Containers of one node may have the same host name and process number, so only the kernel knows the holder.
    """
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return False
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return f"host {socket.gethostname()}, process {os.getpid()}," in file.read()


def filesystem_id(directory: Path) -> int:
    """Return the device number of the file system that holds the folder, or would hold it."""
    path = directory.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists()).stat().st_dev


def check_filesystem_mounted(directory: Path, number: int | None) -> None:
    """Check that the file system of the save folder is still mounted.

    A file system that is mounted again may have another `number` (see `filesystem_id`), but has the file of the run's
    lock. A folder that was deleted has the same number, and is created again.

    Raises:
        OSError: if another file system is mounted there.
    """
    if number is not None and not (directory / LOCK).exists() and filesystem_id(directory) != number:
        raise OSError(
            "the file system of the save folder is no longer mounted: another one is there than at the start of the run"
        )


def append_progress(directory: Path, num_ranks: int, text: str) -> None:
    """Add a line to progress.txt: time, job, ranks, event, tab-separated."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    job = os.environ.get("SLURM_JOB_ID", "")
    with open(directory / "progress.txt", "a") as stream:
        stream.write(f"{stamp}\tJob ID: {job}\t# GPUs: {num_ranks}\t{text}\n")


def tokenizer_files(*paths: str | None) -> tuple[Path, ...]:
    """Return the files of --tokenizer-model, --vocab-file and --merge-file, which a checkpoint stores a copy of."""
    files: list[Path] = []
    for path in (Path(text) for text in paths if text):
        if path.is_dir():
            files += [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        elif path.is_file():
            files.append(path)
    return tuple(files)
