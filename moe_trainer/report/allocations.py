"""The record of device allocations (`--record-memory-history`): a snapshot for https://docs.pytorch.org/memory_viz at every log interval, and
one of every rank that runs out of memory."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MOST_EVENTS = 100_000  # with stacks, some hundred bytes each on the host


class AllocationRecord:
    """Records from here on. path: of the snapshots, which rank `writer` writes; memory: torch.cuda.memory (tests)."""

    def __init__(self, path: str, rank: int, writer: int, memory: Any = torch.cuda.memory):
        self._path, self._rank, self._writer, self._memory = Path(path), rank, writer, memory
        memory._record_memory_history(max_entries=_MOST_EVENTS)
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe is not None:
            observe(self._out_of_memory)

    def snapshot(self) -> None:
        """Write the history so far, on the rank that does."""
        if self._rank == self._writer:
            self._write(self._path)

    def _out_of_memory(self, device: int, wanted: int, total: int, free: int) -> None:
        target = self._path.with_name(f"oom_rank-{self._rank}_{self._path.name}")
        logger.warning("rank %d is out of memory; its allocations: %s", self._rank, target)
        self._write(target)

    def _write(self, target: Path) -> None:
        """What cannot be written must not end a run."""
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(partial))
            os.replace(partial, target)
        except OSError as error:
            logger.warning("--memory-snapshot-path: %s cannot be written: %s", target, error.strerror or error)
