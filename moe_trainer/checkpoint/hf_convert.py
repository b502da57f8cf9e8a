"""Conversion between checkpoints of ours and Hugging Face folders: streamed, in parallel, to be continued after a kill.

What is to be written is planned first: every tensor with its shape and what it is made of, dealt out to files of bounded size. A file
depends on nothing but the plan, so workers and ranks write different ones without speaking to each other, one tensor in memory at a
time. All is written into a folder beside the target (TARGET.converting); a file gets its name when it is complete and flushed, and a
note beside it then says so. Whoever is last adds the index and config.json, or the index and the completion mark, and gives the folder
its name. So a kill at any moment costs the files under way, the next run of the same command continues, and nothing unfinished has the
target's name.

Rejected: writing into the target itself (a folder with half the files looks like a model to many readers).
"""

import fcntl
import json
import logging
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.directory import COMPLETE, INDEX, flush_file, flush_folder, write_tracker
from moe_trainer.checkpoint.errors import CheckpointError, StorageError
from moe_trainer.checkpoint.hf import Model, record_of, tokenizer_files
from moe_trainer.checkpoint.hf_config import read_config, write_config
from moe_trainer.checkpoint.hf_files import CONFIG, SINGLE, bytes_of, table_of
from moe_trainer.checkpoint.hf_files import INDEX as HF_INDEX
from moe_trainer.checkpoint.hf_names import Link, copies, links, model_sizes, num_bytes, refuse
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors, read_logical
from moe_trainer.checkpoint.options import CheckpointState
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.parallel.params import ParamInfo

logger = logging.getLogger(__name__)

_PLAN, _LOCK = "conversion.json", ".finishing"
_SCALING = "fp8."


@dataclass(frozen=True)
class Item:
    """One tensor to be written. make: yields it, in pieces along its first dimension."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]] = field(compare=False)

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class Job:
    """A planned conversion. target: the folder that appears in the end. source: what tells its source from another one.

    write: (path, items) -> what the index must know of a file. finish: (folder, notes of all files) adds what stands for completeness.
    publish: after the folder has its name. single: the target is the one file.
    """

    target: Path
    source: str
    files: tuple[tuple[str, tuple[Item, ...]], ...]
    write: Callable[[Path, Sequence[Item]], Any]
    finish: Callable[[Path, Mapping[str, Any]], None]
    publish: Callable[[], None] = lambda: None
    single: bool = False

    @property
    def folder(self) -> Path:
        """Where everything is until then."""
        return self.target.with_name(self.target.name + ".converting")

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for _, items in self.files for item in items)


# ---- running a job


def open_job(job: Job) -> None:
    """Make the folder, or see that what is in it belongs to this job. Raises: CheckpointError."""
    if job.target.exists() and (job.single or not job.target.is_dir() or any(job.target.iterdir())):
        raise CheckpointError(f"{job.target} is there already; choose another folder, or remove it")
    head = {"source": job.source, "files": [name for name, _ in job.files], "bytes": job.num_bytes}
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        if (job.folder / _PLAN).is_file():
            if json.loads((job.folder / _PLAN).read_text()) != head:
                raise CheckpointError(f"{job.folder} belongs to another conversion, or its source has changed since; remove that folder to begin anew")
        else:
            _write_text(job.folder / _PLAN, json.dumps(head))
    except (OSError, ValueError) as error:
        raise error if isinstance(error, CheckpointError) else StorageError(f"{job.folder} cannot be used: {error}") from error


def run_share(job: Job, rank: int = 0, world: int = 1, after_each: Callable[[], None] = lambda: None) -> None:
    """Write the files whose number is `rank` modulo `world` and that are not there yet. after_each: is called after every file.

    Raises: CheckpointError.
    """
    for name, items in job.files[rank::world]:
        if not _is_done(job.folder, name):
            part = _part(job.folder / name)
            try:
                known = job.write(part, items)
                flush_file(part)
                os.replace(part, job.folder / name)
                _write_text(_note(job.folder, name), json.dumps({"bytes": (job.folder / name).stat().st_size, "known": known}))
            except OSError as error:
                raise StorageError(f"{job.folder / name} cannot be written: {error}") from error
            finally:
                part.unlink(missing_ok=True)
            after_each()


def missing_files(job: Job) -> list[str]:
    """The files that are not written yet."""
    return [name for name, _ in job.files if not _is_done(job.folder, name)]


def finish_job(job: Job) -> bool:
    """Complete the target if all files are there; whoever comes first does it. Returns: whether the target is complete."""
    if not job.folder.is_dir():
        return job.target.exists()
    with open(job.folder / _LOCK, "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not job.folder.is_dir():
            return job.target.exists()
        if missing_files(job):
            return False
        notes = {name: json.loads(_note(job.folder, name).read_text())["known"] for name, _ in job.files}
        for path in job.folder.glob("*.part-*"):
            path.unlink()
        job.finish(job.folder, notes)
        for path in [_note(job.folder, name) for name in notes] + [job.folder / _PLAN, job.folder / _LOCK]:
            path.unlink(missing_ok=True)
        flush_folder(job.folder)
        if job.single:
            os.replace(job.folder / job.files[0][0], job.target)
            job.folder.rmdir()
        else:
            if job.target.is_dir():
                job.target.rmdir()
            os.rename(job.folder, job.target)
        flush_folder(job.target.parent)
        job.publish()
    return True


def _note(folder: Path, name: str) -> Path:
    return folder / f".{name}.done"


def _is_done(folder: Path, name: str) -> bool:
    try:
        return json.loads(_note(folder, name).read_text())["bytes"] == (folder / name).stat().st_size
    except (OSError, ValueError, KeyError):
        return False


def _part(path: Path) -> Path:
    """Where this process writes what will be `path`."""
    return path.with_name(f"{path.name}.part-{socket.gethostname()}-{os.getpid()}")


def _write_text(path: Path, text: str) -> None:
    """Complete or not at all."""
    part = _part(path)
    part.write_text(text)
    flush_file(part)
    os.replace(part, path)


def _deal_out(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Cut a list into runs of at most `most` bytes (one item where that is larger)."""
    runs: list[list[Item]] = []
    size = 0
    for item in items:
        if not runs or size + item.num_bytes > most:
            runs.append([])
            size = 0
        runs[-1].append(item)
        size += item.num_bytes
    return runs


