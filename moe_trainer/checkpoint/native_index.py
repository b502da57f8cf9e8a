"""The index of a native checkpoint folder: reading it, and whether the files are those that it lists."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.directory import INDEX, INTEGRITY
from moe_trainer.checkpoint.errors import DamagedError
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, load_pickle


def read_native_index(folder: Path) -> Metadata:
    """Read `.metadata`, the list of everything stored and where.

    Raises:
        DamagedError: if it is missing or damaged.
    """
    path = folder / INDEX
    try:
        index = load_pickle(regular_file(path).read_bytes())
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except DECODE_ERRORS as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    if not _is_valid(index):
        raise DamagedError(f"{path} is damaged: it holds no sound index")
    return index


def _is_valid(index: object) -> bool:
    """Return whether a decoded index has the required types, and names files of its own folder only."""
    try:
        return (
            isinstance(index, Metadata)
            and all(_is_valid_entry(index, key, entry) for key, entry in index.state_dict_metadata.items())
            and all(
                isinstance(info.relative_path, str)
                and Path(info.relative_path).name == info.relative_path
                and info.offset >= 0
                and info.length >= 0
                for info in index.storage_data.values()
            )
        )
    except (AttributeError, TypeError, ValueError):
        return False


def _is_valid_entry(index: Metadata, key: str, entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return isinstance(key, str) and MetadataIndex(key) in index.storage_data
    return (
        isinstance(key, str)
        and isinstance(entry.properties.dtype, torch.dtype)
        and all(
            MetadataIndex(key, chunk.offsets) in index.storage_data
            and len(chunk.sizes) == len(entry.size)
            and all(
                at >= 0 and at + extent <= full
                for at, extent, full in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            )
            for chunk in entry.chunks
        )
    )


def truncated_files(folder: Path, index: Metadata) -> list[str]:
    """Return the files of the index that are missing or too short."""
    needed: dict[str, int] = {}
    for info in index.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    problems = []
    for name, length in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size < length:
            problems.append(f"{path} has {path.stat().st_size} bytes, {length} are needed: it was cut off")
    return problems


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal text."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_hashes(folder: Path) -> None:
    """Write integrity.json: the SHA-256 of every file of the folder (--verify-integrity)."""
    files = {
        path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != INTEGRITY
    }
    (folder / INTEGRITY).write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))


def modified_files(folder: Path) -> list[str]:
    """Return the files that are missing or differ from integrity.json. Reads everything."""
    path = folder / INTEGRITY
    try:
        record = json.loads(path.read_text())
        files = dict(record["files"])
    except FileNotFoundError:
        return [f"{path} is missing: save with --verify-integrity, or load without it"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return [f"{path} is damaged: {error}"]
    problems = []
    for name, digest in files.items():
        if Path(name).name != name:
            return [f"{path} is damaged: it names {name!r}, outside its folder"]
        if not (folder / name).is_file():
            problems.append(f"{folder / name} is missing")
        elif file_hash(folder / name) != digest:
            problems.append(f"{folder / name} is not the file that was saved: its SHA-256 differs")
    return problems
