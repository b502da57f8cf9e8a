"""Token files in object storage, read through fsspec (s3:// needs s3fs, gs:// gcsfs, msc:// multi-storage-client).

The index of a dataset is copied to the local cache folder as a whole, where it is memory-mapped like any other. The
.bin file is read by blocks of fixed size, which are files of the cache folder too; the oldest go when they exceed the
bound. Processes of one node may share the folder: a block file is complete when it has its name, and a process that
misses one reads the object. The names hold the version of the object, so that a run never finds blocks of an older one.

A read that fails, takes too long or ends early is repeated after a pause that doubles. Reading ahead is the caller's
decision (`ObjectFile.prefetch`); threads of the store carry it out, and threads are daemons, so that a run may end at
any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from arguments.data import DataArgs
from moe_trainer.errors import UserError
from moe_trainer.io import atomic_path, atomic_write

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
MAX_ATTEMPTS = 8
TIMEOUT_S = 60.0
_FIRST_PAUSE_S = 0.5
_UNWRITABLE_S = 60.0
"""After an error nothing is written to the cache for this time."""
_NUM_THREADS = 16
_COPY_BYTES = 8 << 20
_PACKAGES = MappingProxyType({"s3": "s3fs", "gs": "gcsfs", "msc": "multi-storage-client[fsspec]"})
_NON_RETRYABLE = ("FileNotFoundError", "PermissionError", "NoCredentialsError", "PartialCredentialsError")
"""Errors that another attempt does not cure."""


def is_remote(path: str) -> bool:
    """Return whether a path names an object: s3://bucket/key, gs://..., msc://..."""
    return "://" in path


def describe_version(url: str) -> str:
    """Return a text that changes when the object does.

    Raises:
        UserError: if the object cannot be read.
    """
    return _Object(url).version


def list_objects(pattern: str) -> list[str]:
    """Return the objects that a name or pattern such as s3://bucket/a/*.jsonl means, in alphabetical order.

    Raises:
        UserError: if the store cannot be read.
    """
    files, path = _open_file_system(pattern)
    protocol = pattern.partition("://")[0]
    names = _retry(pattern, "cannot be listed", lambda: _call(files, "glob", path))
    return [f"{protocol}://{name}" for name in sorted(names)]


def open_reader(url: str, versions: dict[str, str]) -> io.BufferedReader:
    """Open an object for reading in order, without the cache; reads that fail are repeated.

    Args:
        url: of the object.
        versions: of the objects that the caller has opened before, by their names; this one is added.

    Raises:
        UserError: if there is none, it cannot be read, or it is not the version of before.
    """
    source = _Object(url)
    _check_same(url, versions.setdefault(url, source.version), source.version)
    return io.BufferedReader(_RawObject(source), _COPY_BYTES)


class _Object:
    """One object of a file system of fsspec: its size and version, and reads that are repeated if they fail."""

    def __init__(self, url: str):
        self.url = url
        self._files, self._path = _open_file_system(url)
        self._info = _retry(url, "its size cannot be read", lambda: _call(self._files, "info", self._path))
        self.size, self.version = int(self._info["size"] or 0), _get_version(self._info)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of the version that was opened.

        Raises:
            UserError: if that fails several times, or the object was replaced.
        """

        def attempt() -> bytes:
            try:
                data = self._read_version(begin, end)
                if len(data) != end - begin:
                    raise EOFError(f"{len(data)} of {end - begin} bytes arrived")
                return data
            except TimeoutError:
                raise
            except (EOFError, OSError):
                with suppress(OSError):  # another attempt does not bring the version back
                    self._check_now()
                raise

        return _retry(self.url, f"bytes {begin} to {end} cannot be read", attempt)

    def _read_version(self, begin: int, end: int) -> bytes:
        """Read bytes if the object is still the one that was opened."""
        if "s3" in self._files.protocol and "ETag" in self._info:
            return _await(self._files, self._read_s3, begin, end, timeout=None)
        data = _call(self._files, "cat_file", self._path, start=begin, end=end)
        self._check_now()  # reads have no condition; a version that is the same afterwards was so before
        return data

    async def _read_s3(self, begin: int, end: int) -> bytes:
        """Read bytes on the condition of the ETag; a slow answer has time as long as something arrives."""
        from asyncio import wait_for

        bucket, key, version = self._files.split_path(self._path)
        given = {"VersionId": version} if version else {}
        request = self._files._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", IfMatch=self._info["ETag"], **given
        )
        async with (await wait_for(request, TIMEOUT_S))["Body"] as body:
            parts = []
            while part := await wait_for(body.read(BLOCK_BYTES), TIMEOUT_S):
                parts.append(part)
        return b"".join(parts)

    def _check_now(self) -> None:
        _check_same(self.url, self.version, _get_version(_call(self._files, "info", self._path)))


def _retry(url: str, problem: str, attempt: Callable[[], Any]) -> Any:
    """Return the result of the first attempt that succeeds, after pauses that double.

    Raises:
        UserError: if all fail, or one with an error that remains.
    """
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # every file system has its own
            kind = type(error).__name__
            if kind == "FileNotFoundError":
                raise UserError(f"{url}: no such object") from None
            message = f"{url}: {problem} ({kind}: {error})"
            if kind in _NON_RETRYABLE:
                raise UserError(message) from None
            if number == MAX_ATTEMPTS:
                raise UserError(f"{message}; {MAX_ATTEMPTS} attempts were made") from None
            pause = _FIRST_PAUSE_S * 2 ** (number - 1)
            logger.warning("%s; attempt %d follows in %.3g s", message, number + 1, pause)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _call(files: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a file system, for TIMEOUT_S at most where it is asynchronous."""
    if not files.async_impl:
        return getattr(files, method)(*args, **kwargs)
    return _await(files, getattr(files, f"_{method}"), *args, timeout=TIMEOUT_S, **kwargs)