def fingerprint(paths: Sequence[Path], **options: Any) -> str:
    """What tells one source, converted one way, from another: names, sizes and times of its files, and the options."""
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return json.dumps([files, {name: str(value) for name, value in sorted(options.items())}])


# ---- Hugging Face -> ours


def plan_to_ours(model: Model, directory: Path, record: Mapping[str, Any], most: int, dtype: torch.dtype | None = None) -> Job:
    """Weights only, as DIRECTORY/release, with the flags of `record`. dtype: of the weights, None for that of the source."""
    scheme = KeyScheme.from_record(record)
    target = directory / "release"
    items = [_item_of_ours(model, link, dtype, len(scheme.locate(link.ours)[1])) for link in model.links]
    files = tuple((f"__{number}_0.distcp", tuple(run)) for number, run in enumerate(_deal_out(items, most)))
    shapes = {link.ours: (link.shape, model.dtype_of(link, dtype)) for link in model.links}

    def finish(folder: Path, notes: Mapping[str, Any]) -> None:
        _finish_ours(folder, notes, shapes, scheme, _with_tokenizer(model, target, record))
        copied = tokenizer_files(model.folder)
        if copied:
            (folder / "tokenizer").mkdir(exist_ok=True)
            for path in [*copied, model.folder / CONFIG]:
                flush_file(Path(shutil.copyfile(path, folder / "tokenizer" / path.name)))
        _write_text(folder / COMPLETE, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))

    return Job(target, fingerprint([*model.source.files, model.folder / CONFIG], to="ours", most=most, dtype=dtype), files, _write_entries, finish,
               lambda: write_tracker(directory, "release"))


def _with_tokenizer(model: Model, target: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    tokenizer = record_of(model)["tokenizer_type"] == "HuggingFaceTokenizer"
    return dict(record) | ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(target.absolute() / "tokenizer")} if tokenizer else {})


def _item_of_ours(model: Model, link: Link, dtype: torch.dtype | None, leading: int = 0) -> Item:
    """leading: axes of the stored tensor, over layers and experts, before its own; they are one long here."""
    shape = (*(1 for _ in range(leading)), *link.shape)

    def make() -> Iterator[Tensor]:
        yield model.make(link, dtype).reshape(shape)

    return Item(link.ours, model.dtype_of(link, dtype), shape, make)


def plan_to_weights(model: Model, target: Path, dtype: torch.dtype | None = None) -> Job:
    """All tensors of ours as the one safetensors file that --export-weights writes. It is begun anew after a kill."""
    items = tuple(_item_of_ours(model, link, dtype) for link in model.links)
    return Job(target, fingerprint(model.source.files, to="weights", dtype=dtype), ((SINGLE, items),), _write_safetensors,
               lambda folder, notes: None, single=True)


def _write_entries(path: Path, items: Sequence[Item]) -> list[tuple[str, int, int]]:
    """A data file of torch's format. Returns: name, first byte and length of every tensor."""
    known = []
    with open(path, "wb") as file:
        for item in items:
            start = file.tell()
            (value,) = item.make()
            torch.save(value.contiguous(), _Stream(file))
            known.append((item.name, start, file.tell() - start))
    return known


