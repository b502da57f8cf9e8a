"""The save plan for torch.distributed.checkpoint: which rank writes which box.

torch's own planner starts from a state dict of DTensors or ShardedTensors. Ours starts from pieces (boxes of global
tensors with live storage) and from named byte strings, which is all that is needed and lets a flat optimizer range be
several boxes. The files are torch's: FileSystemWriter writes them.

Every rank plans everything it holds, and every rank sees all plans, so replicas need no bookkeeping: boxes that
several ranks hold go to the one with the least to write, and every tensor must be covered exactly once.
"""

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

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
