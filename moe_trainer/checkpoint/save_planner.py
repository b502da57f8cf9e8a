"""The save plan for torch.distributed.checkpoint: a rank's own chunks, and the description of all.

torch's own planner starts from a state dict of DTensors or ShardedTensors. Ours starts from shards (chunks of global
tensors with live storage) and from named byte strings, so that a flat optimizer range can be several chunks. The files
are torch's: FileSystemWriter writes them.

ownership.py has selected the writer among replicas, so every chunk comes from one rank; rank 0 gets names and places of
all chunks without content, and checks that each tensor is covered exactly once.
"""

import io
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.sharding import TensorShard
from moe_trainer.checkpoint.virtual_index import incomplete_tensors


class ShardSavePlanner(SavePlanner):
    """Writes shards and named byte strings."""

    def __init__(self, shards: Iterable[TensorShard], objects: dict[str, bytes]):
        self._data: dict[MetadataIndex, TensorShard | bytes] = {}
        for shard in shards:
            index = MetadataIndex(shard.key, shard.offsets)
            assert index not in self._data, f"{shard.key} {shard.offsets}: two local tensors for one place"
            self._data[index] = shard
        self._data.update({MetadataIndex(key): content for key, content in objects.items()})

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        """Do nothing: the constructor has received the content."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(index, value) for index, value in self._data.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, describe_plans(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def copy_to_host(self) -> None:
        """Replace live storage by copies, so that training can continue while they are written."""
        for index, value in self._data.items():
            if isinstance(value, TensorShard):
                self._data[index] = replace(value, data=value.values().to("cpu", copy=value.read is None), read=None)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        return io.BytesIO(value) if isinstance(value, bytes) else value.values()


def _write_item(index: MetadataIndex, value: TensorShard | bytes) -> WriteItem:
    if isinstance(value, bytes):
        return WriteItem(index, WriteItemType.BYTE_IO)
    tensor = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(value.offsets), torch.Size(value.sizes)),
        properties=TensorProperties(dtype=value.data.dtype),
        size=torch.Size(value.global_shape),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=tensor)


def describe_plans(plans: Sequence[SavePlan]) -> Metadata:
    """Return the index of what all ranks write, without the places in files.

    Raises:
        CheckpointError: if ranks disagree about a tensor, or an entry is not covered exactly once.
    """
    content: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    writer: dict[MetadataIndex, int] = {}
    first: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                content[name] = BytesStorageMetadata()
            else:
                entry = content.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
                assert isinstance(entry, TensorStorageMetadata), f"{name}: a tensor and an object have one name"
                other = first.setdefault(name, rank)
                if entry.size != data.size or entry.properties.dtype != data.properties.dtype:
                    raise CheckpointError(
                        f"ranks {other} and {rank} disagree about {name}: {tuple(entry.size)} "
                        f"{entry.properties.dtype}, {tuple(data.size)} {data.properties.dtype}"
                    )
                entry.chunks.append(data.chunk)
            other = writer.setdefault(item.index, rank)
            if other != rank:
                raise CheckpointError(
                    f"ranks {other} and {rank} would both write {name} at {tuple(item.index.offset or ())}"
                )
    index = Metadata(content)
    for key, held, full in incomplete_tensors(index):
        raise CheckpointError(f"{key}: the ranks together hold {held} of {full} elements")
    return index
