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

A prefix in object storage (s3://bucket/name) is read through object_storage.py: the index is a local copy, the .bin is
read by blocks.

Training reads documents in random order, so the map is marked as such: otherwise every touched page drags in its
neighbors (128 KiB for a document of 1 KiB), which made first reads 40 times slower when measured.

Writing goes to temporary files next to the targets, which are renamed at the end, index last. So a reader never sees
half a dataset, and an interrupted run leaves existing files alone. Lengths are kept in compact arrays: 4 bytes a
sequence while a corpus streams through.
"""

from __future__ import annotations

import mmap
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import IO, Protocol

import numpy as np

from arguments.program import other_command
from moe_trainer.data.object_storage import ObjectFile, ObjectStore, is_remote
from moe_trainer.errors import UserError
from moe_trainer.io import atomic_write
from moe_trainer.token_index import INDEX_HEADER, INDEX_MAGIC

_DTYPES = MappingProxyType(
    {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
)
# NOTE: 65500, not 65536: Megatron's preprocessing keeps a margin, and byte-equal files need the same one.
_UINT16_VOCAB_LIMIT = 65500
_PAGE_TOKENS = 2048
_COPY_BYTES = 16 << 20


class DataFileError(UserError):
    """A dataset file is missing, damaged or of a kind that cannot be read."""


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Choose the dtype in which preprocessing stores token ids: uint16 for small vocabularies, else int32."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size < _UINT16_VOCAB_LIMIT else np.int32)


class _BinFile(Protocol):
    """The ids of a `.bin`: `size` in bytes; `read` returns fewer than `length` where the file ends."""

    @property
    def size(self) -> int: ...
    def read(self, first: int, length: int) -> np.ndarray: ...
    def prefetch(self, first: int, length: int) -> None: ...


class _MappedFile:
    """A file in a memory map."""

    def __init__(self, path: str, dtype: np.dtype):
        self._path, self._tokens = path, np.empty(0, dtype)
        if (count := self.size // dtype.itemsize) == 0:
            return
        with open(path, "rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
        self._tokens = np.frombuffer(self._map, dtype, count=count)

    @property
    def size(self) -> int:
        return _file_size(self._path)

    def read(self, first: int, length: int) -> np.ndarray:
        if length > _PAGE_TOKENS and hasattr(mmap, "MADV_WILLNEED"):
            self._map_pages(first, length)
        return self._tokens[first : first + length]

    def prefetch(self, first: int, length: int) -> None:
        pass

    def _map_pages(self, first: int, length: int) -> None:
        """Ask for all pages of a long range at once; one by one they would be fetched as they are touched."""
        if first + length > len(self._tokens):
            return
        begin, size = first * self._tokens.itemsize, length * self._tokens.itemsize
        page = begin - begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, page, begin + size - page)


class _PlainFile:
    """A file that is read by positional reads."""

    def __init__(self, path: str, dtype: np.dtype):
        self._path, self._dtype = path, dtype
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor).atexit = False  # threads may still read then

    @property
    def size(self) -> int:
        return _file_size(self._path)

    def read(self, first: int, length: int) -> np.ndarray:
        remaining, offset = length * self._dtype.itemsize, first * self._dtype.itemsize
        parts = []
        while remaining:
            parts.append(os.pread(self._descriptor, remaining, offset))
            if not parts[-1]:
                break
            remaining, offset = remaining - len(parts[-1]), offset + len(parts[-1])
        data = b"".join(parts)
        return np.frombuffer(data, self._dtype, count=len(data) // self._dtype.itemsize)

    def prefetch(self, first: int, length: int) -> None:
        pass


class _StoredObject:
    """An object in object storage, which is read by blocks."""

    def __init__(self, stored: ObjectFile, dtype: np.dtype):
        self._stored, self._dtype = stored, dtype

    @property
    def size(self) -> int:
        return self._stored.size

    def read(self, first: int, length: int) -> np.ndarray:
        data = self._stored.read(first * self._dtype.itemsize, length * self._dtype.itemsize)
        return np.frombuffer(data, self._dtype, count=len(data) // self._dtype.itemsize)

    def prefetch(self, first: int, length: int) -> None:
        self._stored.prefetch(first * self._dtype.itemsize, length * self._dtype.itemsize)


class IndexedDataset:
    """Reader of one `<prefix>.bin/.idx` pair.

    Args:
        prefix: of the files, or of objects such as s3://bucket/name.
        memory_map: map the .bin file, unless it is an object.
        store: through which objects are read.

    Attributes:
        idx_path: of the index, of its local copy if it is an object.
        sequence_lengths: in tokens, int32 [S].
        sequence_pointers: in bytes, int64 [S].
        document_indices: int64 [D].

    Raises:
        DataFileError: if a file is missing, shorter than it says, multimodal, or not an index at all.
    """

    def __init__(self, prefix: str, memory_map: bool = True, store: ObjectStore | None = None):
        self.idx_path, self.bin_path = f"{prefix}.idx", f"{prefix}.bin"
        if not is_remote(prefix):
            self._read_index()
            self._check_bin_size(_file_size(self.bin_path))
            kind = _MappedFile if memory_map else _PlainFile
            self._bin: _BinFile = kind(self.bin_path, self.dtype)
        elif store is None:
            raise DataFileError(f"{prefix}: data in object storage needs --object-storage-cache-path DIR")
        else:
            self.idx_path = store.copy_index(self.idx_path)
            stored = store.open(self.bin_path)
            self._read_index()
            self._check_bin_size(stored.size)
            self._bin = _StoredObject(stored, self.dtype)

    def _read_index(self) -> None:
        size = _file_size(self.idx_path)
        if size < INDEX_HEADER.size:
            raise self._damaged(
                f"found {size} bytes, the header alone needs {INDEX_HEADER.size}; the index is truncated"
            )
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        magic, version, code, num_sequences, num_boundaries = INDEX_HEADER.unpack(raw[: INDEX_HEADER.size].tobytes())
        names = ", ".join(np.dtype(dtype).name for dtype in _DTYPES.values())
        needed = INDEX_HEADER.size + 12 * num_sequences + 8 * num_boundaries
        for is_wrong, problem in (
            (magic != INDEX_MAGIC, f"not a Megatron index (it begins with {magic!r}, needed {INDEX_MAGIC!r})"),
            (version != 1, f"index version {version}, only version 1 exists"),
            (code not in _DTYPES, f"unknown dtype code {code}; known are 1 to 8 ({names})"),
            (
                size < needed,
                f"found {size} bytes, {num_sequences} sequences and {num_boundaries - 1} documents need {needed}; the "
                "index is truncated",
            ),
            (
                num_sequences and size == needed + num_sequences,
                "a multimodal index (one mode byte a sequence); only text datasets can be read",
            ),
            (size != needed, f"found {size} bytes, its header describes {needed}; the index is damaged"),
        ):
            if is_wrong:
                raise self._damaged(problem)
        self.dtype = np.dtype(_DTYPES[code])
        at = INDEX_HEADER.size
        self.sequence_lengths = np.frombuffer(raw, dtype="<i4", count=num_sequences, offset=at)
        at += 4 * num_sequences
        self.sequence_pointers = np.frombuffer(raw, dtype="<i8", count=num_sequences, offset=at)
        at += 8 * num_sequences
        self.document_indices = np.frombuffer(raw, dtype="<i8", count=num_boundaries, offset=at)
        if num_boundaries and self.document_indices[-1] != num_sequences:
            raise self._damaged(
                f"the document array ends at sequence {self.document_indices[-1]}, the index holds {num_sequences} "
                "sequences; the index is damaged"
            )

    def _damaged(self, problem: str) -> DataFileError:
        return DataFileError(f"{self.idx_path}: {problem}")

    def check_sequences(self) -> None:
        """Check the lengths and offsets of all sequences and the document array against the files.

        Reads the whole index.

        Raises:
            DataFileError: naming the first wrong entry.
        """
        lengths, starts = self.sequence_lengths, self.sequence_pointers
        bounds, size = self.document_indices, self._bin.size
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
                raise self._damaged(
                    f"sequence {first} {said}; the index is damaged, or belongs to another {self.bin_path}"
                )
        if len(bounds) and (bounds[0] != 0 or (np.diff(bounds) < 0).any()):
            raise self._damaged("the document array does not ascend from 0; the index is damaged")

    def _check_bin_size(self, found: int) -> None:
        needed = 0
        if len(self):
            needed = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if found < needed:
            raise DataFileError(
                f"{self.bin_path}: found {found} bytes, its index needs {needed} "
                f"({len(self)} sequences of {self.dtype.name}); the file is truncated or belongs to another index"
            )

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
            raise self._damaged(f"sequence {index} has {length} tokens from token {start} on; the index is damaged")
        if rest:
            raise self._damaged(f"sequence {index} begins in the middle of a token; the index is damaged")
        tokens = self._bin.read(start + offset, length)
        if len(tokens) != length:
            raise DataFileError(f"{self.bin_path}: sequence {index} ends beyond the file; the index is damaged")
        return tokens

    def prefetch(self, index: int, offset: int, length: int) -> None:
        """Start reading tokens that a later `get` returns, if they are in object storage."""
        first = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        self._bin.prefetch(first, length)


def open_token_file(prefix: str, memory_map: bool = True, store: ObjectStore | None = None) -> IndexedDataset:
    """Open a pair of files that holds token ids.

    Raises:
        DataFileError: also for values that are not integers.
    """
    low = IndexedDataset(prefix, memory_map, store)
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
    """Return a hint for common mistakes: no `_text_document`, the file's extension, a text file."""
    folder, name = os.path.split(path)
    stem = name.rsplit(".", 1)[0]
    for ending in (".bin", ".idx"):
        if stem.endswith(ending) and os.path.exists(path[: -len(".idx")]):
            return f"; give the prefix without {ending}"
    if path.endswith(".idx") and os.path.isfile(path[: -len(".idx")]):
        return (
            f"; {path[: -len('.idx')]} is no prefix of token files: make them with {other_command('preprocess')} "
            "(--use-varlen-dataset also reads text: .jsonl, .parquet, .arrow)"
        )
    try:
        names = sorted(n[:-4] for n in os.listdir(folder or ".") if n.endswith(".idx") and n.startswith(stem))
    except OSError:
        return f" (there is no folder {folder})"
    if names:
        return "; in that folder there is " + ", ".join(os.path.join(folder, n) for n in names[:3])
    return ""


@contextmanager
def write_indexed_dataset(prefix: str, dtype: np.typing.DTypeLike) -> Iterator[IndexedDatasetBuilder]:
    """Yield a writer of one `<prefix>.bin/.idx` pair, whose files replace existing ones at the end of the block.

    Raises:
        DataFileError: if the files cannot be created.
    """
    with ExitStack() as stack:
        try:
            index = stack.enter_context(atomic_write(f"{prefix}.idx", "wb"))
            tokens = stack.enter_context(atomic_write(f"{prefix}.bin", "wb"))
        except OSError as error:
            raise DataFileError(f"{prefix}.bin: cannot be written ({error.strerror or error})") from None
        builder = IndexedDatasetBuilder(tokens, np.dtype(dtype))
        yield builder
        builder.write_index(index)
        for file in (tokens, index):  # both are on disk before either gets its name
            file.flush()
            os.fsync(file.fileno())


def merge_token_files(
    prefixes: Sequence[str], output: str, keep: Sequence[np.ndarray | None] | None = None
) -> tuple[int, int]:
    """Write one pair of files that holds the documents of others in order.

    Args:
        prefixes: of the files.
        output: prefix of what is written.
        keep: for every file bool [D - 1], which documents it contributes; None for all.

    Returns:
        The numbers of documents and of tokens that were written.

    Raises:
        DataFileError: if a file is missing or damaged, or their types of values differ.
    """
    sources = [IndexedDataset(prefix, memory_map=False) for prefix in prefixes]
    other = next((source for source in sources if source.dtype != sources[0].dtype), None)
    if other is not None:
        raise DataFileError(
            f"{other.idx_path}: holds {other.dtype.name} values, {sources[0].idx_path} {sources[0].dtype.name}; files "
            "of one tokenizer have one type"
        )
    with write_indexed_dataset(output, sources[0].dtype) as builder:
        for source, mask in zip(sources, keep or [None] * len(sources)):
            source.check_sequences()
            builder.add_file(source, mask)
        return builder.num_documents, builder.num_tokens


class IndexedDatasetBuilder:
    """Writes documents to a .bin file as they come; `write_indexed_dataset` makes one."""

    def __init__(self, file: IO[bytes], dtype: np.dtype):
        self._file, self._dtype = file, dtype
        self._lengths = array("i")
        self._document_ends = array("q", [0])

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> None:
        """Append one document whose tokens are several sequences back to back.

        Raises:
            ValueError: if an id does not fit the dtype, or the lengths do not add up to the tokens.
        """
        if sum(lengths) != len(tokens):
            raise ValueError(f"lengths of sequences add up to {sum(lengths)}, but there are {len(tokens)} tokens")
        self.add_raw(to_stored(tokens, self._dtype).tobytes(), lengths, [len(lengths)])

    def add_raw(self, stored: bytes, lengths: Iterable[int], document_ends: Iterable[int]) -> None:
        """Append documents already in stored form: `document_ends` counts sequences from this call's first one."""
        base = len(self._lengths)
        self._file.write(stored)
        self._lengths.extend(lengths)
        self._document_ends.extend(base + end for end in document_ends)

    def add_file(self, source: IndexedDataset, keep: np.ndarray | None = None) -> None:
        """Append all documents of a file, or those whose entry of `keep`, bool [D - 1], is True.

        Raises:
            DataFileError: if its sequences do not lie one after the other.
        """
        lengths, documents = source.sequence_lengths, source.document_indices
        begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize])
        size = os.stat(source.bin_path).st_size
        if not np.array_equal(source.sequence_pointers, begins[:-1]) or size != begins[-1]:
            raise DataFileError(f"{source.idx_path}: the sequences do not lie one after the other in {source.bin_path}")
        is_kept = np.ones(max(len(documents) - 1, 0), dtype=bool) if keep is None else keep
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_kept, [False]]).astype(np.int8)))
        with open(source.bin_path, "rb") as file:
            for first, last in edges.reshape(-1, 2).tolist():  # documents [first, last) are one run
                low, high = int(documents[first]), int(documents[last])
                file.seek(int(begins[low]))
                for at in range(int(begins[low]), int(begins[high]), _COPY_BYTES):
                    self._file.write(file.read(min(_COPY_BYTES, int(begins[high]) - at)))
                ends = documents[first + 1 : last + 1].astype(np.longlong) - low + len(self._lengths)
                self._lengths.frombytes(lengths[low:high].astype(np.intc).tobytes())
                self._document_ends.frombytes(ends.tobytes())

    @property
    def num_documents(self) -> int:
        return len(self._document_ends) - 1

    @property
    def num_tokens(self) -> int:
        return int(np.asarray(self._lengths).sum(dtype=np.int64))

    def write_index(self, file: IO[bytes]) -> None:
        lengths, document_ends = np.asarray(self._lengths), np.asarray(self._document_ends)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        code = next(code for code, dtype in _DTYPES.items() if dtype == self._dtype)
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, code, len(lengths), len(document_ends)))
        for values, dtype in ((lengths, "<i4"), (pointers, "<i8"), (document_ends, "<i8")):
            file.write(values.astype(dtype, copy=False).tobytes())


def to_stored(tokens: Sequence[int] | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert ids to the stored dtype.

    Raises:
        ValueError: naming the first id that does not fit.
    """
    values = np.asarray(tokens, dtype=None if len(tokens) else dtype)
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype)
        bad = (values < limits.min) | (values > limits.max)
        if bad.any():
            raise ValueError(f"token id {values[bad][0]} does not fit the file's dtype {dtype.name}")
    return values.astype(dtype)
