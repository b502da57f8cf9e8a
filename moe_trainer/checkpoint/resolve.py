"""Which checkpoint folder to load, and whether it can be loaded. Not collective; needs no model."""

import logging
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from arguments.program import other_command
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import (
    COMPLETE,
    INDEX,
    TRACKER,
    checkpoint_folder,
    complete_iterations,
    describe_alternatives,
    describe_complete,
    folder_name,
    interrupted_rename,
    read_tracker,
)
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.folder_format import (
    HF_CONFIG,
    HUGGING_FACE,
    LEGACY,
    NATIVE,
    READABLE,
    detect_format,
    is_hf_folder,
)
from moe_trainer.checkpoint.formats import lacks_weights, read_planned_flags
from moe_trainer.checkpoint.index import check, read_and_check, read_index
from moe_trainer.checkpoint.virtual_index import tensor_entry

logger = logging.getLogger(__name__)

_OTHER_FORMATS = MappingProxyType(
    {
        "zarr": "in the zarr format, which Megatron-LM has removed; convert it with an older Megatron-LM",
        "fsdp_dtensor": "written by Megatron-FSDP, which this version does not support; save it with --ckpt-format "
        "torch_dist",
    }
)


def resolve_checkpoint(directory: Path, ckpt_step: int | None, loads: bool = False) -> Path | None:
    """Return the folder that --load DIRECTORY [--ckpt-step N] names, None without a checkpoint. Read-only.

    Args:
        loads: the caller reads its weights; of several calls of a start this one warns that the tracker is missing.

    Raises:
        CheckpointError: if the tracker or --ckpt-step names a folder that does not exist.
    """
    wanted = read_tracker(directory) if ckpt_step is None else ckpt_step
    source = f"{directory / TRACKER} (iteration {wanted})" if ckpt_step is None else f"--ckpt-step {ckpt_step}"
    if wanted is None:
        if is_hf_folder(directory):
            return directory
        if (directory / COMPLETE).is_file() or (directory / INDEX).is_file():
            raise CheckpointError(
                f"--load {directory}: this is the folder of a single checkpoint; give its parent, "
                f"--load {directory.absolute().parent}, and choose it with --ckpt-step"
            )
        complete = complete_iterations(directory)
        if not complete and lacks_weights(directory):
            raise CheckpointError(
                f"{directory}: has the {HF_CONFIG} of a Hugging Face model, and no safetensors files; --dry-run and "
                f"{other_command('plan')} need no more, and a run needs the weights"
            )
        if not complete:
            return None
        wanted = complete[-1]
        if loads:
            logger.warning(
                "WARNING: %s is missing, but there are complete checkpoints; loading the latest, iteration %d",
                directory / TRACKER,
                wanted,
            )
    folder = directory / "release" if wanted == "release" else checkpoint_folder(directory, int(wanted))
    if not folder.is_dir():
        raise CheckpointError(f"{source} asks for {folder}, which does not exist. " + describe_complete(directory))
    return folder


def check_format(folder: Path) -> None:
    """Reject formats that cannot be read. The format is detected from the files, not taken from --ckpt-format.

    Raises:
        CheckpointError: naming the format.
    """
    kind = detect_format(folder)
    # an index without a completion mark may be a save that did not finish: check_complete reports it
    if kind not in (None, *READABLE):
        raise CheckpointError(
            f"{folder} is {_OTHER_FORMATS.get(kind, f'in the format {kind!r}, which is not supported')}"
        )


def check_complete(folder: Path, hashes: bool = False) -> None:
    """Reject an incomplete or damaged checkpoint.

    Raises:
        DamagedError: naming the problems, and what can be loaded instead.
    """
    if problems := check(folder, hashes):
        raise _damaged(folder, problems)


def read_complete(folder: Path, hashes: bool = False, hf_mapping: str | Path | None = None) -> Metadata:
    """Return the index of a checkpoint that is neither incomplete nor damaged. `hf_mapping`: as in `read_index`.

    Raises:
        CheckpointError: as check_complete, or if a Hugging Face folder cannot be read.
    """
    index, problems = read_and_check(folder, hashes, hf_mapping)
    if index is None or problems:
        raise _damaged(folder, problems)
    return index


def _damaged(folder: Path, problems: list[str]) -> DamagedError:
    shown = "\n  ".join(problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else []))
    return DamagedError(
        f"the checkpoint {folder} is incomplete or damaged:\n  {shown}\n" + describe_alternatives(folder)
    )