class _Stream:
    """What torch.save writes to: appends, and cannot be asked for its place, which is not the file's."""

    def __init__(self, file: Any):
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _finish_ours(folder: Path, notes: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], scheme: KeyScheme,
                 record: Mapping[str, Any]) -> None:
    """The index of all files, and the state that is no tensor."""
    index = Metadata({})
    index.storage_data = {}
    content = common_state.dump_object(common_state.build(CheckpointState(0, record), None)), common_state.dump_object(None)
    state = f"__{len(notes)}_0.distcp"
    (folder / state).write_bytes(b"".join(content))
    flush_file(folder / state)
    index.state_dict_metadata[common_state.KEY] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(common_state.KEY)] = _StorageInfo(state, 0, len(content[0]))
    for file, known in notes.items():
        for name, start, length in known:
            shape, dtype = shapes[name]
            key, at, extents = scheme.locate(name)
            entry = index.state_dict_metadata.setdefault(
                key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size((*extents, *shape)), []))
            offsets = torch.Size((*at, *(0 for _ in shape)))
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in at), *shape))))
            index.storage_data[MetadataIndex(key, offsets)] = _StorageInfo(file, start, length)
            for extra in scheme.extra_state_keys(ParamInfo((name,))):  # all empty, and stored once
                index.state_dict_metadata[extra] = BytesStorageMetadata()
                index.storage_data[MetadataIndex(extra)] = _StorageInfo(state, len(content[0]), len(content[1]))
    with open(folder / INDEX, "wb") as file:
        pickle.dump(index, file)
    flush_file(folder / INDEX)


# ---- ours -> Hugging Face


def plan_to_hf(folder: Path, target: Path, most: int, kind: str | None = None, rows: int | None = None, dtype: torch.dtype | None = None,
               extra: Mapping[str, Any] | None = None, tokenizer: Path | None = None) -> Job:
    """The weights of a checkpoint folder of ours, as a Hugging Face folder.

    kind: the model type, None for the first that fits. rows: of the embedding, None for all that are stored. extra: further keys of
    config.json. tokenizer: the folder whose tokenizer files go with it.
    Raises: CheckpointError naming what is missing, left over or of another shape, or the flags that no model type has.
    """
    index = read_index(folder)
    state, _, _ = common_state.parse(common_state.read(folder, index))
    tensors = {tensor.name: tensor for tensor in logical_tensors(index) if tensor.state is None and not tensor.name.startswith(_SCALING)}
    embedding = tensors.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise CheckpointError(f"{folder} has no embedding.word_embeddings.weight")
    stored = embedding.shape[0]
    if rows is not None and not 0 < rows <= stored:
        raise CheckpointError(f"--vocab-size {rows}: the embedding has {stored} rows")
    flags = dict(state.args) | {"rows": stored}
    family, config = write_config(flags, rows or stored, kind)
    found = links(family.name, flags)
    _check_ours(found, tensors)
    cut = rows if rows not in (None, stored) else None
    last = _Last(lambda link: link.how.part(_read_ours(folder, index, tensors, link), model_sizes(flags)))
    items = [item for link in found if link.ours == (link.pieces or (link.ours,))[0] for item in _items_of_theirs(link, last, tensors[link.ours].dtype, cut, dtype)]
    items = _stacks_joined(items)
    by_name = {item.name: item for item in items}
    items += [Item(name, by_name[original].dtype, by_name[original].shape, by_name[original].make)
              for name, original in copies(family.name, flags).items() if name != "lm_head.weight"]
    runs = _deal_out(items, most)
    names = [SINGLE] if len(runs) == 1 else [f"model-{number + 1:05d}-of-{len(runs):05d}.safetensors" for number in range(len(runs))]
    words = str(embedding.dtype if dtype is None else dtype).removeprefix("torch.")
    for note in read_config(config)[2]:
        logger.info("  %s", note)
    config |= {"bos_token_id": None, "eos_token_id": None} | dict(extra or {}) | {"torch_dtype": words}
    options = {"to": "hf", "most": most, "rows": rows, "dtype": dtype, "config": json.dumps(config, sort_keys=True, default=str)}

    def finish(folder: Path, notes: Mapping[str, Any]) -> None:
        for path in tokenizer_files(tokenizer) if tokenizer is not None else ():
            flush_file(Path(shutil.copyfile(path, folder / path.name)))
        if len(notes) > 1:
            table = {name: file for file, known in notes.items() for name in known}
            _write_text(folder / HF_INDEX, json.dumps({"metadata": {"total_size": sum(item.num_bytes for item in items)}, "weight_map": table}, indent=1))
        _write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")

    data = sorted(path for path in folder.iterdir() if path.is_file())
    return Job(target, fingerprint(data, **options), tuple(zip(names, map(tuple, runs), strict=True)), _write_safetensors, finish)


