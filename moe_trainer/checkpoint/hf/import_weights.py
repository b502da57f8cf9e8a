"""Plan the import of a Hugging Face model: a checkpoint of weights, or the file that --export-weights writes.

A checkpoint is DIRECTORY/release with data files as torch writes them (an entry per tensor of a layer and expert), and,
when all exist, the index, the non-tensor state, the tokenizer files and the completion mark.
"""

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, TRACKER, write_tracker
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.conversion_job import (
    ConversionJob,
    PlannedTensor,
    fingerprint,
    split_by_size,
    write_safetensors,
    write_text,
)
from moe_trainer.checkpoint.hf.files import CONFIG, SINGLE
from moe_trainer.checkpoint.hf.folder import HFModel, tokenizer_files, tokenizer_flags
from moe_trainer.checkpoint.hf.import_adapters import ImportedAdapters
from moe_trainer.checkpoint.hf.names import TensorMapping
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.checkpoint.virtual_index import add_chunk, add_object
from moe_trainer.io import flush_file
from moe_trainer.parallel.params import ParamInfo


def plan_native_checkpoint(
    model: HFModel,
    directory: Path,
    record: Mapping[str, Any],
    most: int,
    dtype: torch.dtype | None = None,
    adapters: ImportedAdapters | None = None,
) -> ConversionJob:
    """Plan a checkpoint of weights as DIRECTORY/release, with the flags of `record`.

    The weights have their own dtype by default, and adapters that of the weights.

    Raises:
        CheckpointError: for a directory with checkpoints of a run, which its tracker would no longer name.
    """
    if (directory / TRACKER).is_file() and (
        newest := (directory / TRACKER).read_text(errors="replace").strip()
    ) != "release":
        raise CheckpointError(
            f"{directory} has checkpoints already, the newest of iteration {newest}; choose another folder"
        )
    scheme = KeyScheme.from_record(record)
    target = directory / "release"
    items = [
        _planned_tensor(model, mapping, dtype, len(scheme.locate(mapping.native)[1])) for mapping in model.mappings
    ]
    shapes = {mapping.native: (mapping.shape, model.target_dtype(mapping, dtype)) for mapping in model.mappings}
    for name, tensor in ({} if adapters is None else adapters.tensors).items():
        shapes[name] = tuple(tensor.shape), dtype or model.dtype
        leading = (1,) * len(scheme.locate(name)[1])
        items.append(_planned_adapter(name, tensor.to(shapes[name][1]).reshape(*leading, *tensor.shape)))
    files = tuple((f"__{number}_0.distcp", tuple(run)) for number, run in enumerate(split_by_size(items, most)))

    def finish(folder: Path, notes: Mapping[str, Any]) -> None:
        _finish_native(folder, notes, shapes, scheme, dict(record) | _tokenizer_flags(model, target))
        copied = tokenizer_files(model.folder)
        if copied:
            (folder / "tokenizer").mkdir(exist_ok=True)
            for path in [*copied, model.folder / CONFIG]:
                flush_file(Path(shutil.copyfile(path, folder / "tokenizer" / path.name)))
        write_text(folder / COMPLETE, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    source = fingerprint(
        [*model.source.files, model.folder / CONFIG, *([] if adapters is None else adapters.files)],
        to="ours",
        most=most,
        dtype=dtype,
        impl=record["transformer_impl"],
    )
    return ConversionJob(target, source, files, _write_entries, finish, lambda: write_tracker(directory, "release"))


def _tokenizer_flags(model: HFModel, target: Path) -> dict[str, Any]:
    """Return the flags of the tokenizer that is copied into the checkpoint, nothing if there is none."""
    flags = tokenizer_flags(model.folder, target / "tokenizer")
    return {} if flags["tokenizer_model"] is None else flags


def _planned_tensor(
    model: HFModel, mapping: TensorMapping, dtype: torch.dtype | None, leading: int = 0
) -> PlannedTensor:
    """Plan a native tensor with `leading` axes of size one, over layers and experts, before its own."""
    shape = (*(1 for _ in range(leading)), *mapping.shape)

    def make() -> Iterator[Tensor]:
        yield model.make(mapping, dtype).reshape(shape)

    return PlannedTensor(mapping.native, model.target_dtype(mapping, dtype), shape, make)


def _planned_adapter(name: str, tensor: Tensor) -> PlannedTensor:
    return PlannedTensor(name, tensor.dtype, tuple(tensor.shape), lambda: iter((tensor,)))


def plan_weights_file(model: HFModel, target: Path, dtype: torch.dtype | None = None) -> ConversionJob:
    """Plan the one safetensors file that --export-weights writes. After a kill it is written from the start."""
    items = tuple(_planned_tensor(model, mapping, dtype) for mapping in model.mappings)
    return ConversionJob(
        target,
        fingerprint(model.source.files, to="weights", dtype=dtype),
        ((SINGLE, items),),
        write_safetensors,
        lambda folder, notes: None,
        single=True,
    )


def _write_entries(path: Path, items: Sequence[PlannedTensor]) -> list[tuple[str, int, int]]:
    """Write a data file in the format of torch; return name, first byte and length of every tensor."""
    known = []
    with open(path, "wb") as file:
        for item in items:
            start = file.tell()
            (value,) = item.make()
            stream = _Stream(file)
            try:
                torch.save(value.contiguous(), stream)  # type: ignore[arg-type]
            except RuntimeError as error:  # torch's writer reports a full disk as an unexpected position
                raise stream.error or error from error
            known.append((item.name, start, file.tell() - start))
    return known


class _Stream:
    """An append-only stream for torch.save, without the position of the file."""

    def __init__(self, file: Any):
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _finish_native(
    folder: Path,
    notes: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    scheme: KeyScheme,
    record: Mapping[str, Any],
) -> None:
    """Write the index of all files and the non-tensor state."""
    index = Metadata({}, storage_data={})
    common = common_state.dump_object(common_state.build(CheckpointState(0, record), None))
    empty = common_state.dump_object(None)
    state = f"__{len(notes)}_0.distcp"
    (folder / state).write_bytes(common + empty)
    flush_file(folder / state)
    add_object(index, common_state.KEY, state, 0, len(common))
    for file, known in notes.items():
        for name, start, length in known:
            shape, dtype = shapes[name]
            add_chunk(index, scheme.locate(name), shape, dtype, file, start, length)
            for extra in scheme.extra_state_keys(ParamInfo((name,))):  # all empty, stored once
                add_object(index, extra, state, len(common), len(empty))
    with open(folder / INDEX, "wb") as index_file:
        pickle.dump(index, index_file)
    flush_file(folder / INDEX)