def _await(files: Any, function: Callable[..., Any], *args: Any, timeout: float | None, **kwargs: Any) -> Any:
    from fsspec.asyn import sync

    return sync(files.loop, function, *args, timeout=timeout, **kwargs)


def _get_version(info: Mapping[str, Any]) -> str:
    """Return size and tag of an object, by whatever name its store has for the tag."""
    tags = (info.get(name) for name in ("ETag", "etag", "generation", "LastModified", "mtime", "created"))
    return f"{int(info['size'] or 0)} {next(filter(None, tags), None)}"


def _open_file_system(url: str) -> tuple[Any, str]:
    protocol, _, path = url.partition("://")
    if protocol in ("file", "local"):
        raise UserError(f"{url} is no object: name local files by their path alone, {path}")
    bucket, *folders = path.split("/")
    if not bucket or {".", ".."} & {bucket, *folders}:  # the cache has the same folders
        raise UserError(f"{url}: needed {protocol}://BUCKET/KEY without '.' and '..' between slashes")
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": 10, "read_timeout": TIMEOUT_S / 2, "max_pool_connections": 2 * _NUM_THREADS}
        options["config_kwargs"] = {**limits, "retries": {"total_max_attempts": 1}}
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else f"known are {', '.join(_PACKAGES)}"
        raise UserError(f"{url}: {protocol}:// cannot be read ({error}); {hint}") from None


def _check_same(url: str, before: str, now: str) -> None:
    if before != now:
        raise UserError(
            f"{url}: the object was replaced while it is in use (size and version were {before}, now they are {now}); "
            "restore it and resume, or resume with the new one"
        )


