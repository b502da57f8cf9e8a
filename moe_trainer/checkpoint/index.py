"""The index of a checkpoint folder of any format, and whether the folder is complete and unmodified."""

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from moe_trainer.checkpoint.directory import COMPLETE
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.folder_format import HUGGING_FACE, LEGACY, NATIVE, detect_format, is_hf_folder
from moe_trainer.checkpoint.formats import open_foreign
from moe_trainer.checkpoint.native_index import modified_files, read_native_index, truncated_files
from moe_trainer.checkpoint.virtual_index import ForeignMetadata, incomplete_tensors


def read_index(folder: Path, hf_mapping: str | Path | None = None) -> Metadata:
    """Return the list of everything stored and where.

    `hf_mapping` is the mapping file of a Hugging Face folder's family, if that is not built in.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    foreign = open_foreign(folder, hf_mapping)
    return read_native_index(folder) if foreign is None else foreign


def check(folder: Path, hashes: bool = False) -> list[str]:
    """Return what is wrong with a checkpoint folder.

    Checks the completion mark, the index, the existence and length of every file, and that the chunks of every tensor
    cover it. `hashes`: also compare integrity.json, which reads everything.
    """
    if is_hf_folder(folder):  # its files are judged when they are opened
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
    if is_hf_folder(folder):
        return read_index(folder, hf_mapping), []
    try:
        index = read_index(folder)
    except CheckpointError as error:
        return None, [str(error)]
    if isinstance(index, ForeignMetadata):
        return index, index.modified_files() if hashes else []
    problems = truncated_files(folder, index)
    problems += [f"{key}: {stored} of {full} elements are stored" for key, stored, full in incomplete_tensors(index)]
    return index, problems + (modified_files(folder) if hashes and not problems else [])


def check_mark(folder: Path) -> list[str]:
    """Check that the folder exists and has the mark of a complete torch_dist checkpoint."""
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    if detect_format(folder) in (HUGGING_FACE, LEGACY):
        return []
    if not (folder / COMPLETE).is_file():
        return [f"{folder / COMPLETE} is missing: the save did not finish, or it is no torch_dist checkpoint"]
    kind = detect_format(folder)
    if kind != NATIVE:
        return [f"{folder / COMPLETE} is damaged" if kind is None else f"{folder} is in {kind} format"]
    return []


def stored_bytes(index: Metadata) -> int:
    """Return the size of everything in the index; of another format, that of its files."""
    if isinstance(index, ForeignMetadata):
        return sum(path.stat().st_size for path in index.files)
    return sum(info.length for info in index.storage_data.values())
