"""Megatron's token files: `<prefix>.bin` (token ids only) and `<prefix>.idx` (lengths, byte offsets, document ends).

Layout of the index, little-endian, without padding between fields:

    9 bytes   magic "MMIDIDX\\0\\0"          8 bytes  version = 1        1 byte  dtype code (_DTYPES)
    8 bytes   S, number of sequences        8 bytes  D, length of the document array (documents + 1)
    4*S       sequence lengths in tokens, int32
    8*S       byte offset of each sequence in the .bin, int64
    8*D       document array, int64: 0, then the sequence index at which each document ends; the last entry is S
    S         one mode byte a sequence, multimodal files only (refused here)

The arrays begin at byte 34, which is aligned for neither of them, so readers get unaligned numpy views of one memory
map; numpy handles those on every platform. The .bin is memory-mapped, or read by positional reads
(`memory_map=False`), which need no shared file position and are therefore safe in threads and forked processes.

Training reads documents in random order, so the map is marked as such: otherwise every touched page drags in its
neighbours (128 KiB for a document of 1 KiB), which made first reads 40 times dearer when measured.

Writing goes to temporary files next to the targets; `finish` renames them, index last, so a reader never sees half a
dataset and an interrupted run leaves existing files alone. Lengths are kept in compact arrays: 4 bytes a sequence
while a corpus streams through.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from moe_trainer.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = MappingProxyType(
    {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
)
# NOTE: 65500, not 65536: Megatron's preprocessing keeps a margin, and byte-equal files need the same one.
_UINT16_VOCAB_LIMIT = 65500
_PAGE_TOKENS = 2048


class DataFileError(UserError):
    """A dataset file is missing, damaged or of a kind that cannot be read."""


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Choose the dtype in which preprocessing stores token ids: uint16 for small vocabularies, else int32."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size < _UINT16_VOCAB_LIMIT else np.int32)


def dtype_code(dtype) -> int:
    """Return the code byte of `dtype`; ValueError when the format has none."""
    for code, candidate in _DTYPES.items():
        if np.dtype(candidate) == np.dtype(dtype):
            return code
    raise ValueError(f"dtype {np.dtype(dtype)} has no code in the .idx format; use one of {_dtype_names()}")


def _dtype_names() -> str:
    return ", ".join(np.dtype(d).name for d in _DTYPES.values())


class IndexedDataset:
    """Read one `<prefix>.bin/.idx` pair.

    Attributes: sequence_lengths int32 [S] in tokens; sequence_pointers int64 [S] in bytes; document_indices int64
    [D]; dtype.
    Raises: DataFileError when a file is missing, shorter than it says, multimodal, or not an index at all.
    """

    def __init__(self, prefix: str, memory_map: bool = True):
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = self.prefix + ".idx", self.prefix + ".bin"
        self._mmap = memory_map
        self._fd: int | None = None
        self._read_index()
        self._open_bin()

    def _read_index(self) -> None:
        size = _file_size(self.idx_path)
        if size < _HEADER.size:
            raise DataFileError(
                f"{self.idx_path}: found {size} bytes, the header alone needs {_HEADER.size}; the index is truncated"
            )
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        magic, version, code, num_sequences, num_boundaries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            raise DataFileError(f"{self.idx_path}: not a Megatron index (it begins with {magic!r}, needed {_MAGIC!r})")
        if version != 1:
            raise DataFileError(f"{self.idx_path}: index version {version}, only version 1 exists")
        if code not in _DTYPES:
            raise DataFileError(f"{self.idx_path}: unknown dtype code {code}; known are 1 to 8 ({_dtype_names()})")
        needed = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if size < needed:
            raise DataFileError(
                f"{self.idx_path}: found {size} bytes, {num_sequences} sequences and {num_boundaries - 1} documents "
                f"need {needed}; the index is truncated"
            )
        if num_sequences and size == needed + num_sequences:
            raise DataFileError(
                f"{self.idx_path}: a multimodal index (one mode byte a sequence); only text datasets can be read"
            )
        if size != needed:
            raise DataFileError(
                f"{self.idx_path}: found {size} bytes, its header describes {needed}; the index is damaged"
            )
        self.dtype = np.dtype(_DTYPES[code])
        at = _HEADER.size
        self.sequence_lengths = np.frombuffer(raw, dtype="<i4", count=num_sequences, offset=at)
        at += 4 * num_sequences
        self.sequence_pointers = np.frombuffer(raw, dtype="<i8", count=num_sequences, offset=at)
        at += 8 * num_sequences
        self.document_indices = np.frombuffer(raw, dtype="<i8", count=num_boundaries, offset=at)
        if num_boundaries and self.document_indices[-1] != num_sequences:
            raise DataFileError(
                f"{self.idx_path}: the document array ends at sequence {self.document_indices[-1]}, the index holds "
                f"{num_sequences} sequences; the index is damaged"
            )

    def check_sequences(self) -> None:
        """Check the lengths and offsets of all sequences and the document array against the files. Reads the whole index.

        Raises: DataFileError naming the first wrong entry.
        """
        lengths, starts = self.sequence_lengths, self.sequence_pointers
        bounds, size = self.document_indices, os.stat(self.bin_path).st_size
        for wrong, text in (
            (lengths < 0, "has a negative length ({length})"),
            (starts < 0, "begins before the file (offset {start})"),
            (starts % self.dtype.itemsize != 0, "begins in the middle of a token (offset {start})"),
            (
                starts > size - lengths.astype(np.int64) * self.dtype.itemsize,
                "ends beyond the file ({length} tokens from offset {start})",
            ),
        ):
            if wrong.any():
                first = int(np.argmax(wrong))
                said = text.format(length=int(lengths[first]), start=int(starts[first]))
                raise DataFileError(
                    f"{self.idx_path}: sequence {first} {said}; the index is damaged, or belongs to another {self.bin_path}"
                )
        if len(bounds) and (bounds[0] != 0 or (np.diff(bounds) < 0).any()):
            raise DataFileError(f"{self.idx_path}: the document array does not ascend from 0; the index is damaged")

    def _open_bin(self) -> None:
        found, needed = _file_size(self.bin_path), self._bytes_needed()
        if found < needed:
            raise DataFileError(
                f"{self.bin_path}: found {found} bytes, its index needs {needed} "
                f"({len(self)} sequences of {self.dtype.name}); the file is truncated or belongs to another index"
            )
        self._tokens = None
        if not self._mmap:
            self._fd = os.open(self.bin_path, os.O_RDONLY)
        elif found < self.dtype.itemsize:
            self._tokens = np.empty(0, self.dtype)
        else:
            with open(self.bin_path, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):
                self._map.madvise(mmap.MADV_RANDOM)
            self._tokens = np.frombuffer(self._map, self.dtype, count=found // self.dtype.itemsize)

    def _bytes_needed(self) -> int:
        if not len(self):
            return 0
        return int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize

    def __del__(self):
        if getattr(self, "_fd", None) is not None:
            os.close(self._fd)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of one sequence from `offset` on (default: to its end), in the stored dtype."""
        if length is None:
            length = int(self.sequence_lengths[index]) - offset
        start, rest = divmod(int(self.sequence_pointers[index]), self.dtype.itemsize)
        if length < 0 or start < 0:
            raise DataFileError(
                f"{self.idx_path}: sequence {index} has {length} tokens from token {start} on; the index is damaged"
            )
        if rest:
            raise DataFileError(
                f"{self.idx_path}: sequence {index} begins in the middle of a token; the index is damaged"
            )
        if self._tokens is None:
            return self._positional_read(index, start + offset, length)
        if length > _PAGE_TOKENS and hasattr(mmap, "MADV_WILLNEED"):
            self._want(start + offset, length)
        tokens = self._tokens[start + offset : start + offset + length]
        if len(tokens) != length:
            raise DataFileError(f"{self.bin_path}: sequence {index} ends beyond the file; the index is damaged")
        return tokens

    def _want(self, first: int, length: int) -> None:
        """Ask for all pages of a long piece at once; one by one they would be fetched as they are touched."""
        begin, size = first * self.dtype.itemsize, length * self.dtype.itemsize
        page = begin - begin % mmap.PAGESIZE
        if begin + size <= len(self._map):
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + size - page)

    def _positional_read(self, index: int, first: int, length: int) -> np.ndarray:
        wanted = length * self.dtype.itemsize
        pieces, got = [], 0
        while got < wanted:
            piece = os.pread(self._fd, wanted - got, first * self.dtype.itemsize + got)
            if not piece:
                raise DataFileError(f"{self.bin_path}: sequence {index} ends beyond the file; the index is damaged")
            pieces.append(piece)
            got += len(piece)
        return np.frombuffer(b"".join(pieces), dtype=self.dtype)


