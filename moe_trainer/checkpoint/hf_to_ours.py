"""Hugging Face -> ours: the plan of a checkpoint of weights, or of the one file that --export-weights writes.

A checkpoint is DIRECTORY/release with data files as torch writes them (an entry per tensor of a layer and expert), and, when all are
there, the index, the state that is no tensor, the tokenizer's files and the completion mark.
"""

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, TRACKER, flush_file, write_tracker
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import Model, tokenizer_files, tokenizer_flags
from moe_trainer.checkpoint.hf_files import CONFIG, SINGLE
from moe_trainer.checkpoint.hf_job import Item, Job, deal_out, fingerprint, write_safetensors, write_text
from moe_trainer.checkpoint.hf_names import Link
from moe_trainer.checkpoint.made_index import empty_index, enter_box, enter_object
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.parallel.params import ParamInfo


def plan_to_ours(model: Model, directory: Path, record: Mapping[str, Any], most: int, dtype: torch.dtype | None = None) -> Job:
    """Weights only, as DIRECTORY/release, with the flags of `record`. dtype: of the weights, None for that of the source.

    Raises: CheckpointError for a directory of a run's checkpoints, which would lose sight of them.
    """
    if (directory / TRACKER).is_file() and (newest := (directory / TRACKER).read_text(errors="replace").strip()) != "release":
        raise CheckpointError(f"{directory} has checkpoints already, the newest of iteration {newest}; choose another folder")
    scheme = KeyScheme.from_record(record)
    target = directory / "release"
    items = [_item_of_ours(model, link, dtype, len(scheme.locate(link.ours)[1])) for link in model.links]
    files = tuple((f"__{number}_0.distcp", tuple(run)) for number, run in enumerate(deal_out(items, most)))
    shapes = {link.ours: (link.shape, model.dtype_of(link, dtype)) for link in model.links}

    def finish(folder: Path, notes: Mapping[str, Any]) -> None:
        _finish_ours(folder, notes, shapes, scheme, dict(record) | _tokenizer_flags(model, target))
        copied = tokenizer_files(model.folder)
        if copied:
            (folder / "tokenizer").mkdir(exist_ok=True)
            for path in [*copied, model.folder / CONFIG]:
                flush_file(Path(shutil.copyfile(path, folder / "tokenizer" / path.name)))
        write_text(folder / COMPLETE, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    source = fingerprint([*model.source.files, model.folder / CONFIG], to="ours", most=most, dtype=dtype, impl=record["transformer_impl"])
    return Job(target, source, files, _write_entries, finish, lambda: write_tracker(directory, "release"))


def _tokenizer_flags(model: Model, target: Path) -> dict[str, Any]:
    """Flags of the tokenizer that is copied into the checkpoint; nothing where the folder has none."""
    flags = tokenizer_flags(model.folder, target / "tokenizer")
    return {} if flags["tokenizer_model"] is None else flags


def _item_of_ours(model: Model, link: Link, dtype: torch.dtype | None, leading: int = 0) -> Item:
    """leading: axes of the stored tensor, over layers and experts, before its own; they are one long here."""
    shape = (*(1 for _ in range(leading)), *link.shape)

    def make() -> Iterator[Tensor]:
        yield model.make(link, dtype).reshape(shape)

    return Item(link.ours, model.dtype_of(link, dtype), shape, make)


def plan_to_weights(model: Model, target: Path, dtype: torch.dtype | None = None) -> Job:
    """All tensors of ours as the one safetensors file that --export-weights writes. It is begun anew after a kill."""
    items = tuple(_item_of_ours(model, link, dtype) for link in model.links)
    return Job(target, fingerprint(model.source.files, to="weights", dtype=dtype), ((SINGLE, items),), write_safetensors,
               lambda folder, notes: None, single=True)


def _write_entries(path: Path, items: Sequence[Item]) -> list[tuple[str, int, int]]:
    """A data file of torch's format. Returns: name, first byte and length of every tensor."""
    known = []
    with open(path, "wb") as file:
        for item in items:
            start = file.tell()
            (value,) = item.make()
            stream = _Stream(file)
            try:
                torch.save(value.contiguous(), stream)
            except RuntimeError as error:  # torch's writer says of a full disk that it is at an unexpected place
                raise stream.error or error from error
            known.append((item.name, start, file.tell() - start))
    return known


class _Stream:
    """What torch.save writes to: appends, and cannot be asked for its place, which is not the file's."""

    def __init__(self, file: Any):
        self._file, self.error = file, None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _finish_ours(folder: Path, notes: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], scheme: KeyScheme,
                 record: Mapping[str, Any]) -> None:
    """The index of all files, and the state that is no tensor."""
    index = empty_index()
    content = common_state.dump_object(common_state.build(CheckpointState(0, record), None)), common_state.dump_object(None)
    state = f"__{len(notes)}_0.distcp"
    (folder / state).write_bytes(b"".join(content))
    flush_file(folder / state)
    enter_object(index, common_state.KEY, state, 0, len(content[0]))
    for file, known in notes.items():
        for name, start, length in known:
            shape, dtype = shapes[name]
            enter_box(index, scheme.locate(name), shape, dtype, file, start, length)
            for extra in scheme.extra_state_keys(ParamInfo((name,))):  # all empty, and stored once
                enter_object(index, extra, state, len(content[0]), len(content[1]))
    with open(folder / INDEX, "wb") as file:
        pickle.dump(index, file)
    flush_file(folder / INDEX)
