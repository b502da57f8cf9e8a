"""Read untrusted files of torch.save without running anything in them.

torch.load passes a TorchScript archive to torch.jit.load, which runs the program in it, before it calls the given
unpickler. So torch.load is not used here. A file of torch.save is a zip archive of uncompressed records: one pickle
(`NAME/data.pkl`) and the elements of every storage (`NAME/data/KEY`). unpickle.py decodes the pickle; the storages are
ranges of the file. All other records are ignored.
"""

import io
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.unpickle import StorageType, StoredElements, load_pickle

_MAIN = "/data.pkl"
_LOCAL_HEADER = 30  # bytes before the name
_SIGNATURE = b"PK\x03\x04"
_MAX_PICKLE_BYTES = 1 << 31
# records that only archives of programs have
_PROGRAM = frozenset({"constants.pkl", "extern_modules", "archive_format"})


class UnsafeArchiveError(ValueError):
    """An archive that torch.save does not write."""


@dataclass(frozen=True)
class _Records:
    """Positions of the records of an archive."""

    folder: str
    places: Mapping[str, tuple[int, int]]  # (first byte, bytes)


def load_bytes(content: bytes) -> Any:
    """Decode what torch.save wrote.

    Raises:
        DECODE_ERRORS: if it is damaged or not such an archive.
    """
    records = _records(io.BytesIO(content), len(content))

    def storage(first: int, count: int) -> torch.UntypedStorage:
        return torch.frombuffer(bytearray(content[first : first + count]), dtype=torch.uint8).untyped_storage()

    return _decode(records, lambda first, count: content[first : first + count], storage)


def load_mapped(path: Path) -> Any:
    """Decode a file of torch.save; the elements of its tensors are mapped into memory, not read.

    Raises:
        DECODE_ERRORS: if it is missing, damaged or not such an archive.
    """
    with open(regular_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        records = _records(stream, size)

        def read(first: int, count: int) -> bytes:
            stream.seek(first)
            return stream.read(count)

        whole = torch.UntypedStorage.from_file(os.fspath(path), False, size)
        return _decode(records, read, lambda first, count: whole[first : first + count])


def verify_checksums(source: Path | bytes) -> None:
    """Compare every record of an archive with its checksum.

    Raises:
        DECODE_ERRORS: if one differs, or it is not an archive of torch.save.
    """
    with open(regular_file(source), "rb") if isinstance(source, Path) else io.BytesIO(source) as stream:
        size = stream.seek(0, os.SEEK_END)
        with _opened(stream, size) as archive:
            changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"the checksum of {changed} is wrong")


@contextmanager
def _opened(stream: Any, size: int) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose records are as torch.save writes them: uncompressed, unique, within the file.

    Raises:
        UnsafeArchiveError: for any other archive, and for one that holds a program.
    """
    stream.seek(0)
    if stream.read(4) != _SIGNATURE:
        raise UnsafeArchiveError("it does not begin like a file of torch.save")
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        program = next(
            (
                entry.filename
                for entry in entries
                if entry.filename.replace("\\", "/").rpartition("/")[2].lower() in _PROGRAM
            ),
            None,
        )
        if program is not None:
            raise UnsafeArchiveError(
                f"it is an archive of TorchScript, torch.package or torch.export (it holds {program}), which is a "
                "program; only files of torch.save are read, and nothing in a file is run"
            )
        if any(
            entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size
            for entry in entries
        ):
            raise UnsafeArchiveError("it holds compressed or encrypted records, which torch.save does not write")
        if len({entry.filename for entry in entries}) != len(entries):
            raise UnsafeArchiveError("it holds a record twice")
        if sum(entry.file_size for entry in entries) > size:
            raise UnsafeArchiveError("its records are longer than the file")
        yield archive


def _records(stream: Any, size: int) -> _Records:
    with _opened(stream, size) as archive:
        entries = archive.infolist()
        mains = [
            entry.filename for entry in entries if entry.filename.endswith(_MAIN) and entry.filename.count("/") == 1
        ]
        if len(mains) != 1:
            raise UnsafeArchiveError(f"it holds {len(mains)} pickles (data.pkl), and a file of torch.save holds one")
        places = {}
        for entry in entries:
            stream.seek(entry.header_offset)
            header = stream.read(_LOCAL_HEADER)
            if len(header) != _LOCAL_HEADER or header[:4] != _SIGNATURE:
                raise UnsafeArchiveError(f"the record {entry.filename!r} is not where its table says")
            lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            first = entry.header_offset + _LOCAL_HEADER + sum(lengths)
            if first + entry.file_size > size:
                raise UnsafeArchiveError(f"the record {entry.filename!r} ends after the end of the file")
            places[entry.filename] = first, entry.file_size
    return _Records(mains[0].removesuffix(_MAIN), places)


def _decode(
    records: _Records, read: Callable[[int, int], bytes], storage: Callable[[int, int], torch.UntypedStorage]
) -> Any:
    first, count = records.places[records.folder + _MAIN]
    if count > _MAX_PICKLE_BYTES:
        raise UnsafeArchiveError(f"its pickle has {count} bytes")
    order = records.places.get(f"{records.folder}/byteorder")
    if order is not None and (mark := read(*order)) != sys.byteorder.encode():
        raise UnsafeArchiveError(f"its byte order is {mark[:16]!r}, and that of this machine {sys.byteorder!r}")
    storages: dict[str, torch.UntypedStorage] = {}

    def persistent(saved: Any) -> StoredElements:
        if not (
            isinstance(saved, tuple)
            and len(saved) == 5
            and saved[0] == "storage"
            and isinstance(saved[1], StorageType)
            and isinstance(saved[2], str)
        ):
            raise UnsafeArchiveError("its pickle refers to something else than a storage")
        dtype, key = saved[1].dtype, saved[2]
        if key not in storages:
            begin, size = records.places[f"{records.folder}/data/{key}"]
            values = storage(begin, size) if size else torch.UntypedStorage(0)
            storages[key] = values.clone() if size and values.data_ptr() % 16 else values  # torch.save aligns them
        return StoredElements(storages[key], dtype)

    return load_pickle(read(first, count), persistent)