def latest_iteration(directory: str | Path) -> int | None:
    """Return the iteration that --load would start from (0 for weights only); None without a checkpoint.

    Raises:
        CheckpointError: if the tracker is damaged or names a folder that does not exist.
    """
    folder = resolve_checkpoint(Path(directory), None)
    if folder is None:
        return None
    return 0 if is_weights_only(folder) else folder_iteration(folder)


def is_named_in(directory: str | Path) -> bool:
    """Return whether a folder has a tracker or is a Hugging Face model: --load loads it or ends the run."""
    return (Path(directory) / TRACKER).is_file() or is_hf_folder(Path(directory))


def is_weights_only(folder: Path) -> bool:
    """Whether a folder is a release or a Hugging Face model, from which a run starts at iteration 0."""
    return folder.name == "release" or is_hf_folder(folder)


def folder_iteration(folder: Path) -> int | None:
    """Return the iteration of a checkpoint folder by its name; None for other names."""
    match = re.match(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else None


def peek_latest_valid(directory: str | Path) -> int | None:
    """Return what `latest_valid` will return, by the files' sizes. Logs nothing, so every rank may call it."""
    iterations = complete_iterations(Path(directory))
    return next((each for each in reversed(iterations) if not check(Path(directory) / folder_name(each), False)), None)


def latest_valid(directory: Path, hashes: bool = False, before: int | None = None) -> int | None:
    """Return the latest iteration with a complete, undamaged checkpoint; None without checkpoints.

    With `before` it is the latest one below, None if there is none. It does not depend on the tracker. Every later one
    that is skipped is logged as a warning. `hashes`: as in `index.check`.

    Raises:
        DamagedError: without `before`, if there are checkpoints, or were by the tracker, and none is valid. A run that
            starts from scratch would overwrite them.
    """
    try:
        tracker = read_tracker(directory)
    except CheckpointError as error:
        tracker = None
        logger.warning("WARNING: %s", error)
    iterations = complete_iterations(directory)
    if isinstance(tracker, int) and interrupted_rename(directory, tracker) is not None:
        iterations = sorted([*iterations, tracker])
    for iteration in reversed([each for each in iterations if before is None or each < before]):
        folder = checkpoint_folder(directory, iteration)
        problems = check(folder, hashes)
        if not problems:
            if isinstance(tracker, int) and tracker != iteration:
                logger.warning(
                    "WARNING: %s names iteration %d; the latest valid checkpoint is that of iteration %d",
                    directory / TRACKER,
                    tracker,
                    iteration,
                )
            return iteration
        logger.warning("WARNING: skipping the damaged checkpoint %s: %s", folder, problems[0])
    if before is None and (iterations or isinstance(tracker, int)):
        state = "it holds no checkpoint"
        if iterations:
            state = f"none of its checkpoints (iteration {', '.join(map(str, iterations[-5:]))}) is valid"
        raise DamagedError(
            f"{directory}: {state}, and the tracker names {tracker}; repair one, or give another --save folder "
            "to start from scratch. Keep this one: what cannot be read now may be valid"
        )
    return None


def saved_padded_vocab_size(
    directory: str | Path, ckpt_step: int | None = None, hf_mapping: str | Path | None = None
) -> int | None:
    """Return the padded vocabulary size (rows of the token embedding) of the checkpoint that would be loaded.

    `hf_mapping`: as in `read_index`.

    Returns:
        The size; None without a checkpoint, an embedding or a known format.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    folder = resolve_checkpoint(Path(directory), ckpt_step)
    if folder is None or detect_format(folder) not in (NATIVE, HUGGING_FACE, LEGACY):
        return None
    index, key = read_index(folder, hf_mapping), "embedding.word_embeddings.weight"
    return int(tensor_entry(index, key).size[0]) if key in index.state_dict_metadata else None


def read_saved_args(
    directory: str | Path, ckpt_step: int | None = None, hf_mapping: str | Path | None = None
) -> dict[str, Any]:
    """Return the flags, by destination, that a checkpoint was written with, for --use-checkpoint-args.

    Values of Megatron's own classes become the builtin values that they were made from. `hf_mapping`: as in
    `read_index`.

    Raises:
        CheckpointError: if there is no checkpoint or it cannot be used.
    """
    place = Path(directory)
    if ckpt_step is None and read_tracker(place) is None and not complete_iterations(place) and lacks_weights(place):
        return read_planned_flags(place, hf_mapping)
    folder = resolve_checkpoint(place, ckpt_step)
    if folder is None:
        raise CheckpointError(
            f"--use-checkpoint-args: no checkpoint in {directory}: {Path(directory) / TRACKER} is missing"
        )
    check_format(folder)
    state, _, _ = common_state.parse(common_state.read(folder, read_complete(folder, hf_mapping=hf_mapping)))
    return dict(state.args)
