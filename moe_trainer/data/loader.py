"""From samples to batches: which samples a data-parallel rank reads, in which order, and the tensors made of them.

Order is a pure function of (consumed samples, micro-batch size, data-parallel rank and size): a resumed run continues
with the very sample the interrupted one would have read, on any number of ranks.

Prefetching uses threads, not processes. Preparing a sample is copying some slices out of a memory map and numpy
releases the interpreter lock while it copies (and while the kernel reads the pages), so threads keep up; they need no
fork next to a process group, share the index maps, and raise the original exception in the main thread. Batches come
back in order whatever the number of workers; no randomness lives in a worker, so the number changes nothing but speed.

Suffixes: B samples of a microbatch, S sequence length.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_trainer.data.dataset import NO_PAD, SampleReader, TokenDataset
from moe_trainer.data.packing import Pack, PackingPlanner
from moe_trainer.errors import UserError
from moe_trainer.ops.packed_sequences import Packed, PackedSequences

_BATCHES_AHEAD_PER_WORKER = 2

SampleNumbers = Sequence[int] | Pack
"""Numbers of the samples of a batch."""


@dataclass(frozen=True)
class Batch:
    """One microbatch of one rank. There is no mask of [S, S]: attention needs none.

    Attributes:
        tokens_BS: int64, as labels_BS and position_ids_BS.
        loss_mask_BS: float32.
        document_ids_BS: int32, counts the documents of a sequence from 0; None unless attention stops at their borders.
        packed: lengths of packed sequences, of which B = 1 row consists; None for samples of equal length.
        lengths: tokens of every row that are no padding; None where there is none.
        sample_numbers: in the dataset, in order; empty unless something is given per sample.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    position_ids_BS: Tensor
    document_ids_BS: Tensor | None = None
    packed: Packed | None = None
    lengths: tuple[int, ...] | None = None
    sample_numbers: tuple[int, ...] = ()

    def to(self, device, non_blocking: bool = True, with_documents: bool = False) -> Batch:
        """Return the batch on another device.

        Document ids stay on the host, which needs the borders (Documents) and would have to wait for them, unless
        `with_documents`: a CUDA graph reads them on the device.
        """
        fields: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and (with_documents or name != "document_ids_BS")
        }
        return replace(self, **fields)

    def pin_memory(self) -> Batch:
        fields: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **fields)


@dataclass(frozen=True)
class BatchFormat:
    """How samples become a batch.

    Attributes:
        pad: loss is masked where the label is this id, and the id is replaced by 0 (NO_PAD: nothing is masked).
        vocab_size: ids from there on are an error (None: unchecked).
        separate_documents: positions restart and attention stops at every document of the file, not at eod.
        padded_length: samples have different lengths and are padded to this one.
    """

    eod: int | None
    pad: int = NO_PAD
    vocab_size: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    separate_documents: bool = False
    padded_length: int | None = None


def make_batch(dataset: SampleReader, indices: Sequence[int], fmt: BatchFormat) -> Batch:
    """Read samples and derive labels, masks and positions.

    Raises:
        UserError: naming file, document and id when a token lies outside the vocabulary.
    """
    ids = np.stack([dataset.tokens(index) for index in indices])
    _check_vocabulary(dataset, indices, ids, fmt.vocab_size)
    tokens, labels = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    loss_mask = np.ones(tokens.shape, dtype=np.float32)
    is_eod = tokens == fmt.eod if fmt.eod is not None else np.zeros(tokens.shape, dtype=bool)
    if fmt.eod_mask_loss:
        loss_mask[is_eod] = 0.0
    if fmt.pad != NO_PAD:
        loss_mask[labels == fmt.pad] = 0.0
        tokens[tokens == fmt.pad] = 0
        labels[labels == fmt.pad] = 0
    ends = _document_ends(dataset, indices, tokens.shape) if fmt.separate_documents else is_eod
    restart = fmt.reset_position_ids or fmt.separate_documents
    block = fmt.reset_attention_mask or fmt.separate_documents
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(loss_mask),
        torch.from_numpy(_positions(ends, restart)),
        torch.from_numpy(_document_ids(ends)) if block else None,
    )


