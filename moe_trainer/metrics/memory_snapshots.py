"""Snapshots of device allocations (`--record-memory-history`) for https://docs.pytorch.org/memory_viz.

One at every log interval, and one of every rank that runs out of memory.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from moe_trainer.io import atomic_path

logger = logging.getLogger(__name__)

_MAX_EVENTS = 100_000  # with their stacks, some hundred bytes each on the host


class MemorySnapshotRecorder:
    """Records allocations from its construction on. Rank `writer` writes the snapshots to `path`."""

    def __init__(self, path: str, rank: int, writer: int, memory: Any = torch.cuda.memory):
        self._path, self._rank, self._writer, self._memory = Path(path), rank, writer, memory
        memory._record_memory_history(max_entries=_MAX_EVENTS)
        observe = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if observe is not None:
            observe(self._out_of_memory)

    def snapshot(self) -> None:
        """Write the history so far, on rank `writer`."""
        if self._rank == self._writer:
            self._write(self._path)

    def _out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        target = self._path.with_name(f"oom_rank-{self._rank}_{self._path.name}")
        logger.warning("rank %d is out of memory; writing its allocations to %s", self._rank, target)
        self._write(target)

    def _write(self, target: Path) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as temporary:
                self._memory._dump_snapshot(str(temporary))
        except OSError as error:  # must not end the run
            logger.warning("--memory-snapshot-path: cannot write %s: %s", target, error.strerror or error)
