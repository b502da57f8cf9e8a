"""Read boxes and objects out of the data files of a checkpoint.

torch.distributed.checkpoint finds which saved boxes overlap the local ones; the reading itself is done here, because
its reader decodes a saved box again for every local box, and because nothing in torch.load notices changed bytes: the
checksums that torch.save stores in every entry are compared before an entry is decoded.
"""

import io
import math
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_trainer.checkpoint.directory import advice
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.sharding import Piece
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, load_object


def read_object(folder: Path, index: Metadata, key: str) -> Any:
    """Decode a non-tensor entry.

    Raises: CheckpointError when its file is missing or damaged.
    """
    place = MetadataIndex(key)
    try:
        return load_object(_read_entry(folder, index, place))[0]
    except DECODE_ERRORS as error:
        raise _damaged(folder, index, place, error) from error


@torch.no_grad()
def fill(folder: Path, index: Metadata, wanted: dict[str, list[Piece]]) -> None:
    """Read into the storage of local pieces, by saved key.

    wanted: for each key of the checkpoint the local boxes to fill; values are converted to the local dtype.
    Raises: CheckpointError when the saved boxes do not cover a local one, or when a file is missing or damaged.
    """
    uses: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
    for key, local in wanted.items():
        chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in local]
        found = create_read_items_for_chunk_list(key, index.state_dict_metadata[key], chunks)
        volume = sum(math.prod(item.lengths) for item in found)
        needed = sum(math.prod(piece.sizes) for piece in local)
        if volume != needed:
            raise CheckpointError(f"{folder}: only {volume} of {needed} elements of {key} were saved")
        for item in found:
            uses[item.storage_index].append(item)
    # in file order: the files may lie on spinning or networked disks
    for place in sorted(uses, key=lambda at: (index.storage_data[at].relative_path, index.storage_data[at].offset)):
        try:
            saved = torch.load(io.BytesIO(_read_entry(folder, index, place)), map_location="cpu", weights_only=True)
            for item in uses[place]:
                target = wanted[item.dest_index.fqn][item.dest_index.index].data
                _box(target, item.dest_offsets, item.lengths).copy_(_box(saved, item.storage_offsets, item.lengths))
        except DECODE_ERRORS as error:
            raise _damaged(folder, index, place, error) from error


def read_tensor(folder: Path, index: Metadata, key: str) -> Tensor:
    """One whole global tensor in its stored type.

    Raises: CheckpointError when a file is missing or damaged.
    """
    entry = index.state_dict_metadata[key]
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    fill(folder, index, {key: [Piece(key, tuple(entry.size), (0,) * len(entry.size), tuple(entry.size), whole)]})
    return whole


def _box(tensor: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _read_entry(folder: Path, index: Metadata, place: MetadataIndex) -> bytes:
    """The bytes of one entry, checked."""
    info = index.storage_data[place]
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder}: {place.fqn} is stored with {info.transform_descriptors}, which is not supported")
    with open(folder / info.relative_path, "rb") as stream:
        stream.seek(info.offset)
        content = stream.read(info.length)
    if len(content) < info.length:
        raise EOFError(f"the file ends {info.length - len(content)} bytes early")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError("its checksum is wrong")
    return content


def _damaged(folder: Path, index: Metadata, place: MetadataIndex, error: BaseException) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return CheckpointError(f"{folder / index.storage_data[place].relative_path} is damaged: {place.fqn} cannot be read: "
                           f"{reason}\n{advice(folder)}")