def make_packed_batch(
    dataset: SampleReader, indices: Sequence[int], fmt: BatchFormat, pack: Callable[[list[int]], PackedSequences]
) -> Batch:
    """Read samples of different lengths and pack them.

    Padding has token, label and position 0, and no loss.

    Args:
        dataset: where samples are read.
        indices: of the samples.
        fmt: only its vocabulary counts.
        pack: pads the lengths of the samples.

    Raises:
        UserError: as make_batch.
    """
    samples = [dataset.sample(index) for index in indices]
    for index, (ids, _) in zip(indices, samples):
        _check_vocabulary(dataset, [index], ids[None], fmt.vocab_size)
    packed = pack([len(ids) - 1 for ids, _ in samples])
    tokens, labels, positions = (np.zeros(packed.num_tokens, dtype=np.int64) for _ in range(3))
    loss_mask = np.zeros(packed.num_tokens, dtype=np.float32)
    for start, (ids, mask) in zip(packed.cu_seqlens_padded, samples):
        own = slice(start, start + len(ids) - 1)
        tokens[own], labels[own], positions[own] = ids[:-1], ids[1:], np.arange(len(ids) - 1)
        loss_mask[own] = 1.0 if mask is None else mask[1:]
    tokens_BS, labels_BS, mask_BS, positions_BS = (
        torch.from_numpy(x[None]) for x in (tokens, labels, loss_mask, positions)
    )
    return Batch(tokens_BS, labels_BS, mask_BS, positions_BS, packed=packed)


def make_padded_batch(dataset: SampleReader, indices: Sequence[int], fmt: BatchFormat, length: int) -> Batch:
    """Read samples of different lengths, one per row, padded to `length` tokens (--varlen-sbhd-validation).

    Padding has token and label 0, and no loss; positions count up to the end of the row.

    Raises:
        UserError: as make_batch.
    """
    rows = [make_packed_batch(dataset, [index], fmt, partial(PackedSequences.of, multiple=length)) for index in indices]
    tokens, labels, loss_mask = (
        torch.cat([getattr(row, name) for row in rows]) for name in ("tokens_BS", "labels_BS", "loss_mask_BS")
    )
    lengths = tuple(row.packed.lengths[0] for row in rows if isinstance(row.packed, PackedSequences))
    return Batch(tokens, labels, loss_mask, torch.arange(length).expand(tokens.shape).contiguous(), lengths=lengths)


def _check_vocabulary(dataset, indices, ids, vocab_size) -> None:
    if vocab_size is None:
        return
    # NOTE: one comparison for both ends: a negative id is a huge unsigned one.
    outside = ids.view(np.uint64) >= vocab_size
    if outside.any():
        sample, position = np.argwhere(outside)[0].tolist()
        where = dataset.locate(indices[sample], position)
        raise UserError(
            f"token id {ids[sample, position]} in {where} lies outside the vocabulary of {vocab_size} ids; the "
            "data was made with another tokenizer, or --vocab-size / --tokenizer-model do not belong to it"
        )


def _positions(ends: np.ndarray, restart: bool) -> np.ndarray:
    """Position ids [B, S]; with `restart`, counting from 0 again after every True of `ends`."""
    positions = np.broadcast_to(np.arange(ends.shape[1], dtype=np.int64), ends.shape)
    if not restart:
        return positions.copy()
    begins = np.zeros(ends.shape, dtype=np.int64)
    begins[:, 1:] = np.where(ends[:, :-1], positions[:, 1:], 0)
    return positions - np.maximum.accumulate(begins, axis=1)


def _document_ids(ends: np.ndarray) -> np.ndarray:
    """Number of the document that every position belongs to [B, S]; an end belongs to the document that it ends."""
    document = np.zeros(ends.shape, dtype=np.int32)
    np.cumsum(ends[:, :-1], axis=1, out=document[:, 1:])
    return document


