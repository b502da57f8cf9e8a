"""--export-weights: stream the full model into one safetensors file.

Rank 0 receives one tensor at a time and must not keep them, since a large model does not fit into the memory of a
host. The header of a safetensors file lists all tensors, so it is known only at the end; the data is first written to
a second file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from moe_trainer.checkpoint.safetensors_format import safetensors_header, tensor_bytes
from moe_trainer.io import atomic_write
from moe_trainer.model.weights import export_named_weights
from moe_trainer.parallel.coordination import drain_on_exit, raise_on_all_ranks
from moe_trainer.training.run import BaseRun

logger = logging.getLogger(__name__)

_COPY_BYTES = 2**24


def export_weights(run: BaseRun, path: str) -> None:
    """Write all weights and checkpointed buffers to `path`. Collective over the world.

    Raises:
        UserError: on every rank, if the file cannot be written.
    """
    run.wait_params()
    weights = export_named_weights(run.chunks, run.ps)
    with raise_on_all_ranks(run.ps.world, f"--export-weights {path}"):
        with drain_on_exit(weights):
            if run.ps.world.rank == 0:
                logger.info("%d tensors written to %s", write_weights(weights, path), path)


def write_weights(weights: Iterable[tuple[str, Tensor]], path: str) -> int:
    """Write a safetensors file while holding one tensor at a time; needs twice its size on disk meanwhile.

    Returns:
        The number of tensors.
    """
    elements = f"{path}.elements.tmp"
    try:
        entries = _write_elements(weights, elements)
        with open(elements, "rb") as source, atomic_write(path, "wb") as file:
            file.write(safetensors_header(entries))
            shutil.copyfileobj(source, file, _COPY_BYTES)
    finally:
        with suppress(FileNotFoundError):
            os.remove(elements)
    return len(entries)


def _write_elements(weights: Iterable[tuple[str, Tensor]], path: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Write the data of all tensors and return the name, dtype and shape of each."""
    entries = []
    with open(path, "wb") as file:
        for name, tensor in weights:
            file.write(tensor_bytes(tensor))
            entries.append((name, tensor.dtype, tuple(tensor.shape)))
    return entries