def open_token_file(prefix: str, memory_map: bool = True) -> IndexedDataset:
    """Open a pair of files that holds token ids. Raises: DataFileError, also for values that are not integers."""
    low = IndexedDataset(prefix, memory_map)
    if low.dtype.kind not in "iu":
        raise DataFileError(f"{prefix}.idx: holds {low.dtype.name} values, token ids are integers")
    return low


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file{_similar_prefixes(path)}") from None
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read ({error.strerror})") from None


def _similar_prefixes(path: str) -> str:
    """A hint for the most common mistake: the prefix without `_text_document`, or with the file's extension."""
    folder, name = os.path.split(path)
    stem = name.rsplit(".", 1)[0]
    for ending in (".bin", ".idx"):
        if stem.endswith(ending) and os.path.exists(path[: -len(".idx")]):
            return f"; give the prefix without {ending}"
    try:
        names = sorted(n[:-4] for n in os.listdir(folder or ".") if n.endswith(".idx") and n.startswith(stem))
    except OSError:
        return f" (there is no folder {folder})"
    if names:
        return "; in that folder there is " + ", ".join(os.path.join(folder, n) for n in names[:3])
    return ""


class IndexedDatasetBuilder:
    """Write one `<prefix>.bin/.idx` pair as a stream of sequences and document ends.

    Use as a context manager: leaving it normally calls `finish`, an exception calls `abort` (temporary files removed,
    existing ones kept).
    """

    def __init__(self, prefix: str, dtype):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        self._code = dtype_code(self.dtype)
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        suffix = f".tmp-{os.getpid()}"
        self._bin_temporary, self._idx_temporary = self.prefix + ".bin" + suffix, self.prefix + ".idx" + suffix
        try:
            self._bin = open(self._bin_temporary, "wb")  # noqa: SIM115  closed by finish or abort
        except OSError as error:
            raise DataFileError(f"{self.prefix}.bin: cannot be written ({error.strerror})") from None

    def __enter__(self) -> IndexedDatasetBuilder:  # noqa: PYI034  Self needs Python 3.11
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def add_sequence(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append one sequence. ValueError when an id does not fit the dtype."""
        self._bin.write(self._as_stored(tokens).tobytes())
        self._lengths.append(len(tokens))

    def end_document(self) -> None:
        """Mark the end of a document (one without sequences is allowed)."""
        self._document_ends.append(len(self._lengths))

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> None:
        """Append one document whose tokens are several sequences back to back."""
        if sum(lengths) != len(tokens):
            raise ValueError(
                f"a document of {len(tokens)} tokens cannot have sequence lengths that sum to {sum(lengths)}"
            )
        self._bin.write(self._as_stored(tokens).tobytes())
        self._lengths.extend(lengths)
        self.end_document()

    def add_raw(self, stored: bytes, lengths: array | Sequence[int], document_ends: Sequence[int]) -> None:
        """Append documents already in stored form: `document_ends` counts sequences from this call's first one."""
        base = len(self._lengths)
        self._bin.write(stored)
        self._lengths.extend(lengths)
        self._document_ends.extend(base + end for end in document_ends)

    def add_dataset(self, prefix: str) -> None:
        """Append another dataset of the same dtype, documents and all (used to merge workers' or partitions' files)."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"cannot merge {prefix} ({other.dtype.name}) into {self.prefix} ({self.dtype.name})")
        base = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, dtype=np.int32).tobytes())
        self._document_ends.frombytes((other.document_indices[1:] + base).astype(np.int64).tobytes())
        with open(other.bin_path, "rb") as source:
            shutil.copyfileobj(source, self._bin, 16 << 20)

    def finish(self) -> None:
        """Write the index and put both files in place, the index last."""
        with self._bin as stream:
            stream.flush()
            os.fsync(stream.fileno())
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with open(self._idx_temporary, "wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, 1, self._code, len(lengths), len(self._document_ends)))
            stream.write(lengths.astype("<i4", copy=False).tobytes())
            stream.write(pointers.astype("<i8", copy=False).tobytes())
            stream.write(np.frombuffer(self._document_ends, dtype=np.int64).astype("<i8", copy=False).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(self._bin_temporary, self.prefix + ".bin")
        os.replace(self._idx_temporary, self.prefix + ".idx")

    def abort(self) -> None:
        """Drop what has been written; files that existed before are untouched."""
        self._bin.close()
        for path in (self._bin_temporary, self._idx_temporary):
            if os.path.exists(path):
                os.remove(path)

    def _as_stored(self, tokens) -> np.ndarray:
        return to_stored(tokens, self.dtype)


def to_stored(tokens: Sequence[int] | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert ids to the stored dtype; ValueError naming the first id that does not fit."""
    values = np.asarray(tokens, dtype=None if len(tokens) else dtype)
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype)
        bad = (values < limits.min) | (values > limits.max)
        if bad.any():
            raise ValueError(f"token id {values[bad][0]} does not fit the file's dtype {dtype.name}")
    return values.astype(dtype)
