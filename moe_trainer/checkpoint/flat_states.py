"""Optimizer state that Megatron-LM's distributed optimizer has saved flat, presented in the parameters' shapes.

* `dp_reshardable` (its default since core_v0.15): the buckets of every model-parallel rank, one flat tensor each. The
  place of a parameter follows from the order of the modules and the layout that the recorded flags describe, as in the
  legacy format (rank_memory.py).
* `fully_sharded_model_space` (up to core_v0.14): a grid of the shards of ranks, each flat along an additional last
  axis.

`FlatStateMetadata` has the keys and chunks of a native checkpoint, and makes a chunk from the flat ranges on demand. So
any layout can read them, even where Megatron-LM itself requires the same layout. Up to core_v0.13 the keys of state
begin with the number of the optimizer in a chain; these are the same keys without it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from arguments.checkpoint_args import STAGES
from arguments.mtp import num_mtp_depths
from arguments.parallel import ParallelArgs
from arguments.stage_layout import ChunkLayout, chunk_layouts
from moe_trainer.checkpoint import common_state, rank_memory
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors
from moe_trainer.checkpoint.reading import decode, read_object
from moe_trainer.checkpoint.sharding import KeyScheme, entry_of
from moe_trainer.checkpoint.unpickle import to_builtin
from moe_trainer.checkpoint.virtual_index import VirtualMetadata, add_chunk, incomplete_tensors, tensor_entry

_CHAIN = re.compile(r"^chained_\d+\.(?=optimizer\.state\.)")
_STATE = re.compile(r"^optimizer\.state\.([^.]+)\.(.+)$")
_BUCKET = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)$"
)
_SCALARS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_0\.(optimizer|grad_scaler)/")
_EMBEDDINGS = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class FlatRange:
    """A range of the concatenated flat tensors `keys`; `at`: coordinates on the other axes of a single one."""

    keys: tuple[str, ...]
    start: int
    stop: int
    at: tuple[int, ...] = ()


def has_flat_states(index: Metadata) -> bool:
    """Return whether the optimizer state of a checkpoint is in one of these forms."""
    entries = index.state_dict_metadata
    return any(_CHAIN.match(key) or _BUCKET.match(key) or _is_grid(entries, key) for key in entries)


class FlatStateMetadata(VirtualMetadata):
    """The index with the optimizer state in the parameters' shapes; see the head of this file."""

    def __init__(self, folder: Path, stored: Metadata):
        """Add all entries; a problem of the optimizer state alone is stored in `state_problem`.

        Raises:
            CheckpointError: if the common state is damaged.
        """
        super().__init__()
        self._folder, self._stored = folder, stored
        self._flat: dict[MetadataIndex, FlatRange] = {}
        self._renamed: dict[str, str] = {}
        self.common = common_state.read(folder, stored)
        entries = stored.state_dict_metadata
        for key, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata) and _is_grid(entries, key):
                self._add_grid(key, entry)
            elif not _BUCKET.match(key):
                self._copy_entry(key, entry)
        if any(map(_BUCKET.match, entries)):
            try:
                self._add_buckets(to_builtin(self.common["args"]))
            except CheckpointError as error:
                self.state_problem = str(error)
            except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
                self.state_problem = (
                    f"the buckets of its optimizer state do not fit the flags it was saved with: {error!r}"
                )
            if self.state_problem is not None:
                self.state_problem += "; let Megatron-LM save it with --dist-ckpt-optim-fully-reshardable"
                for key in [key for key in self.state_dict_metadata if _STATE.match(key)]:
                    del self.state_dict_metadata[key]

    def read_object(self, key: str) -> Any:
        return read_object(self._folder, self._stored, key)

    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        flat = self._flat.get(MetadataIndex(key, chunk.offsets))
        if flat is None:
            return decode(self._folder, self._stored, self._renamed.get(key, key), chunk)
        return self._read(flat).view(chunk.sizes)

    def _copy_entry(self, key: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> None:
        """Copy an entry, under its name without a chain."""
        name = _CHAIN.sub("", key)
        self._renamed[name] = key
        self.state_dict_metadata[name] = entry
        places = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        for place in places:
            self.storage_data[MetadataIndex(name, place)] = self._stored.storage_data[MetadataIndex(key, place)]

    def _add_grid(self, key: str, entry: TensorStorageMetadata) -> None:
        """Add the shards of a state of fully_sharded_model_space."""
        name = _CHAIN.sub("", key)
        weight = name.split(".", 3)[3]  # after optimizer.state.NAME.
        full = tensor_entry(self._stored, weight).size
        sizes = tuple(whole // parts for whole, parts in zip(full, entry.size))
        in_order = sorted((tuple(chunk.offsets) for chunk in entry.chunks), reverse=True)
        first_chunks = {offsets[:-1]: offsets for offsets in in_order}
        for at in sorted(first_chunks):
            place = self._stored.storage_data[MetadataIndex(key, torch.Size(first_chunks[at]))]
            where = place.relative_path, place.offset, 0
            first = [number * size for number, size in zip(at, sizes)]
            box = add_chunk(self, (name, (), ()), sizes, entry.properties.dtype, *where, full, first)
            self._flat[box] = FlatRange((key,), 0, entry.size[-1], at)

    def _add_buckets(self, record: Mapping[str, Any]) -> None:
        """Add the states that are in the buckets of dp_reshardable."""
        if record.get("use_tp_pp_dp_mapping"):
            raise CheckpointError(
                "its optimizer state is in buckets of ranks in another order (--use-tp-pp-dp-mapping), which is "
                "not known here"
            )
        buffers: dict[tuple[int, int, int], dict[str, dict[tuple[str, int], str]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for match in filter(None, map(_BUCKET.match, self._stored.state_dict_metadata)):
            chain, group, number, dtype, bucket, state = match.groups()
            buffers[int(chain or 0), int(group), int(number)][state][dtype, int(bucket)] = match[0]
        places = _BufferLayout(self._stored, record)
        for (chain, group, number), states in sorted(buffers.items()):
            entries = places.entries_in_buffer(chain, group, number)
            for state, buckets in states.items():
                if len({dtype for dtype, _ in buckets}) > 1:
                    raise CheckpointError(
                        "its optimizer state has buckets of several types for one model chunk, whose order is "
                        "not known here"
                    )
                keys = tuple(buckets[place] for place in sorted(buckets))
                self._add_buffer("fp32_param" if state == "param" else state, keys, entries)
        for key, _, _ in incomplete_tensors(self):
            if _STATE.match(key):
                raise CheckpointError(f"{key}: the buckets of its optimizer state do not cover the parameter once")
        self.common["optimizer"] = [
            self.read_object(key) for key in self._stored.state_dict_metadata if _SCALARS.match(key)
        ]

    def _add_buffer(self, state: str, keys: tuple[str, ...], entries: Sequence["BufferEntry"]) -> None:
        """Add one state of the parameters of a buffer; `keys` are its buckets, in order."""
        needed = max(entry.start + entry.numel for entry in entries)
        stored = sum(tensor_entry(self._stored, key).size[0] for key in keys)
        if needed != stored:
            raise CheckpointError(
                f"{keys[0]} and the buckets after it hold {stored} elements, and the parameters in the order of "
                f"the modules need {needed}"
            )
        bucket = tensor_entry(self._stored, keys[0])
        place = self._stored.storage_data[MetadataIndex(keys[0], bucket.chunks[0].offsets)]
        where = place.relative_path, place.offset, 0
        for entry in entries:
            start, tensor = entry.start, entry.tensor
            located = f"optimizer.state.{state}.{tensor.key}", tensor.at, tensor.full[: len(tensor.at)]
            for first, sizes in entry.parts:
                stop = start + math.prod(sizes)
                if entry.counts:
                    box = add_chunk(self, located, sizes, bucket.properties.dtype, *where, tensor.shape, first)
                    self._flat[box] = FlatRange(keys, start, stop)
                start = stop

    def _read(self, flat: FlatRange) -> Tensor:
        """Return the elements of a range.

        Raises:
            DamagedError: if some are not stored.
        """
        values_of_key = torch.empty(
            flat.stop - flat.start, dtype=tensor_entry(self._stored, flat.keys[0]).properties.dtype
        )
        filled = base = 0
        for key in flat.keys:
            entry = tensor_entry(self._stored, key)
            for chunk in entry.chunks:
                if tuple(chunk.offsets[:-1]) != flat.at:
                    continue
                first = base + chunk.offsets[-1]
                low, high = max(first, flat.start), min(first + chunk.sizes[-1], flat.stop)
                if low < high:
                    values = decode(self._folder, self._stored, key, chunk).view(-1)
                    values_of_key[low - flat.start : high - flat.start] = values[low - first : high - first]
                    filled += high - low
            base += entry.size[-1]
        if filled != values_of_key.numel():
            raise DamagedError(
                f"{self._folder}: only {filled} of {values_of_key.numel()} elements of {flat.keys[0]} are stored"
            )
        return values_of_key


def _is_grid(entries: Mapping[str, Any], key: str) -> bool:
    """Return whether a state has one axis more than its parameter, along which its shards are flat."""
    match = _STATE.match(_CHAIN.sub("", key))
    entry, weight = entries[key], entries.get(match[2]) if match else None
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(weight, TensorStorageMetadata)
        and len(entry.size) == len(weight.size) + 1
        and all(parts and whole % parts == 0 for whole, parts in zip(weight.size, entry.size))
        and math.prod(entry.size) == math.prod(weight.size)
    )


@dataclass(frozen=True)
class BufferEntry:
    """A parameter in a buffer.

    Attributes:
        parts: (offset, shape) of its parts, in memory order.
        counts: whether its state is read from this buffer.
    """

    tensor: LogicalTensor
    parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    start: int
    numel: int
    counts: bool


class _BufferLayout:
    """Which parameters are in the buffers of a layout, and where."""

    def __init__(self, index: Metadata, record: Mapping[str, Any]):
        self._record, self._sizes = record, rank_memory.LayoutSizes.from_record(record)
        scheme = self._scheme = KeyScheme.from_record(record)
        self._num_layers = scheme.num_layers
        model: Any = SimpleNamespace(num_layers=self._num_layers, num_mtp_depths=num_mtp_depths(record))
        flags = {name: record[name] for name in STAGES if record.get(name) is not None}
        if not isinstance(flags.get("pipeline_model_parallel_layout", ""), str):
            raise CheckpointError(
                "its optimizer state is in buckets of stages whose --pipeline-model-parallel-layout the "
                "checkpoint does not record as text"
            )
        self._chunks = chunk_layouts(model, ParallelArgs(pipeline_model_parallel_size=self._sizes.pp, **flags))
        self._tensors = {
            tensor.name: tensor
            for tensor in logical_tensors(index)
            if tensor.state is None
            and tensor.name.endswith(("weight", "bias", "softmax_offset"))
            and "expert_bias" not in tensor.name
        }

    def entries_in_buffer(self, chain: int, group: int, number: int) -> list[BufferEntry]:
        """Return the entries of a buffer: `chain` 1 for experts, model-parallel rank `group`, model chunk `number`."""
        sizes, expert = self._sizes, chain == 1
        if expert:
            tp, ep, pp = group % sizes.etp, group // sizes.etp % sizes.ep, group // (sizes.etp * sizes.ep)
        else:
            tp, ep, pp = group % sizes.tp, 0, group // sizes.tp
        # a chunk without parameters of this optimizer has no buffer
        chunk, layout = [
            (index, each) for index, each in enumerate(self._chunks[pp]) if any(self._held(each, expert, ep))
        ][number]
        first_layer = min(layout.layers, default=0)
        rows = []
        for name, tensor, counts in self._held(layout, expert, ep):
            written = rank_memory.to_spec_name(
                rank_memory.local_name(name, first_layer, ep * sizes.local_experts if expert else 0),
                self._record,
                entry_of(self._scheme.norms, self._scheme.layer_at(name)),
            )
            parts = _rank_chunks(tensor, tp, sizes.etp if rank_memory.EXPERT in name else sizes.tp)
            taken = counts and (tp == 0 or parts[0][1] != tensor.shape)
            rows.append((rank_memory.module_order_key(name, written), name, tensor, parts, taken))
        rows.sort(key=lambda each: each[0])
        numels = [(name, sum(math.prod(shape) for _, shape in parts)) for _, name, _, parts, _ in rows]
        where = {
            name: (first, numel)
            for name, first, numel in rank_memory.buffer_offsets(
                numels, *rank_memory.bucketing(self._record, sizes, pp, chunk, expert)
            )
        }
        return [BufferEntry(tensor, parts, *where[name], taken) for _, name, tensor, parts, taken in rows]

    def _held(self, layout: ChunkLayout, expert: bool, ep: int) -> Iterator[tuple[str, LogicalTensor, bool]]:
        """Yield (name, tensor, whether it counts here) of the parameters of a model chunk."""
        count, is_separate = self._sizes.local_experts, self._sizes.ep > 1
        local_experts = range(ep * count, (ep + 1) * count)
        for name, tensor in self._tensors.items():
            if is_separate and (rank_memory.EXPERT in name) is not expert:
                continue
            if expert and int(name.partition(rank_memory.EXPERT)[2].partition(".")[0]) not in local_experts:
                continue
            layer = rank_memory.layer_number(name)
            if layer is not None:
                is_held = layer in layout.layers
            elif name in _EMBEDDINGS:
                is_held = layout.has_word_embeddings
            elif name.startswith("mtp."):
                is_held = layout.mtp
            elif name.startswith("decoder."):
                is_held = layout.has_final_norm
            else:
                is_held = layout.has_loss
            if is_held:
                yield name, tensor, name not in _EMBEDDINGS or layout.has_embedding
        if not expert and layout.has_loss and not layout.has_word_embeddings and _HEAD not in self._tensors:
            yield _HEAD, self._tensors[_EMBEDDINGS[0]], False


def _rank_chunks(tensor: LogicalTensor, rank: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of the parts of a rank's shard of a tensor, from the chunks of the stored weight."""
    shape = tuple(tensor.chunks[0].sizes[len(tensor.at) :])
    dim = next((dim for dim, (part, whole) in enumerate(zip(shape, tensor.shape)) if part != whole), None)
    num_shards = 1 if dim is None else tensor.shape[dim] // shape[dim]
    if num_shards % count:
        return [((0,) * len(tensor.shape), tensor.shape)]
    parts = []
    for part in range(num_shards // count):
        first = [0] * len(shape)
        if dim is not None:
            first[dim] = (part * count + rank) * shape[dim]
        parts.append((tuple(first), shape))
    return parts