class _RawObject(io.RawIOBase):
    def __init__(self, source: _Object):
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._source.size)
        data = self._source.read(self._at, end) if end > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class ObjectStore:
    """Local cache of the objects of a run, and the threads that fill it.

    Args:
        folder: of the cache; created if it is missing.
        max_bytes: bound of the blocks of .bin files, over all objects and all processes that share the folder. Indices
            come in addition.
    """

    def __init__(self, folder: str, max_bytes: int):
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._lock = threading.Lock()  # of the list of threads; the caller of submit must not wait for a disk
        self._write_lock = threading.Lock()
        self._since_check = 0
        self._unwritable_until = -math.inf
        self._tasks: SimpleQueue[tuple[Future, Callable[[], Any]]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def copy_index(self, url: str) -> str:
        """Return the path of a complete local copy of an object, made unless there is one of the same version.

        Raises:
            UserError: if the object cannot be read, or the copy not be written.
        """
        source, target = _Object(url), self._folder / _relative_path(url)
        tag = target.with_name(f"{target.name}.version")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock_file(target.with_name(f"{target.name}.lock")):
                if not (_read_text(tag) == source.version and target.exists() and target.stat().st_size == source.size):
                    tag.unlink(missing_ok=True)
                    with atomic_path(target, sync=True) as temporary:  # the tag must not outlive it
                        self._copy(source, temporary)
                    with atomic_write(tag) as file:
                        file.write(source.version)
        except OSError as error:
            raise UserError(f"--object-storage-cache-path: {target} cannot be written ({error.strerror})") from None
        return str(target)

    def open(self, url: str) -> ObjectFile:
        """Open an object for reading by blocks.

        Raises:
            UserError: if there is none, or it cannot be read.
        """
        source = _Object(url)
        digest = hashlib.blake2b(f"{source.version} {BLOCK_BYTES}".encode(), digest_size=8).hexdigest()
        return ObjectFile(self, source, self._folder / "blocks" / _relative_path(url) / digest)

    def submit(self, task: Callable[[], Any]) -> Future:
        """Run a task on one of the store's threads."""
        future: Future = Future()
        self._tasks.put((future, task))
        with self._lock:
            if len(self._threads) < _NUM_THREADS:
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()
        return future

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    def _copy(self, source: _Object, path: Path) -> None:
        with open(path, "wb") as file:

            def copy(begin: int) -> None:
                data = source.read(begin, min(begin + _COPY_BYTES, source.size))
                os.pwrite(file.fileno(), data, begin)

            futures = [self.submit(partial(copy, begin)) for begin in range(0, source.size, _COPY_BYTES)]
            try:
                for future in futures:
                    future.result()
            finally:  # no thread may write once the file is closed and its descriptor belongs to another one
                for future in futures:
                    future.cancel()
                wait(futures)

    @property
    def is_writable(self) -> bool:
        """Whether blocks are stored; not for some time after an error."""
        return time.monotonic() >= self._unwritable_until

    def write_block(self, path: Path, data: bytes) -> None:
        """Remove old blocks where the bound needs it, and add one. A full disk only costs speed."""
        with self._write_lock:
            if not self.is_writable:
                return
            self._since_check += len(data)
            if self._since_check >= self._max_bytes // 64:
                self._since_check = 0
                self._remove_oldest(self._max_bytes - max(len(data), self._max_bytes // 64))  # what comes until then
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path, "wb") as file:
                    file.write(data)
            except OSError as error:
                self._unwritable_until = time.monotonic() + _UNWRITABLE_S
                logger.warning(
                    "--object-storage-cache-path %s: cannot be written (%s); blocks are read again every time, and "
                    "writing is tried again in %.3g s",
                    self._folder,
                    error.strerror,
                    _UNWRITABLE_S,
                )

    def _remove_oldest(self, max_bytes: int) -> None:
        blocks = []
        for path in (self._folder / "blocks").rglob("*"):
            with suppress(OSError):  # another process may remove it too
                status = path.stat()
                if path.is_file():
                    blocks.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in blocks) - max_bytes
        for _, size, path in sorted(blocks):
            if excess <= 0:
                return
            with suppress(OSError):
                path.unlink()
            excess -= size


def make_object_store(data: DataArgs) -> ObjectStore | None:
    """Return what reads data in object storage, None without --object-storage-cache-path."""
    if data.object_storage_cache_path is None:
        return None
    return ObjectStore(data.object_storage_cache_path, int(data.object_storage_cache_gb * 2**30))


class ObjectFile:
    """Random reads of one object through the blocks of the cache. `ObjectStore.open` makes one."""

    def __init__(self, store: ObjectStore, source: _Object, folder: Path):
        self.size = source.size
        self._store, self._source, self._folder = store, source, folder
        self._lock = threading.Lock()
        self._pending: dict[int, Future] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset` on, fewer at the end of the object.

        Raises:
            UserError: if the object cannot be read.
        """
        end = min(offset + length, self.size)
        futures = self._request_missing(offset, end)
        numbers = range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        return b"".join(self._read_block(number, offset, end, futures.get(number)) for number in numbers)

    def prefetch(self, offset: int, length: int) -> None:
        """Start reading blocks that are not in the cache, if it can hold them."""
        if self._store.is_writable:
            self._request_missing(offset, min(offset + length, self.size))

    def _request_missing(self, begin: int, end: int) -> dict[int, Future]:
        numbers = range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        return {number: self._request(number) for number in numbers if not self._path(number).exists()}

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _read_block(self, number: int, offset: int, end: int, requested: Future | None) -> bytes:
        """Return the part of [offset, end) that lies in a block."""
        first = number * BLOCK_BYTES
        begin, stop = max(offset - first, 0), min(end - first, BLOCK_BYTES)
        size = min(BLOCK_BYTES, self.size - first)
        if requested is not None:
            return requested.result()[begin:stop]
        with suppress(OSError), open(self._path(number), "rb") as file:
            if os.fstat(file.fileno()).st_size == size:  # a crash of the machine may leave an empty file
                os.utime(file.fileno())  # the bound removes what was not used for the longest time
                return os.pread(file.fileno(), stop - begin, begin)
        return self._request(number).result()[begin:stop]

    def _request(self, number: int) -> Future:
        """Read a block on a thread of the store; several requests are one."""
        with self._lock:
            if number not in self._pending:
                self._pending[number] = self._store.submit(partial(self._fetch, number))
            return self._pending[number]

    def _fetch(self, number: int) -> bytes:
        try:
            first = number * BLOCK_BYTES
            data = self._source.read(first, min(first + BLOCK_BYTES, self.size))
            self._store.write_block(self._path(number), data)
            return data
        finally:
            with self._lock:
                del self._pending[number]


def _relative_path(url: str) -> str:
    """Return the name of an object in the cache: s3://a/b and gs://a/b are two."""
    return url.replace("://", "/", 1)


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Let one process of the node at a time run the block; where files cannot be locked, all run it."""
    with open(path, "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
