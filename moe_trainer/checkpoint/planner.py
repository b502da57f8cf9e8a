"""Plans for torch.distributed.checkpoint: which rank writes which box, and which saved boxes fill which local ones.

torch's own planners start from a state dict of DTensors or ShardedTensors. Ours starts from pieces (boxes of global
tensors with live storage) and from named byte strings, which is all that is needed and lets a flat optimizer range be
several boxes. The files are torch's: FileSystemWriter and FileSystemReader do the input and output.

Saving: every rank plans everything it holds. The coordinator sees all plans, so replicas need no bookkeeping: boxes
that several ranks hold go to the one with the least to write, and it checks that every tensor is covered exactly once.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.sharding import Piece


class PieceSavePlanner(SavePlanner):
    """Writes pieces and named byte strings."""

    def __init__(self, pieces: Iterable[Piece], objects: dict[str, bytes]):
        self._data: dict[MetadataIndex, Piece | bytes] = {}
        for piece in pieces:
            index = MetadataIndex(piece.key, piece.offsets)
            assert index not in self._data, f"{piece.key} {piece.offsets}: two local tensors for one place"
            self._data[index] = piece
        self._data.update({MetadataIndex(key): content for key, content in objects.items()})

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        """Nothing to do: the content came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, value) for index, value in self._data.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return global_plan(all_plans, fully_parallel=True)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Forget what other ranks write."""
        kept = {item.index for item in new_plan.items}
        self._data = {index: value for index, value in self._data.items() if index in kept}
        return new_plan

    def copy_to_host(self) -> None:
        """Replace live storage by copies, so that training may go on while they are written."""
        for index, value in self._data.items():
            if isinstance(value, Piece):
                self._data[index] = replace(value, data=value.data.to("cpu", copy=True))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value.data


def _write_item(index: MetadataIndex, value: Piece | bytes) -> WriteItem:
    if isinstance(value, bytes):
        return WriteItem(index, WriteItemType.BYTE_IO)
    tensor = TensorWriteData(chunk=ChunkStorageMetadata(torch.Size(value.offsets), torch.Size(value.sizes)),
                             properties=TensorProperties(dtype=value.data.dtype), size=torch.Size(value.global_shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=tensor)


def _num_bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 1024
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def global_plan(all_plans: Sequence[SavePlan], fully_parallel: bool) -> tuple[list[SavePlan], Metadata]:
    """Give every box to one rank, and describe the whole.

    fully_parallel: replicas are shared out by size; otherwise the lowest rank that holds a box writes it.
    Raises: CheckpointError when ranks disagree about a tensor, or when a tensor is not covered exactly once.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            first = items.setdefault(item.index, item)
            if item.tensor_data != first.tensor_data:
                raise CheckpointError(f"ranks {holders[item.index][0]} and {rank} disagree about {item.index.fqn}: "
                                      f"{first.tensor_data} and {item.tensor_data}")
            holders.setdefault(item.index, []).append(rank)
    writer = _assign(items, holders, len(all_plans), fully_parallel)
    plans = [replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
             for rank, plan in enumerate(all_plans)]
    return plans, _describe(items)


def _assign(items: dict[MetadataIndex, WriteItem], holders: dict[MetadataIndex, list[int]], num_ranks: int,
            fully_parallel: bool) -> dict[MetadataIndex, int]:
    writer = {index: ranks[0] for index, ranks in holders.items()}
    if fully_parallel:
        load = [0] * num_ranks
        shared = []
        for index, ranks in holders.items():
            if len(ranks) == 1:
                load[ranks[0]] += _num_bytes(items[index])
            else:
                shared.append((-_num_bytes(items[index]), len(shared), index))
        for size, _, index in sorted(shared, key=lambda entry: entry[:2]):
            rank = min(holders[index], key=lambda candidate: load[candidate])
            writer[index] = rank
            load[rank] -= size
    return writer


def _describe(items: dict[MetadataIndex, WriteItem]) -> Metadata:
    content: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for index, item in items.items():
        data = item.tensor_data
        if data is None:
            content[index.fqn] = BytesStorageMetadata()
            continue
        entry = content.setdefault(index.fqn, TensorStorageMetadata(data.properties, data.size, []))
        if entry.size != data.size or entry.properties.dtype != data.properties.dtype:
            raise CheckpointError(f"{index.fqn} would have two shapes or types: {tuple(entry.size)} "
                                  f"{entry.properties.dtype}, {tuple(data.size)} {data.properties.dtype}")
        entry.chunks.append(data.chunk)
    for key, entry in content.items():
        if isinstance(entry, TensorStorageMetadata):
            volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if volume != math.prod(entry.size):
                raise CheckpointError(f"{key}: the ranks together hold {volume} of {math.prod(entry.size)} elements")
    return Metadata(content)


class _FillPlanner(LoadPlanner):
    """Copies saved boxes into local ones."""

    def __init__(self, wanted: dict[str, list[Piece]]):
        self._wanted = wanted

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        """Nothing to do: the content came with the constructor."""

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("the plan is made by fill()")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("fill() reads tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._wanted[read_item.dest_index.fqn][read_item.dest_index.index].data
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: resolve_tensor returned live storage."""


def fill(reader: FileSystemReader, metadata: Metadata, wanted: dict[str, list[Piece]]) -> None:
    """Read into the storage of local pieces, by saved key.

    wanted: for each key of the checkpoint the local boxes to fill; values are converted to the local dtype.
    Raises: CheckpointError when the saved boxes do not cover a local one; OSError or RuntimeError on damaged files.
    """
    items: list[ReadItem] = []
    for key, local in wanted.items():
        entry = metadata.state_dict_metadata[key]
        chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in local]
        found = create_read_items_for_chunk_list(key, entry, chunks)
        volume = sum(math.prod(item.lengths) for item in found)
        needed = sum(math.prod(piece.sizes) for piece in local)
        if volume != needed:
            raise CheckpointError(f"{reader.path}: only {volume} of {needed} elements of {key} were saved")
        items += found
    # in file order: the files may lie on spinning or networked disks
    items.sort(key=lambda item: (metadata.storage_data[item.storage_index].relative_path,
                                 metadata.storage_data[item.storage_index].offset))
    reader.read_data(LoadPlan(items), _FillPlanner(wanted))


def read_objects(reader: FileSystemReader, keys: Iterable[str]) -> dict[str, bytes]:
    """The stored bytes of non-tensor entries, by key."""
    found: dict[str, bytes] = {}

    class Collector(_FillPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            found[read_item.storage_index.fqn] = value.getvalue()

    none = torch.Size((0,))
    items = [ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), none, MetadataIndex(key), none, none) for key in keys]
    reader.read_data(LoadPlan(items), Collector({}))
    return found
