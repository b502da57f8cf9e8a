"""Foreign checkpoint formats presented as an index of ours; chunks are made on demand."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
"""Result of KeyScheme.locate: a tensor's key, its coordinates on the leading axes, and their sizes."""


class VirtualMetadata(Metadata, ABC):
    """An index whose chunks are made on demand. The recorded storage places only give the order of reading.

    Attributes:
        common: the non-tensor part of the checkpoint; empty if there is none.
        objects: non-tensor entries, by key.
        state_problem: why the optimizer state cannot be read, where the weights can.
    """

    def __init__(self) -> None:
        super().__init__({}, storage_data={})
        self.state_problem: str | None = None
        self.common: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}

    @abstractmethod
    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return the tensor of one chunk.

        Raises:
            CheckpointError: if it cannot be made.
        """

    def read_object(self, key: str) -> Any:
        """Return a non-tensor entry.

        Raises:
            CheckpointError: if there is none.
        """
        return self.objects[key]


class ForeignMetadata(VirtualMetadata):
    """The index of a folder in another format than the native one: what the reader of a format implements."""

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that hold the tensors."""

    @property
    def title(self) -> str | None:
        """What the folder is, if no training run has written it."""
        return None

    @property
    def remarks(self) -> list[str]:
        """What a user who lists the tensors should know about them."""
        return []

    def modified_files(self) -> list[str]:
        """Return problems of files that differ from the checksums of the format, if it has any. Reads everything."""
        return []

    def unlisted_files(self) -> list[Path]:
        """Return the files of the folder that belong to no entry, and to nothing else that the format knows."""
        return []


def tensor_entry(index: Metadata, key: str) -> TensorStorageMetadata:
    entry = index.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata), f"{key} is not a tensor"
    return entry


def incomplete_tensors(index: Metadata) -> Iterator[tuple[str, int, int]]:
    """Yield (key, stored elements, all elements) of every tensor whose chunks do not add up to it."""
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != math.prod(entry.size):
                yield key, stored, math.prod(entry.size)


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
    """Add a chunk of a tensor of one layer and expert, and the place where it is stored.

    `shape` is that of the chunk, without the leading axes. If it is not the full tensor, `full` is the shape of the
    tensor and `first` the offset of the chunk.

    Returns:
        The index of the chunk in the metadata.
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
    """Add a non-tensor entry."""
    index.state_dict_metadata[key] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(key)] = _StorageInfo(str(file), start, length)
