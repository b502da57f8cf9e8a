"""Folders of another kind seen as checkpoints of ours: an index that is made up, and boxes that are made when they are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

Located = tuple[str, tuple[int, ...], tuple[int, ...]]
"""As KeyScheme.locate gives it: a tensor's key, its coordinates on the leading axes, and how long these are."""


class VirtualMetadata(Metadata, ABC):
    """An index whose boxes are made when they are asked for. Where they are said to be stored gives the order of reading only.

    common: what the non-tensor part of such a checkpoint would be; empty where there is none. objects: the non-tensor entries, by key.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.storage_data = {}
        self.common: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}

    @abstractmethod
    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """The tensor of one box. Raises: CheckpointError."""

    def read_object(self, key: str) -> Any:
        """A non-tensor entry. Raises: CheckpointError."""
        return self.objects[key]


def tensor_entry(index: Metadata, key: str) -> TensorStorageMetadata:
    """Return the entry of a tensor."""
    entry = index.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), f"{key} is not a tensor"
    return entry


def empty_metadata() -> Metadata:
    """An index of nothing, to be filled and written."""
    index = Metadata({})
    index.storage_data = {}
    return index


def add_chunk(
    index: Metadata,
    located: Located,
    shape: Sequence[int],
    dtype: torch.dtype,
    file: str | Path,
    start: int,
    length: int,
    full: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
) -> MetadataIndex:
    """Enter a box of one layer's and expert's tensor, and where it is stored. shape: of the box, without the leading axes.

    full, first: shape of the whole tensor and the box's place in it, where the box is a piece. Returns: what names the box.
    """
    key, at, extents = located
    entry = index.state_dict_metadata.setdefault(
        key,
        TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size((*extents, *(shape if full is None else full))), []
        ),
    )
    assert isinstance(entry, TensorStorageMetadata), f"{key}: a tensor and an object have one name"
    offsets = torch.Size((*at, *((0 for _ in shape) if first is None else first)))
    entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size((*(1 for _ in at), *shape))))
    box = MetadataIndex(key, offsets)
    index.storage_data[box] = _StorageInfo(str(file), start, length)
    return box


def add_object(index: Metadata, key: str, file: str | Path, start: int, length: int) -> None:
    """Enter an entry that is no tensor."""
    index.state_dict_metadata[key] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(key)] = _StorageInfo(str(file), start, length)
