"""Which checkpoint folder to load, and whether it can be loaded. Not collective; needs no model."""

import logging
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_trainer.checkpoint import common_state, hf, legacy
from moe_trainer.checkpoint.directory import (
    COMPLETE,
    INDEX,
    TRACKER,
    advice,
    complete_iterations,
    describe_complete,
    folder_name,
    read_tracker,
    take_back,
)
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.hf_files import is_folder
from moe_trainer.checkpoint.index import check, detect_format, read_index

logger = logging.getLogger(__name__)

_OTHER_FORMATS = MappingProxyType({
    "zarr": "the zarr format, which Megatron-LM itself has retired; convert it with an older Megatron-LM",
    "fsdp_dtensor": "written by Megatron-FSDP, which this version does not support; save it with --ckpt-format torch_dist",
})


def find(directory: Path, ckpt_step: int | None) -> Path | None:
    """The folder that --load DIRECTORY [--ckpt-step N] means; None when there is no checkpoint at all.

    Raises: CheckpointError when the tracker or --ckpt-step names a folder that is not there.
    """
    if ckpt_step is not None:
        wanted: int | str | None = ckpt_step
        source = f"--ckpt-step {ckpt_step}"
    else:
        wanted = read_tracker(directory)
        source = f"{directory / TRACKER} (which says {wanted})"
    if wanted is None:
        if is_folder(directory):
            return directory
        if (directory / COMPLETE).is_file() or (directory / INDEX).is_file():
            raise CheckpointError(f"--load {directory}: this is the folder of a single checkpoint; give its parent, "
                                  f"--load {directory.absolute().parent}, and choose it with --ckpt-step")
        complete = complete_iterations(directory)
        if not complete:
            return None
        wanted = complete[-1]
        logger.warning("WARNING: %s is missing, but there are complete checkpoints; taking the latest, iteration %d",
                       directory / TRACKER, wanted)
    if wanted == "release":
        folder = directory / "release"
    else:
        folder = directory / folder_name(int(wanted))
        take_back(directory, int(wanted))
    if not folder.is_dir():
        raise CheckpointError(f"{source} asks for {folder}, which does not exist. "
                              + describe_complete(directory))
    return folder


def check_format(folder: Path) -> None:
    """Refuse formats that cannot be read, by their names; which one a folder has is seen from its files, not from --ckpt-format.

    Raises: CheckpointError.
    """
    found = detect_format(folder)
    # an index without a completion mark: judged by check_whole, for it may be a save that did not finish
    if found not in (None, "torch_dist", "torch_dcp", hf.FORMAT, legacy.FORMAT):
        raise CheckpointError(f"{folder} is {_OTHER_FORMATS.get(found, f'in the format {found!r}, which is not supported')}")


def check_whole(folder: Path, hashes: bool = False) -> None:
    """Refuse an incomplete or damaged checkpoint, and say what can be loaded instead.

    Raises: DamagedError.
    """
    problems = check(folder, hashes)
    if problems:
        shown = "\n  ".join(problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else []))
        raise DamagedError(f"the checkpoint {folder} is incomplete or damaged:\n  {shown}\n" + advice(folder))


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration that --load would start from (0 for "release"); None without a checkpoint.

    Raises: CheckpointError when the tracker is damaged or names a folder that is not there.
    """
    folder = find(Path(directory), None)
    if folder is None:
        return None
    return 0 if is_weights_only(folder) else int(folder.name.removeprefix("iter_"))


def is_weights_only(folder: Path) -> bool:
    """Whether a folder is a release or a Hugging Face model: weights that a run begins with at iteration 0."""
    return folder.name == "release" or is_folder(folder)


def newest_in_sight(directory: str | Path) -> int | None:
    """What `newest_whole` will find, by the files' sizes; nothing is said and nothing is mended, so every rank may look for itself."""
    found = complete_iterations(Path(directory))
    return next((each for each in reversed(found) if not check(Path(directory) / folder_name(each), False)), None)


def newest_whole(directory: Path, hashes: bool = False, before: int | None = None) -> int | None:
    """The newest iteration whose checkpoint is complete and undamaged, whatever the tracker says; None where there is no checkpoint.

    Every newer one that is passed over is named in a warning. hashes: as in `check`. before: only older ones than this iteration.
    Raises: DamagedError when there are checkpoints, or were by the tracker, and none is whole: a run that begins anew would bury them.
    """
    try:
        tracker = read_tracker(directory)
    except CheckpointError as error:
        tracker = None
        logger.warning("WARNING: %s", error)
    if isinstance(tracker, int):
        take_back(directory, tracker)
    found = complete_iterations(directory)
    for iteration in reversed([each for each in found if before is None or each < before]):
        problems = check(directory / folder_name(iteration), hashes)
        if not problems:
            if isinstance(tracker, int) and tracker != iteration:
                logger.warning("WARNING: %s says %d; the newest whole checkpoint is that of iteration %d", directory / TRACKER, tracker, iteration)
            return iteration
        logger.warning("WARNING: the checkpoint %s is passed over, it is damaged: %s", directory / folder_name(iteration), problems[0])
    if found or isinstance(tracker, int):
        there = f"none of the checkpoints there (iteration {', '.join(map(str, found[-5:]))}) is whole" if found else "no checkpoint is there"
        raise DamagedError(f"{directory}: {there}, and the tracker says {tracker}; mend one, or move them and the tracker elsewhere to begin anew")
    return None


def saved_vocab_rows(directory: str | Path, ckpt_step: int | None = None) -> int | None:
    """Rows of the token embedding (the padded vocabulary) of the checkpoint that would be loaded; None when there is none to tell.

    Raises: CheckpointError when the folder cannot be read.
    """
    folder = find(Path(directory), ckpt_step)
    if folder is None or detect_format(folder) not in ("torch_dist", hf.FORMAT, legacy.FORMAT):
        return None
    entry = read_index(folder).state_dict_metadata.get("embedding.word_embeddings.weight")
    return None if entry is None else int(entry.size[0])


def read_saved_args(directory: str | Path, ckpt_step: int | None = None) -> dict[str, Any]:
    """The flags, by destination, that a checkpoint was written with, for --use-checkpoint-args.

    Values of Megatron's own classes come back as the plain values that they were made from.
    Raises: CheckpointError when there is no checkpoint or it cannot be used.
    """
    folder = find(Path(directory), ckpt_step)
    if folder is None:
        raise CheckpointError(f"--use-checkpoint-args: no checkpoint in {directory}: {Path(directory) / TRACKER} is missing")
    check_format(folder)
    check_whole(folder)
    state, _, _ = common_state.parse(common_state.read(folder, read_index(folder)))
    return dict(state.args)
