"""Save and load a training run: the door of this package.

Every function here is collective over `ps.world` unless it says otherwise, and every failure becomes the same
CheckpointError on every rank.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_trainer.checkpoint.options import CheckpointState, LoadedState, LoadOptions, SaveOptions
from moe_trainer.parallel.state import ParallelState


def save(directory: str | Path, state: CheckpointState, chunks: Sequence[Any], optimizer: Any | None, ps: ParallelState,
         options: SaveOptions) -> None:
    """Write `directory/iter_XXXXXXX` and then the tracker file; return when it is on disk.

    chunks: modules whose parameters carry `info` and that have `named_state_buffers()`.
    optimizer: anything with tensors(), scalars(), wait_params(); None (or options.save_optim False) saves weights only.
    Raises: CheckpointError on every rank when any rank cannot write; the previous checkpoint is untouched then.
    """
    raise NotImplementedError


class AsyncSaver:
    """Saves in the background (--async-save): at most one save is under way."""

    def start(self, directory: str | Path, state: CheckpointState, chunks: Sequence[Any], optimizer: Any | None,
              ps: ParallelState, options: SaveOptions) -> None:
        """Copy this rank's share to host memory and begin to write it. Finishes an earlier save first."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Call once per iteration, on every rank: commits the save if all ranks have written their share.

        Returns: True when no save is under way any more.
        Raises: CheckpointError when the save failed on any rank.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the save under way and commit it. Call before exit and before a synchronous save."""
        raise NotImplementedError


def load(directory: str | Path, chunks: Sequence[Any], optimizer: Any | None, ps: ParallelState,
         options: LoadOptions) -> LoadedState | None:
    """Load the checkpoint that the tracker names (or options.ckpt_step) into the model and the optimizer, in place.

    Calls optimizer.load_scalars and optimizer.after_load; restores random states.
    Returns: None when `directory` has no checkpoint and options.exit_on_missing is False (a warning is logged).
    Raises: CheckpointError.
    """
    raise NotImplementedError


def latest_iteration(directory: str | Path) -> int | None:
    """The iteration that the tracker names (0 for "release"); None without a checkpoint. Not collective."""
    raise NotImplementedError


def read_saved_args(directory: str | Path, ckpt_step: int | None = None) -> dict[str, Any]:
    """The flags, by destination, that a checkpoint was written with. Needs no model. Not collective."""
    raise NotImplementedError
