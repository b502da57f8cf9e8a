"""Weights of a model that is in memory, under Hugging Face names, one after the other.

`HFWeights` converts a stream of native tensors, in any order. What it holds at a time is one tensor, and the parts of
tensors that several native ones are made into: the experts of a layer, where the family stacks them.
`SnapshotFolder` writes such streams into a folder from which other programs load.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_trainer.checkpoint.errors import CheckpointError, StorageError
from moe_trainer.checkpoint.hf.config import write_config
from moe_trainer.checkpoint.hf.conversion_job import write_text
from moe_trainer.checkpoint.hf.export import yarn_length
from moe_trainer.checkpoint.hf.families import FAMILIES, Families
from moe_trainer.checkpoint.hf.files import CONFIG, INDEX
from moe_trainer.checkpoint.hf.names import (
    VOCABULARY,
    HFTensor,
    TensorMapping,
    duplicated_tensors,
    model_sizes,
    raise_problems,
    tensor_mappings,
)

LATEST = "latest.json"
_PREFIX, _PARTIAL = "weights_", ".partial"


class HFWeights:
    """Converts the weights of the model that `flags` describe.

    Args:
        flags: of the run.
        padded_rows: of the embedding.
        rows: of the embedding that are converted; None for all.
        dtype: of the weights, for config.json.
        kind: model type, by default the first that expresses the model.
        families: those that can be written.

    Attributes:
        config: the content of config.json.

    Raises:
        CheckpointError: if no model type expresses the model.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        padded_rows: int,
        rows: int | None,
        dtype: torch.dtype,
        kind: str | None = None,
        families: Families = FAMILIES,
    ):
        flags = {**flags, "rows": padded_rows}
        family, config = write_config(flags, rows or padded_rows, kind, families)
        words = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        words |= {"torch_dtype": str(dtype).removeprefix("torch.")}
        self.config = config | yarn_length(config) | words
        self._rows, self._sizes = rows, model_sizes(flags)
        self._mappings = {mapping.native: mapping for mapping in tensor_mappings(family.names, flags)}
        # a checkpoint has the parts of these weights as tensors: ...in_proj.weight.query
        self._parts: dict[str, list[TensorMapping]] = {}
        for name, mapping in self._mappings.items():
            whole, _, _ = name.rpartition(".")
            if whole.endswith((".weight", ".bias")):
                self._parts.setdefault(whole, []).append(mapping)
        self._copies: dict[str, list[str]] = {}
        for name, original in duplicated_tensors(family.names, flags).items():
            if name != "lm_head.weight":  # transformers ties it
                self._copies.setdefault(original, []).append(name)

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face tensors of native ones; a tensor may be a view of its source.

        Raises:
            CheckpointError: naming tensors that are missing, of another shape, or of no Hugging Face tensor.
        """
        waiting: dict[str, Tensor] = {}
        stacks: dict[str, list[Tensor | None]] = {}
        seen: set[str] = set()
        for name, tensor in chain.from_iterable(self._separate(name, tensor) for name, tensor in tensors):
            mapping = self._mappings.get(name)
            if mapping is None or tuple(tensor.shape) != mapping.shape:
                needed = "no tensor of the model type is made of it" if mapping is None else list(mapping.shape)
                raise CheckpointError(f"{name} has the shape {list(tensor.shape)}: {needed}")
            seen.add(name)
            for ref, part in self._split(mapping, name, tensor, waiting):
                yield from self._complete(ref, part, stacks)
        raise_problems([f"{name} is missing" for name in self._mappings if name not in seen])

    def _separate(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        parts = self._parts.get(name)
        if parts is None or sum(part.shape[0] for part in parts) != tensor.shape[0]:
            return [(name, tensor)]
        return list(zip((part.native for part in parts), tensor.split([part.shape[0] for part in parts]), strict=True))

    def _split(
        self, mapping: TensorMapping, name: str, tensor: Tensor, waiting: dict[str, Tensor]
    ) -> Iterator[tuple[HFTensor, Tensor]]:
        """Yield the parts of a native tensor, or of all siblings once the last one has come."""
        native: Any = tensor
        if mapping.siblings:
            waiting[name] = tensor
            if not all(sibling in waiting for sibling in mapping.siblings):
                return
            native = [waiting.pop(sibling) for sibling in mapping.siblings]
        for ref, part in zip(mapping.sources, mapping.transform.to_hf(native, self._sizes), strict=True):
            yield ref, part[: self._rows] if mapping.native in VOCABULARY else part

    def _complete(
        self, ref: HFTensor, part: Tensor, stacks: dict[str, list[Tensor | None]]
    ) -> Iterator[tuple[str, Tensor]]:
        if ref.index is not None:
            slices = stacks.setdefault(ref.name, [None] * ref.stack)
            slices[ref.index] = part
            if any(each is None for each in slices):
                return
            part = torch.stack([each for each in stacks.pop(ref.name) if each is not None])
        for name in (ref.name, *self._copies.get(ref.name, ())):
            yield name, part


def split_into_buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield runs of at most `max_bytes` (one tensor if that is larger)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class SnapshotFolder:
    """A folder of snapshots of the weights, each a Hugging Face folder.

    latest.json names the newest one: {"iteration": 10, "folder": "weights_0000010"}. It is replaced when the snapshot
    is complete, so a reader never sees a part of one. The newest snapshot and the one before remain.

    Args:
        folder: to create.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._withdrawn: str | None = None

    def withdraw(self) -> None:
        """Remove latest.json of an earlier run; its last snapshot stays until the second new one is published.

        Raises:
            StorageError: if it cannot be removed.
        """
        self._withdrawn = self._latest()
        try:
            (self._folder / LATEST).unlink(missing_ok=True)
        except NotADirectoryError:
            pass  # `publish` says so
        except OSError as error:
            raise StorageError(f"{self._folder / LATEST} cannot be removed: {error.strerror or error}") from error

    def publish(self, iteration: int, config: Mapping[str, Any], buckets: Iterable[list[tuple[str, Tensor]]]) -> Path:
        """Write a snapshot, a file per bucket, and return its folder.

        Raises:
            StorageError: if the disk would not take it; earlier snapshots are as they were.
        """
        names = chain([_PREFIX + f"{iteration:07d}"], (_PREFIX + f"{iteration:07d}.{number}" for number in count(1)))
        target = next(self._folder / name for name in names if not (self._folder / name).exists())
        part = target.with_name(target.name + _PARTIAL)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            self._write(part, config, buckets)
            os.rename(part, target)
            before = self._latest() or self._withdrawn
            write_text(self._folder / LATEST, json.dumps({"iteration": iteration, "folder": target.name}) + "\n")
            for path in self._folder.glob(f"{_PREFIX}*"):
                if path.name not in (target.name, before):
                    shutil.rmtree(path, ignore_errors=True)
        except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
            shutil.rmtree(part, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"{target} cannot be written: {reason}") from error
        return target

    def _write(self, part: Path, config: Mapping[str, Any], buckets: Iterable[list[tuple[str, Tensor]]]) -> None:
        files: dict[str, str] = {}
        num_bytes = 0
        for number, bucket in enumerate(buckets, 1):
            file = f"model-{number:05d}.safetensors"
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
            save_file(tensors, part / file, metadata={"format": "pt"})
            files |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        write_text(part / INDEX, json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}, indent=1))
        write_text(part / CONFIG, json.dumps(config, indent=2) + "\n")

    def _latest(self) -> str | None:
        try:
            return json.loads((self._folder / LATEST).read_text())["folder"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
