"""Atomic file replacement, files that a resumed run continues, and output streams that survive a full disk."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, TextIO

OutputKind = Literal["folder", "file", "file in a folder that exists"]
"""What a command writes; folders that are missing are created, except for the last kind."""
_USER_ERROR, _READER_LEFT = 2, 141
"""Of ExitCode, which is on the same level as this file."""


def temporary_path(path: str | Path) -> Path:
    """Return where this process writes the new content of `path`: in the same directory, named by host and process."""
    target = Path(path)
    return target.with_name(f"{target.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def is_device(path: str | Path) -> bool:
    """Return whether a path is that of a device or a pipe, such as /dev/stdout, which cannot be replaced by a file."""
    target = Path(path)
    return target.parent == Path("/dev") or (target.exists() and not (target.is_file() or target.is_dir()))


def cannot_write(path: Path) -> bool:
    """Return whether a file surely cannot be written there, which a long command checks before it starts."""
    # a read-only file is replaced
    return path.is_dir() or not os.access(path if is_device(path) else path.absolute().parent, os.W_OK)


def why_unwritable(path: str | Path, kind: OutputKind) -> str | None:
    """Return why a path cannot be written, as a long command checks before it starts; None if it can."""
    if kind != "folder" and os.path.isdir(path):
        return "this is a folder"
    place = Path(path if kind == "folder" else os.path.dirname(path) or ".")
    there = nearest_folder(place)
    if not there.is_dir():
        return f"{there} is no folder"
    if kind == "file in a folder that exists" and there != place.absolute():
        return f"the folder {place} does not exist"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def nearest_folder(place: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())


@contextmanager
def atomic_path(path: str | Path, *, sync: bool = False, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end of the block, or is removed if the block raises.

    A device or pipe, such as /dev/stdout, is not replaced: the block gets `path` itself.

    Args:
        path: the file to replace.
        sync: flush the content to disk before the rename. The caller flushes the directory if that matters, too.
        temporary: the path to yield instead of `temporary_path(path)`; on the same file system as `path`.

    Raises:
        OSError: if the file cannot be replaced.
    """
    if is_device(path):
        yield Path(path)
        return
    temporary = temporary or temporary_path(path)
    try:
        yield temporary
        if sync:
            flush_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def atomic_write(path: str | Path, mode: str = "w", *, sync: bool = False) -> Iterator[IO[Any]]:
    """Open a file for writing whose content replaces `path` at the end of the block; see `atomic_path`.

    Args:
        path: the file to replace.
        mode: "w" for text in UTF-8, "wb" for bytes.
        sync: flush the content to disk before the rename.
    """
    with (
        atomic_path(path, sync=sync) as temporary,
        open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file,
    ):
        yield file


def flush_file(path: str | Path) -> None:
    """Flush a file's content to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class ResumableFile:
    """An append-only file that a resumed run continues. An append overwrites what a failed append left after the end.

    Args:
        path: the file.
        end: how many bytes of an older file to keep.
    """

    def __init__(self, path: Path, end: int = 0):
        self.path, self.end = path, end

    def append(self, data: bytes) -> int:
        """Write at the end.

        Returns:
            The offset of the data.

        Raises:
            OSError: if the write fails. The end then does not move.
        """
        begin = self.end
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.truncate(begin)
            file.seek(begin)
            file.write(data)
        self.end = begin + len(data)
        return begin


def resume_offset(
    path: Path, key: str, value: int, on_kept: Callable[[dict[str, Any]], None] = lambda record: None
) -> int:
    """Return the offset in bytes at which a resumed run continues a JSONL file; 0 if there is no file.

    This is the first line whose `key` is not below `value`, or that is torn. The keys must ascend.

    Args:
        path: the file.
        key: the field that orders the records.
        value: the first value that the resumed run writes.
        on_kept: called with every record before the offset.

    Raises:
        OSError: if the file cannot be read.
    """
    end = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    if not line.endswith(b"\n") or record[key] >= value:
                        break
                except (ValueError, LookupError, TypeError, RecursionError):
                    break
                on_kept(record)
                end += len(line)
    except FileNotFoundError:
        return 0
    return end


class BestEffortStream:
    """A stdout or stderr wrapper that ignores disk errors, so that a full log disk cannot end a run.

    Text that the stream cannot buffer until the disk accepts it again is lost. A closed pipe is still an error, because
    nothing reads the output any more.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write like the wrapped stream, without its disk errors."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush like the wrapped stream, without its disk errors."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass  # the stream keeps the text in its buffer and tries again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class CommandOutput:
    """The stdout of a command, which ends where it cannot be written: without a word if its reader has left (`| head`).

    SystemExit ends it, which no handler takes for the error of another file.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write like the wrapped stream."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Flush like the wrapped stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> NoReturn:
        # the stream tries to write what it holds until the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(_READER_LEFT) from None
        name = os.path.basename(sys.argv[0])
        print(f"{name}: cannot write to the standard output: {error.strerror}", file=sys.stderr, flush=True)
        raise SystemExit(_USER_ERROR) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def command_output() -> Iterator[None]:
    """Make stdout a CommandOutput, and write what it holds at the end."""
    output: Any = CommandOutput(sys.stdout)
    try:
        with redirect_stdout(output):
            yield
    finally:
        output.flush()
