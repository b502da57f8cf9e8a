"""What a format adds to a save, which writes the shards of all ranks as the chunks of a native checkpoint."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INTEGRITY
from moe_trainer.checkpoint.folder_format import NATIVE
from moe_trainer.checkpoint.native_index import write_hashes
from moe_trainer.checkpoint.options import CheckpointState, SaveOptions
from moe_trainer.io import flush_file
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class SavedRun:
    """What is saved.

    Attributes:
        scalars: of the optimizer, None without its state.
        common: the common state, on rank 0.
    """

    state: CheckpointState
    chunks: Sequence[Any]
    scalars: Mapping[str, Any] | None
    common: dict[str, Any] | None


class FormatWriter(ABC):
    """This rank's part of what a format has besides the chunks.

    Attributes:
        keeps_chunks: whether the chunks are the checkpoint; else `convert` makes its files of them.
    """

    name: ClassVar[str]
    keeps_chunks: ClassVar[bool]

    def __init__(self, folder: Path, run: SavedRun, ps: ParallelState, options: SaveOptions):
        """Prepare the files in `folder`, where nothing is yet. Collective. What may change later is copied."""
        self._folder, self._ps, self._options = folder, ps, options

    @classmethod
    def chunks_folder(cls, folder: Path) -> Path:
        """Return where the chunks of a checkpoint in `folder` are written."""
        return folder if cls.keeps_chunks else folder / "chunks"

    @abstractmethod
    def write(self) -> None:
        """Write files that need no chunks. Not collective.

        Raises:
            OSError: if it cannot.
        """

    @abstractmethod
    def convert(self) -> None:
        """Make this rank's files of the chunks that all ranks have written. Not collective.

        Raises:
            CheckpointError: for a model that the format cannot represent.
            OSError: if they cannot be written.
        """

    @abstractmethod
    def complete(self) -> None:
        """Leave only what belongs to the checkpoint, and mark it as complete. On one rank.

        Raises:
            OSError: if it cannot.
        """


class NativeWriter(FormatWriter):
    """The chunks are the checkpoint; the mark of its completion is a file, which may have the hashes of all others."""

    name = NATIVE
    keeps_chunks = True

    def __init__(self, folder: Path, run: SavedRun, ps: ParallelState, options: SaveOptions):
        super().__init__(folder, run, ps, options)
        # releases of Megatron-LM up to core_v0.18 read the common state from a separate file
        self._common_file = None if run.common is None else common_state.dump_file(run.common)

    def write(self) -> None:
        if self._common_file is not None:
            (self._folder / common_state.OLD_FILE).write_bytes(self._common_file)
            flush_file(self._folder / common_state.OLD_FILE)

    def convert(self) -> None:
        """Nothing: the chunks stay as they are."""

    def complete(self) -> None:
        mark = {"sharded_backend": NATIVE, "sharded_backend_version": 1}
        (self._folder / COMPLETE).write_text(json.dumps(mark))
        if self._options.verify_integrity:
            write_hashes(self._folder)
            flush_file(self._folder / INTEGRITY)
        flush_file(self._folder / COMPLETE)
