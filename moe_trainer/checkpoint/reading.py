"""Read chunks and objects from the data files of a checkpoint.

The format is torch.distributed.checkpoint's, the reader is not. Torch's planner compares every saved chunk with every
local one, which is too slow for 256 experts in 58 layers; its reader decodes a saved chunk again for every local chunk
that needs a part; and torch.load does not detect changed bytes. Here chunks are matched by their coordinates on the
leading axes (layer, expert), each saved chunk is decoded once, and the checksums that torch.save stores in every entry
are compared first.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from moe_trainer.checkpoint.archive import load_bytes, verify_checksums
from moe_trainer.checkpoint.directory import describe_alternatives
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.sharding import TensorShard
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS
from moe_trainer.checkpoint.virtual_index import VirtualMetadata, tensor_entry

Box = tuple[slice, ...]


def read_object(folder: Path, index: Metadata, key: str) -> Any:
    """Decode a non-tensor entry.

    Raises:
        DamagedError: if its file is missing or damaged.
    """
    if isinstance(index, VirtualMetadata):
        return index.read_object(key)
    place = MetadataIndex(key)
    try:
        return load_bytes(_read_entry(folder, index, place))[0]
    except DECODE_ERRORS as error:
        raise _damaged(folder, index, place, error) from error


@torch.no_grad()
def fill(folder: Path, index: Metadata, wanted: dict[str, list[TensorShard]]) -> None:
    """Read into the storage of local shards, by saved key, and convert to the local dtype.

    Raises:
        CheckpointError: if the saved chunks do not cover a local one.
        DamagedError: if a file is missing or damaged.
    """
    uses: dict[MetadataIndex, list[tuple[Tensor, Box, Box]]] = defaultdict(list)
    saved_chunks: dict[MetadataIndex, ChunkStorageMetadata] = {}
    for key, local in wanted.items():
        num_read = 0
        for chunk, shard, low, high in overlaps(tensor_entry(index, key).chunks, local):
            num_read += math.prod(stop - start for start, stop in zip(low, high))
            place = MetadataIndex(key, chunk.offsets)
            saved_chunks[place] = chunk
            uses[place].append((shard.data, local_box(low, high, shard.offsets), local_box(low, high, chunk.offsets)))
        needed = sum(math.prod(shard.sizes) for shard in local)
        if num_read != needed:
            raise CheckpointError(f"{folder}: only {num_read} of {needed} elements of {key} were saved")
    # in file order, for spinning and networked disks
    for place in sorted(uses, key=lambda at: (index.storage_data[at].relative_path, index.storage_data[at].offset)):
        saved = decode(folder, index, place.fqn, saved_chunks[place])
        for data, target, source in uses[place]:
            data[target].copy_(saved[source])


def decode(folder: Path, index: Metadata, key: str, chunk: ChunkStorageMetadata) -> Tensor:
    """Return one saved chunk, checked against its checksum, shape and dtype.

    Raises:
        DamagedError: if its file is missing or damaged.
    """
    if isinstance(index, VirtualMetadata):
        return index.read_chunk(key, chunk)
    place, dtype = MetadataIndex(key, chunk.offsets), tensor_entry(index, key).properties.dtype
    try:
        saved = load_bytes(_read_entry(folder, index, place))
        if not isinstance(saved, Tensor):
            raise ValueError("it holds no tensor")
        if saved.shape != chunk.sizes or saved.dtype != dtype:
            raise ValueError(
                f"it holds {tuple(saved.shape)} {saved.dtype}, and the index says {tuple(chunk.sizes)} {dtype}"
            )
    except DECODE_ERRORS as error:
        raise _damaged(folder, index, place, error) from error
    return saved


def overlaps(
    saved: Sequence[ChunkStorageMetadata], local: Sequence[TensorShard]
) -> Iterator[tuple[ChunkStorageMetadata, TensorShard, Sequence[int], Sequence[int]]]:
    """Pair saved and local chunks of one tensor that share elements.

    Chunks are sorted into bins by their coordinates on those leading axes where all of them have extent one.

    Yields:
        (saved chunk, local chunk, first, stop) with the common part in global coordinates.
    """
    boxes = [(chunk.offsets, chunk.sizes) for chunk in saved] + [(shard.offsets, shard.sizes) for shard in local]
    ndim = len(boxes[0][0])
    leading = next((dim for dim in range(ndim) if any(sizes[dim] != 1 for _, sizes in boxes)), ndim)
    bins: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
    for chunk in saved:
        bins[tuple(chunk.offsets[:leading])].append(chunk)
    for shard in local:
        for chunk in bins.get(tuple(shard.offsets[:leading]), ()):
            low = [max(pair) for pair in zip(chunk.offsets, shard.offsets)]
            high = [min(a + m, b + n) for a, m, b, n in zip(chunk.offsets, chunk.sizes, shard.offsets, shard.sizes)]
            if all(start < stop for start, stop in zip(low, high)):
                yield chunk, shard, low, high


def local_box(low: Sequence[int], high: Sequence[int], offsets: Sequence[int]) -> Box:
    """Return where a part in global coordinates is inside a chunk that begins at `offsets`."""
    return tuple(slice(start - base, stop - base) for start, stop, base in zip(low, high, offsets))


def _read_entry(folder: Path, index: Metadata, place: MetadataIndex) -> bytes:
    """Return the bytes of one entry, compared with their checksums."""
    info = index.storage_data[place]
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {place.fqn} is stored with {info.transform_descriptors}, which is not supported"
        )
    with open(folder / info.relative_path, "rb") as stream:
        stream.seek(info.offset)
        content = stream.read(info.length)
    if len(content) < info.length:
        raise EOFError(f"the file ends {info.length - len(content)} bytes early")
    verify_checksums(content)
    return content


def _damaged(folder: Path, index: Metadata, place: MetadataIndex, error: BaseException) -> DamagedError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DamagedError(
        f"{folder / index.storage_data[place].relative_path} is damaged: {place.fqn} cannot be read: "
        f"{reason}\n{describe_alternatives(folder)}"
    )
