"""--export-weights: the whole model as one safetensors file, written tensor by tensor.

Rank 0 receives one tensor at a time (model/weights.py), so it must not keep them: a large model does not fit into one host's
memory. A safetensors file begins with a table of all its tensors, which is only known at the end; therefore the elements go to a
file beside the target first. The target appears complete or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from types import MappingProxyType

import torch
from torch import Tensor

from moe_trainer.model.weights import export_named_weights
from moe_trainer.run import Run
from moe_trainer.training.agreement import sent_by_all, written_by_all

logger = logging.getLogger(__name__)

_NAMES = MappingProxyType({torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"})
_ALIGNMENT = 8  # bytes, of the elements' beginning
_CHUNK = 2**24  # bytes to copy at a time


def export_weights(run: Run, path: str) -> None:
    """Write all weights and checkpointed buffers to `path`. Collective over the world.

    Raises: InputError on every rank when the file cannot be written.
    """
    run.wait_params()
    weights = export_named_weights(run.chunks, run.ps)
    with written_by_all(run, f"--export-weights {path}"):
        with sent_by_all(weights):
            if run.ps.world.rank == 0:
                logger.info("%d tensors written to %s", write_weights(weights, path), path)


def write_weights(weights: Iterable[tuple[str, Tensor]], path: str) -> int:
    """Write a safetensors file, holding one tensor at a time; it needs twice its size on the disk meanwhile.

    Returns: the number of tensors. Raises: OSError.
    """
    elements, complete = f"{path}.elements.tmp", f"{path}.tmp"
    try:
        table = _write_elements(weights, elements)
        _write_file(table, elements, complete)
        os.replace(complete, path)
    finally:
        for leftover in (elements, complete):
            with suppress(FileNotFoundError):
                os.remove(leftover)
    return len(table)


def _write_elements(weights: Iterable[tuple[str, Tensor]], path: str) -> dict[str, dict]:
    """All elements one after the other. Returns: the table of a safetensors file."""
    table, end = {}, 0
    with open(path, "wb") as file:
        for name, tensor in weights:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            begin, end = end, end + data.numel()
            table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            file.write(memoryview(data.numpy()))
    return table


def _write_file(table: dict[str, dict], elements: str, path: str) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with open(elements, "rb") as source, open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        shutil.copyfileobj(source, file, _CHUNK)
