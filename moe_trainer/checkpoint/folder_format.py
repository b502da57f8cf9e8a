"""Which format a checkpoint folder has, by the files in it. The program's flags have no say in it."""

import json
from pathlib import Path

from moe_trainer.checkpoint.directory import COMPLETE, INDEX

NATIVE, INCOMPLETE, LEGACY, HUGGING_FACE = "torch_dist", "torch_dcp", "torch", "huggingface"
READABLE = (NATIVE, INCOMPLETE, LEGACY, HUGGING_FACE)
"""The formats that are read; INCOMPLETE has the index of a native checkpoint without its completion mark."""
HF_CONFIG, HF_INDEX = "config.json", "model.safetensors.index.json"


def detect_format(folder: Path) -> str | None:
    """Return the format of a checkpoint folder: one of the above, another that its mark names, None if unknown."""
    if is_hf_folder(folder):
        return HUGGING_FACE
    if (folder / COMPLETE).is_file():
        try:
            return str(json.loads((folder / COMPLETE).read_text())["sharded_backend"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
    if is_legacy_folder(folder):
        return LEGACY
    if (folder / INDEX).is_file():
        return INCOMPLETE
    return None


def is_hf_folder(folder: Path) -> bool:
    """Return whether a folder is a Hugging Face model: config.json and safetensors files or their index."""
    return (folder / HF_CONFIG).is_file() and ((folder / HF_INDEX).is_file() or any(folder.glob("*.safetensors")))


def is_legacy_folder(folder: Path) -> bool:
    """Return whether a folder has the files of ranks that Megatron-LM's legacy format consists of."""
    return any(folder.glob("mp_rank_*"))