def _document_ends(dataset, indices, shape) -> np.ndarray:
    ends = np.zeros(shape, dtype=bool)
    for row, index in enumerate(indices):
        last = np.cumsum(dataset.part_lengths(index)) - 1
        ends[row, last[last < shape[1]]] = True
    return ends


def single_order(total: int, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[list[int]]:
    """Yield this rank's microbatches in order.

    Each chunk of micro_batch_size * dp_size samples is cut into dp_size pieces; an incomplete last chunk is dropped.
    """
    chunk = micro_batch_size * dp_size
    for start in range(consumed, total - chunk + 1, chunk):
        first = start + dp_rank * micro_batch_size
        yield list(range(first, first + micro_batch_size))


def cyclic_order(total: int, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[list[int]]:
    """Yield this rank's microbatches endlessly: of its contiguous part of the samples, in a new order in every epoch.

    The epoch's number is the seed.
    """
    chunk = micro_batch_size * dp_size
    per_epoch = total - total % chunk
    while True:
        epoch, inside = divmod(consumed, per_epoch)
        generator = torch.Generator().manual_seed(epoch)
        bucket = total // chunk * micro_batch_size
        order = torch.randperm(bucket, generator=generator)[inside // dp_size :] + dp_rank * bucket
        whole = (per_epoch - inside) // chunk
        for start in range(whole):
            yield order[start * micro_batch_size : (start + 1) * micro_batch_size].tolist()
        consumed = (epoch + 1) * per_epoch


class Cycle(NamedTuple):
    """What the order of --dataloader-type cyclic depends on: the run that began with it, on any ranks afterwards."""

    total: int
    micro_batch_size: int
    num_ranks: int

    @property
    def length(self) -> int:
        """Samples of an epoch."""
        return self.total - self.total % (self.micro_batch_size * self.num_ranks)

    def order(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> Iterator[list[int]]:
        """Yield a rank's microbatches endlessly, in the order of the global batches of that run."""
        micro, ranks = self.micro_batch_size, self.num_ranks
        of_rank = self.length // ranks

        shuffled, current = torch.empty(0), None

        def sample(position: int) -> int:
            nonlocal shuffled, current
            epoch, inside = divmod(position, self.length)
            if epoch != current:
                shuffled = torch.randperm(of_rank, generator=torch.Generator().manual_seed(epoch))
                current = epoch
            number, inside = divmod(inside, micro * ranks)
            rank, inside = divmod(inside, micro)
            return int(shuffled[number * micro + inside]) + rank * of_rank

        for first in itertools.count(consumed + dp_rank * micro_batch_size, micro_batch_size * dp_size):
            yield [sample(position) for position in range(first, first + micro_batch_size)]


@dataclass(frozen=True)
class Reading:
    """How a rank reads its batches, whatever is in them.

    Attributes:
        num_workers: threads that read ahead; 0 reads when a batch is asked for.
        read_ahead: batches before their turn at which reading a sample from object storage begins; 0 with its turn.
        pin_memory: whether batches are in pinned memory.
        numbered: set Batch.sample_numbers.
    """

    num_workers: int = 0
    read_ahead: int = 0
    pin_memory: bool = False
    numbered: bool = False


class BatchLoader:
    """Batches of one rank, from `consumed_samples` on.

    Args:
        make: makes the batch of some samples.
        order: returns an iterator over the sample numbers of every batch, which need not end.
        prefetch: starts to read a sample from object storage.
        reading: how.
    """

    def __init__(
        self,
        make: Callable[[Any], Batch],
        order: Callable[[], Iterator[SampleNumbers]],
        prefetch: Callable[[int], None],
        reading: Reading,
    ):
        self._make, self.indices, self._prefetch, self._reading = make, order, prefetch, reading

    def __iter__(self) -> Iterator[Batch]:
        order = self._read_ahead(self.indices()) if self._reading.read_ahead else self.indices()
        return self._prefetched(order) if self._reading.num_workers > 0 else map(self.read, order)

    def _read_ahead(self, order: Iterator[SampleNumbers]) -> Iterator[SampleNumbers]:
        waiting: deque[SampleNumbers] = deque()
        for indices in order:
            for index in indices:
                self._prefetch(index)
            waiting.append(indices)
            if len(waiting) > self._reading.read_ahead:
                yield waiting.popleft()
        yield from waiting

    def read(self, indices: SampleNumbers) -> Batch:
        """Return the batch of some samples."""
        batch = self._make(indices)
        if self._reading.numbered:
            batch = replace(batch, sample_numbers=tuple(indices))
        return batch.pin_memory() if self._reading.pin_memory else batch

    def _prefetched(self, order: Iterator[SampleNumbers]) -> Iterator[Batch]:
        ahead, num_workers = deque[Future[Batch]](), self._reading.num_workers
        executor = ThreadPoolExecutor(num_workers, thread_name_prefix="data")
        try:
            while True:
                for indices in islice(order, _BATCHES_AHEAD_PER_WORKER * num_workers - len(ahead)):
                    ahead.append(executor.submit(self.read, indices))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def build_loader(
    dataset: TokenDataset,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int = 0,
    dataloader_type: str = "single",
    *,
    fmt: BatchFormat,
    cycle: Cycle | None = None,
    reading: Reading = Reading(),  # noqa: B008
) -> BatchLoader:
    """Make the loader of one rank over one dataset.

    `consumed_samples` counts samples over all ranks; `fmt` is from `build.batch_format`; `cycle`: of the run that is
    continued.

    Raises:
        ValueError: if more samples are consumed than a single-order dataset holds, or it holds less than one
            microbatch a rank.
    """
    total, chunk = len(dataset), micro_batch_size * dp_size
    if total < chunk:
        raise ValueError(
            f"the dataset holds {total} samples, one step of {dp_size} data-parallel ranks with micro-batch size "
            f"{micro_batch_size} needs {chunk}"
        )
    place = total, consumed_samples, micro_batch_size, dp_rank, dp_size
    order: Callable[[], Iterator[Sequence[int]]]
    if dataloader_type in ("single", "external"):
        if consumed_samples > total:
            raise ValueError(
                f"{consumed_samples} samples are consumed already, the dataset holds {total}; raise --train-iters or "
                "--train-samples, or start the data afresh (--finetune)"
            )
        order = partial(single_order, *place)
    elif dataloader_type == "cyclic":
        own = Cycle(total, micro_batch_size, dp_size)
        cycle = cycle or own
        # other ranks may have stopped in the middle of a step of these
        is_own = cycle == own and consumed_samples % chunk == 0
        order = partial(cyclic_order, *place) if is_own else partial(cycle.order, *place[1:])
    else:
        raise ValueError(f"--dataloader-type {dataloader_type}: needed single, cyclic or external")
    make = partial(make_batch, dataset, fmt=fmt)
    if fmt.padded_length is not None:
        make = partial(make_padded_batch, dataset, fmt=fmt, length=fmt.padded_length)
    return BatchLoader(make, order, dataset.prefetch, reading)


def build_packed_loader(
    dataset: TokenDataset,
    planner: PackingPlanner,
    batch_size: Callable[[int], int],
    rank: int,
    consumed_samples: int = 0,
    *,
    fmt: BatchFormat,
    forget: Callable[[int], None] = lambda first: None,
    reading: Reading = Reading(),  # noqa: B008
) -> BatchLoader:
    """Make the loader of one rank over samples of different lengths; a batch is one pack.

    Args:
        dataset: where samples are read.
        planner: of this dataset.
        batch_size: global batch size after a number of consumed samples.
        rank: this rank, counted as in PackingPlan.
        consumed_samples: counted over all ranks.
        fmt: from `build.batch_format`.
        forget: called with the first sample of a global batch when all packs of those before it were read.
        reading: how.
    """

    def order() -> Iterator[Pack]:
        for first, packs in planner.batches(len(dataset), consumed_samples, batch_size, rank):
            forget(first)
            yield from packs

    def make(pack: Pack) -> Batch:
        return make_packed_batch(dataset, pack.samples, fmt, partial(planner.format.pack, cp_size=pack.cp_size))

    return BatchLoader(make, order, dataset.prefetch, reading)