def _read_ours(folder: Path, index: Metadata, tensors: Mapping[str, LogicalTensor], link: Link) -> Tensor | list[Tensor]:
    """What the transform of a link parts."""
    if link.pieces:
        return [read_logical(folder, index, tensors[name]) for name in link.pieces]
    return read_logical(folder, index, tensors[link.ours])


def _check_ours(found: Sequence[Link], tensors: Mapping[str, LogicalTensor]) -> None:
    """Raises: CheckpointError naming every tensor that is missing, left over or of another shape."""
    problems = []
    for link in found:
        tensor = tensors.get(link.ours)
        if tensor is None:
            problems.append(f"{link.ours} is missing; {list(link.shape)} is needed")
        elif tensor.shape != link.shape:
            problems.append(f"{link.ours} has the shape {list(tensor.shape)}, and {list(link.shape)} is needed")
    known = {link.ours for link in found}
    problems += [f"{name} is there, and no tensor of the other model is made of it" for name in tensors if name not in known]
    refuse(problems)


class _Last:
    """The parts of the tensor that was read last: gate and up, or queries, keys and values, are asked for one behind the other."""

    def __init__(self, read: Callable[[Link], Sequence[Tensor]]):
        self._read, self._link, self._parts = read, "", ()

    def part(self, link: Link, position: int) -> Tensor:
        if self._link != link.ours:
            self._parts = ()  # before the next one is there
            self._link, self._parts = link.ours, self._read(link)
        return self._parts[position]


@dataclass(frozen=True)
class _Slice:
    """A part of a stack: slice `index` of `count`."""

    item: Item
    index: int
    count: int


def _items_of_theirs(link: Link, last: _Last, stored: torch.dtype, rows: int | None, dtype: torch.dtype | None) -> Iterator[Item | _Slice]:
    kept = torch.float32 if link.keeps_fp32 else dtype or stored
    vocabulary = link.ours in ("embedding.word_embeddings.weight", "output_layer.weight")
    for position, ref in enumerate(link.theirs):
        def make(position: int = position) -> Iterator[Tensor]:
            value = last.part(link, position)
            yield (value[:rows] if vocabulary else value).to(kept)

        shape = (rows, *ref.shape[1:]) if vocabulary and rows is not None else ref.shape
        item = Item(ref.name, kept, shape, make)
        yield item if ref.index is None else _Slice(item, ref.index, ref.stack)


def _stacks_joined(parts: Sequence[Item | _Slice]) -> list[Item]:
    """Slices of one stack become one tensor, made slice by slice."""
    stacks: dict[str, list[_Slice]] = {}
    for part in parts:
        if isinstance(part, _Slice):
            stacks.setdefault(part.item.name, []).append(part)
    found: list[Item] = []
    for part in parts:
        if isinstance(part, Item):
            found.append(part)
        elif part.index == 0:
            slices = sorted(stacks[part.item.name], key=lambda each: each.index)

            def make(slices: Sequence[_Slice] = slices) -> Iterator[Tensor]:
                for each in slices:
                    yield from each.item.make()

            found.append(Item(part.item.name, part.item.dtype, (part.count, *part.item.shape), make))
    return found


def _write_safetensors(path: Path, items: Sequence[Item]) -> list[str]:
    """A safetensors file. Returns: the names in it."""
    with open(path, "wb") as file:
        file.write(table_of([(item.name, item.dtype, item.shape) for item in items]))
        for item in items:
            written = 0
            for value in item.make():
                written += file.write(bytes_of(value))
            assert written == item.num_bytes, f"{item.name}: {written} bytes, {item.num_bytes} planned"
    return [item.name for item in items]


class Progress:
    """Says from time to time how far a conversion is, and how fast. seconds: between two lines."""

    def __init__(self, job: Job, seconds: float = 10.0):
        self._job, self._seconds = job, seconds
        self._begun = self._told = time.monotonic()
        self._done = job.num_bytes - self._left()
        self._first = self._done

    def _left(self) -> int:
        missing = set(missing_files(self._job))
        return sum(item.num_bytes for name, items in self._job.files if name in missing for item in items)

    def look(self, last: bool = False) -> None:
        """Log a line if it is time for one."""
        now = time.monotonic()
        if last or now - self._told >= self._seconds:
            self._told = now
            self._done = self._job.num_bytes if last else self._job.num_bytes - self._left()
            speed = (self._done - self._first) / max(now - self._begun, 1e-9)
            left = f", {(self._job.num_bytes - self._done) / speed / 60:.0f} min left" if speed and not last else ""
            logger.info("%.2f of %.2f GB, %.0f MB/s%s", self._done / 1e9, self._job.num_bytes / 1e9, speed / 1e6, left)

