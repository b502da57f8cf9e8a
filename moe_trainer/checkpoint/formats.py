"""What reads and writes each format of checkpoints.

A module of another format than the native one is imported when a folder or --ckpt-format asks for it, and only here.
"""

from pathlib import Path
from typing import Any

from moe_trainer.checkpoint.folder_format import HF_CONFIG, HUGGING_FACE, LEGACY, detect_format
from moe_trainer.checkpoint.format_writer import FormatWriter, NativeWriter
from moe_trainer.checkpoint.virtual_index import ForeignMetadata


def open_foreign(folder: Path, hf_mapping: str | Path | None = None) -> ForeignMetadata | None:
    """Return a checkpoint of another format as an index; None for a native one.

    `hf_mapping` is the mapping file of a Hugging Face folder's family, if that is not built in.

    Raises:
        CheckpointError: if it cannot be read.
    """
    kind = detect_format(folder)
    if kind == HUGGING_FACE:
        from moe_trainer.checkpoint.hf.folder import read_index

        return read_index(folder, hf_mapping)
    if kind == LEGACY:
        from moe_trainer.checkpoint.megatron_legacy.reader import LegacyMetadata

        return LegacyMetadata(folder)
    return None


def writer_of(ckpt_format: str) -> type[FormatWriter]:
    """Return the class that writes a format; every other than the legacy one is written as the native one."""
    if ckpt_format == LEGACY:
        from moe_trainer.checkpoint.megatron_legacy.writer import LegacyWriter

        return LegacyWriter
    return NativeWriter


def lacks_weights(folder: Path) -> bool:
    """Return whether a folder has the config.json of a Hugging Face model, and not all files of its weights.

    Raises:
        DamagedError: if its JSON files cannot be read.
    """
    if not (folder / HF_CONFIG).is_file():
        return False
    from moe_trainer.checkpoint.hf.files import lacks_files

    return lacks_files(folder)


def read_planned_flags(folder: Path, hf_mapping: str | Path | None = None) -> dict[str, Any]:
    """Return the flags, by destination, of a Hugging Face folder for which `lacks_weights` holds.

    Raises:
        CheckpointError: if config.json does not describe a model.
    """
    from moe_trainer.checkpoint.hf.folder import read_planned_flags as read

    return read(folder, hf_mapping)
