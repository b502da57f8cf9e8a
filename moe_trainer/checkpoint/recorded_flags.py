"""The flags that --use-checkpoint-args takes: read from the checkpoint that a command line names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import arguments
from arguments.report import get_world_size

if TYPE_CHECKING:
    from arguments.checkpoint_args import CheckpointArgsSource


def read_recorded_flags(argv: list[str], world_size: int | None = None) -> Mapping[str, object] | None:
    """Return the flags that the checkpoint recorded, None without --use-checkpoint-args, none without a checkpoint.

    Imports torch only if there is something to read. `world_size` None: as `get_world_size` counts the ranks.

    Raises:
        ValueError: if the checkpoint cannot be read; an ArgumentError if the command line has other errors too.
    """
    source = arguments.find_checkpoint_args_source(argv)
    if source is None:
        return None
    try:
        return _read_flags(source)
    except ValueError as error:
        if world_size is None:
            world_size, _ = get_world_size(argv)
        others = arguments.violations_without_checkpoint(argv, world_size)
        if not others:
            raise
        raise arguments.ArgumentError(
            [arguments.Violation(("--use-checkpoint-args",), str(error), "machine"), *others]
        ) from error


def _read_flags(source: CheckpointArgsSource) -> Mapping[str, object]:
    from moe_trainer.checkpoint.resolve import latest_iteration, peek_latest_valid, read_saved_args

    if source.own is not None:
        newest = peek_latest_valid(source.own)
        if newest is not None:
            return read_saved_args(source.own, newest)
    if source.folder is None or source.may_come and latest_iteration(source.folder) is None:
        return {}
    return read_saved_args(source.folder, source.step, source.hf_mapping)
