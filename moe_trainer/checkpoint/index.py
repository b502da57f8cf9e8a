"""The index of a checkpoint folder: completeness, format, and unmodified files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, INTEGRITY
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.hf import files as hf_files
from moe_trainer.checkpoint.hf import folder as hf_folder
from moe_trainer.checkpoint.megatron_legacy import reader as legacy_reader
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, load_pickle
from moe_trainer.checkpoint.virtual_index import incomplete_tensors


def detect_format(folder: Path) -> str | None:
    """Return the format of a checkpoint folder: torch_dist, torch, torch_dcp, huggingface ... or None if unknown."""
    if hf_files.is_hf_folder(folder):
        return hf_folder.FORMAT
    if (folder / COMPLETE).is_file():
        try:
            return str(json.loads((folder / COMPLETE).read_text())["sharded_backend"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
    if legacy_reader.is_legacy_folder(folder):
        return legacy_reader.FORMAT
    if (folder / INDEX).is_file():
        return "torch_dcp"
    return None


def read_index(folder: Path, hf_mapping: str | Path | None = None) -> Metadata:
    """Read `.metadata`, the list of everything stored and where.

    `hf_mapping` is the mapping file of a Hugging Face folder's family, if that is not built in.

    Raises:
        DamagedError: if it is missing or damaged.
    """
    if hf_files.is_hf_folder(folder):
        return hf_folder.read_index(folder, hf_mapping)
    if detect_format(folder) == legacy_reader.FORMAT:
        return legacy_reader.LegacyMetadata(folder)
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


def check(folder: Path, hashes: bool = False) -> list[str]:
    """Return what is wrong with a checkpoint folder.

    Checks the completion mark, the index, the existence and length of every file, and that the chunks of every tensor
    cover it. `hashes`: also compare integrity.json, which reads everything.
    """
    if hf_files.is_hf_folder(folder):  # its files are judged when they are opened
        return check_mark(folder)
    return read_and_check(folder, hashes)[1]


def read_and_check(
    folder: Path, hashes: bool = False, hf_mapping: str | Path | None = None
) -> tuple[Metadata | None, list[str]]:
    """Return the index of a checkpoint folder, if it can be read, and what is wrong with the folder (see `check`).

    Raises:
        CheckpointError: if it is a Hugging Face folder that cannot be read.
    """
    problems = check_mark(folder)
    if problems:
        return None, problems
    if hf_files.is_hf_folder(folder):
        return read_index(folder, hf_mapping), []
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return None, [str(error)]
    if isinstance(index, legacy_reader.LegacyMetadata):
        return index, index.modified_files() if hashes else []
    problems = truncated_files(folder, index)
    problems += [f"{key}: {stored} of {full} elements are stored" for key, stored, full in incomplete_tensors(index)]
    return index, problems + (modified_files(folder) if hashes and not problems else [])


def check_mark(folder: Path) -> list[str]:
    """Check that the folder exists and has the mark of a complete torch_dist checkpoint."""
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    if detect_format(folder) in (hf_folder.FORMAT, legacy_reader.FORMAT):
        return []
    if not (folder / COMPLETE).is_file():
        return [f"{folder / COMPLETE} is missing: the save did not finish, or it is no torch_dist checkpoint"]
    kind = detect_format(folder)
    if kind != "torch_dist":
        return [f"{folder / COMPLETE} is damaged" if kind is None else f"{folder} is in {kind} format"]
    return []


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


def stored_bytes(folder: Path, index: Metadata) -> int:
    """Return the size of everything in the index; for legacy checkpoints and Hugging Face folders, of the files."""
    if isinstance(index, hf_folder.HFMetadata):
        return sum(path.stat().st_size for path in index.model.source.files)
    if isinstance(index, legacy_reader.LegacyMetadata):
        return sum(path.stat().st_size for path in index.files)
    return sum(info.length for info in index.storage_data.values())


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
