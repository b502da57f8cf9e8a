"""The logical tensors of a checkpoint: one per layer and expert, under Megatron-Core's parameter names.

The inverse of sharding.KeyScheme: a stored tensor with axes over layers and experts is presented as the tensors of one
layer and one expert, so that two checkpoints can be compared however their layers are stacked or their norms are named,
and missing tensors have names. Optimizer states keep their prefix ("optimizer.state.exp_avg.").
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from arguments.mechanisms.selections import SAVED_NAMES
from moe_trainer.checkpoint.layer_spec import FUSED
from moe_trainer.checkpoint.reading import decode, local_box, overlaps
from moe_trainer.checkpoint.sharding import TensorShard

BUFFERS = ("expert_bias", *SAVED_NAMES, "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
"""Ends of the names of saved tensors that are not parameters."""
_KEY = re.compile(r"^((?:chained_\d+\.)?optimizer\.state\.[^.]+\.)?(.+)$")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)")
_MTP = re.compile(r"^(mtp\.layers\.\d+\.)transformer_layer\.")
_EXPERTS = re.compile(r"\bexperts\.experts\.")


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model or of the optimizer.

    Attributes:
        state: None for weights, else the name of the optimizer state.
        at: coordinates on the leading axes of the stored `key`.
        chunks: the stored chunks that hold elements of it.
    """

    name: str
    state: str | None
    key: str
    at: tuple[int, ...]
    full: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[ChunkStorageMetadata] = field(compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.full[len(self.at) :]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def as_shard(self, data: Tensor) -> TensorShard:
        """Return the part of the stored tensor that is this one, in `data`."""
        box = (*(1 for _ in self.at), *self.shape)
        return TensorShard(self.key, self.full, (*self.at, *(0 for _ in self.shape)), box, data)

    @property
    def weight(self) -> str:
        """Name of the weight that an optimizer state belongs to; its own name for a weight."""
        return self.name if self.state is None else self.name.partition(f"optimizer.state.{self.state}.")[2]


def logical_tensors(index: Metadata) -> Iterator[LogicalTensor]:
    """Return all logical tensors, in the order of the index."""
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            yield from _slices(key, entry)


def _slices(key: str, entry: TensorStorageMetadata) -> Iterator[LogicalTensor]:
    ((prefix, rest),) = _KEY.findall(key)  # the pattern matches every text
    state = prefix.rstrip(".").rpartition(".")[2] or None
    stacked, experts = bool(_STACKED.match(rest)), bool(_EXPERTS.search(rest))
    full = tuple(entry.size)
    leading = min(stacked + experts, len(full))
    holders: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
    for chunk in entry.chunks:
        spans = (range(start, start + size) for start, size in zip(chunk.offsets[:leading], chunk.sizes[:leading]))
        for at in itertools.product(*spans):
            holders.setdefault(at, []).append(chunk)
    for at in itertools.product(*map(range, full[:leading])):
        name = prefix + _name(rest, at, stacked, experts)
        yield LogicalTensor(name, state, key, at, full, entry.properties.dtype, holders.get(at, []))


def _name(rest: str, at: tuple[int, ...], stacked: bool, experts: bool) -> str:
    if stacked and at:
        rest = rest.replace("layers.", f"layers.{at[0]}.", 1)
    if experts and len(at) > stacked:
        rest = _EXPERTS.sub(f"experts.local_experts.{at[-1]}.", rest)
    rest = _MTP.sub(r"\1mtp_model_layer.", rest)
    for alone, fused in FUSED:
        rest = rest.replace(fused, alone)
    return rest


def coverage(tensor: LogicalTensor) -> tuple[int, bool]:
    """Return (stored elements, whether some are stored twice) of a logical tensor, from its chunks alone."""
    local = tensor.as_shard(torch.empty(0))
    boxes = [(low, high) for _, _, low, high in overlaps(tensor.chunks, [local])] if tensor.chunks else []
    return sum(math.prod(stop - start for start, stop in zip(low, high)) for low, high in boxes), _any_overlap(boxes)


def _any_overlap(boxes: list) -> bool:
    """Return whether chunks overlap, by a sweep over the first dimension in which they differ."""
    if len(boxes) < 2:
        return False
    ndim = len(boxes[0][0])
    dim = next((d for d in range(ndim) if len({(low[d], high[d]) for low, high in boxes}) > 1), 0)
    open_boxes: list = []
    for low, high in sorted(boxes, key=lambda box: box[0][dim]):
        open_boxes = [box for box in open_boxes if box[1][dim] > low[dim]]
        if any(all(a < d and c < b for a, b, c, d in zip(low, high, *box)) for box in open_boxes):
            return True
        open_boxes.append((low, high))
    return False


def read_logical(folder: Path, index: Metadata, tensor: LogicalTensor) -> Tensor:
    """Return the values of a logical tensor in their stored dtype; elements that are not stored are zero.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    shard = tensor.as_shard(torch.empty(0))
    places = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    if places == [(shard.offsets, shard.sizes)]:  # as it is stored, without a second copy in memory
        return decode(folder, index, tensor.key, tensor.chunks[0]).view(tensor.shape)
    whole = torch.zeros(shard.sizes, dtype=tensor.dtype)
    for chunk, _, low, high in overlaps(tensor.chunks, [shard]) if tensor.chunks else ():
        saved = decode(folder, index, tensor.key, chunk)
        whole[local_box(low, high, shard.offsets)] = saved[local_box(low, high, chunk.offsets)]
    return whole.view(tensor.shape)
