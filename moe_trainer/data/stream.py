"""Samples of text that is tokenized while it is read (--dataloader-type external): no token files, no index.

A `DocumentSource` consists of parts that can be read independently: byte ranges of a JSONL file, row groups of a
Parquet file, or whatever a user's own source has. Parts are shuffled in every epoch and divided among a fixed number of
streams (--document-streams). A stream is the endless row of the tokens of its documents, each ended by the
end-of-document token; sample n of a stream is the L+1 tokens from n * L on, as in a token file.

With --use-varlen-dataset sample n of a stream is its document n, cut to L+1 tokens (streamed_sequences.py).

Sample k of the dataset is sample k // streams of stream k % streams. So what is read in which order depends on the
flags and not on the layout, and a rank reads only the streams of its samples. Ranks whose samples share a stream read
it each: the number of streams is best a multiple of micro-batch size times data-parallel size.

A cursor says where the next sample of a stream begins. The cursors of all streams are the whole state of a dataset;
from them, a resumed run continues with the next token, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_trainer.data.blend import BlendOrder
from moe_trainer.data.combined import CombinedDataset
from moe_trainer.data.dataset import DatasetConfig, Sample
from moe_trainer.data.document_sources import DocumentSource
from moe_trainer.data.loader import Batch, BatchLoader, SampleNumbers
from moe_trainer.errors import UserError

logger = logging.getLogger(__name__)


class Cursor(NamedTuple):
    """Where sample `sample` of a stream begins: a token of a document of a part in an epoch.

    Attributes:
        turn: number of the part among those of the stream in this epoch.
    """

    sample: int = 0
    epoch: int = 0
    turn: int = 0
    document: int = 0
    token: int = 0


class _Document(NamedTuple):
    """Token ids, and the cursor of the first one (whose `sample` means nothing)."""

    ids: np.ndarray
    cursor: Cursor
    name: str


_Parts = list[tuple[int, str]]
"""(tokens, name) of the documents of a sample."""
_NUM_RECENT = 1024
_DOCUMENTS_AHEAD = 4
"""Documents of a stream that a thread has in hand or waiting, so that a long one does not stop the others."""
StreamState = dict[str, Any]
"""{"parts": digest of the parts, "cursors": the cursor of every stream, as a list, "by_document": whether samples are
documents (absent: no)}; {"blend": the states of several datasets, "order": the state of their order (BlendOrder)}."""


class StreamedDataset:
    """Samples of a document source, read in ascending order within a stream.

    Args:
        source: the documents.
        name: of the source in messages.
        size: number of samples that the run reads.
        config: its length, seed, tokenizer and rearrangement count.
        num_streams: see the head of this file; no more than there are parts.
        by_document: a sample is a document of at most L+1 tokens, instead of L+1 tokens of the stream.
        num_threads: that tokenize documents before their turn; 0 tokenizes a document when it is asked for.

    Raises:
        ValueError: if the source has no parts, or the tokenizer no end-of-document token.
    """

    def __init__(
        self,
        source: DocumentSource,
        name: str,
        size: int,
        config: DatasetConfig,
        *,
        num_streams: int,
        by_document: bool = False,
        num_threads: int = 0,
    ):
        self._source, self._parts, self.name = source, source.parts(), name
        names = (os.path.basename(str(part)) for part in self._parts)  # a corpus may move to another folder
        self._digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
        self._size, self._length, self._seed, self._fim = size, config.sequence_length, config.seed, config.fim
        self._by_document, self._num_threads = by_document, num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize") if num_threads else None
        if not len(self._parts):
            raise UserError(f"{name}: there is nothing to read")
        if config.tokenizer.eod is None:
            raise UserError(f"{name}: streamed text needs a tokenizer with an end-of-document token")
        self._tokenizer = config.tokenizer
        self._streams = [
            _Stream(self, number, Cursor()) for number in range(max(min(num_streams, len(self._parts)), 1))
        ]
        self._recent: dict[int, _Parts] = {}

    def __len__(self) -> int:
        return self._size

    def state(self) -> StreamState:
        """Return where this rank's next samples begin."""
        state: StreamState = {"parts": self._digest, "cursors": [list(stream.cursor) for stream in self._streams]}
        return state | ({"by_document": True} if self._by_document else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a state.

        Raises:
            UserError: if the source, the number of streams or the kind of samples is not that of the state.
        """
        if (was := state.get("by_document", False)) != self._by_document:
            raise UserError(
                f"{self.name}: the checkpoint was saved {'with' if was else 'without'} --use-varlen-dataset, whose "
                "samples are others; run as then, or start the data afresh (--finetune)"
            )
        if len(state["cursors"]) != len(self._streams):
            raise UserError(
                f"{self.name}: the checkpoint was saved with {len(state['cursors'])} streams, now there are "
                f"{len(self._streams)}; --document-streams and the files must be those of the checkpoint"
            )
        if state["parts"] != self._digest:
            raise UserError(
                f"{self.name}: files were added, removed or changed in size since the checkpoint was saved; restore "
                "them, or start the data afresh (--finetune)"
            )
        for number, cursor in enumerate(state["cursors"]):
            self._streams[number] = _Stream(self, number, Cursor(*cursor))

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [L+1]."""
        ids, self._recent[index] = self._sample(index)
        if len(self._recent) > _NUM_RECENT:
            del self._recent[next(iter(self._recent))]
        if self._fim is None:
            return ids
        return self._fim.rearrange(ids, np.random.RandomState([self._seed, index]))

    def sample(self, index: int) -> Sample:
        """Return the ids of sample `index`, all of which are trained as labels."""
        return Sample(self.tokens(index), None)

    def part_lengths(self, index: int) -> list[int]:
        """Return how many tokens of a sample that was read lately come from each of its documents."""
        return [self._length + 1] if self._fim is not None else [length for length, _ in self._recent[index]]

    def length(self, index: int) -> int:
        """Return the number of tokens that the model reads of a sample."""
        return self._length

    def locate(self, index: int, position: int) -> str:
        """Say where a token of a sample that was read lately comes from."""
        for length, name in self._recent[index] if self._fim is None else ():
            if position < length:
                return name
            position -= length
        return f"{self.name}, sample {index}"

    def prefetch(self, index: int) -> None:
        """Streams are read in order; their source reads ahead by itself."""

    def _sample(self, index: int) -> tuple[np.ndarray, _Parts]:
        number, sample = index % len(self._streams), index // len(self._streams)
        stream = self._streams[number]
        if sample < stream.cursor.sample:  # as after --override-ckpt-iteration
            logger.info("%s: stream %d is read again from its beginning to sample %d", self.name, number, sample)
            stream = self._streams[number] = _Stream(self, number, Cursor())
        read = stream.next_document if self._by_document else stream.next_sample
        while stream.cursor.sample < sample:
            read(self._length)
        return read(self._length)

    def documents(self, stream: int, cursor: Cursor) -> Iterator[_Document]:
        """Yield the documents of a stream from that of a cursor on, without end.

        A part may be empty, as a byte range in which no line begins, and may be all that a stream has in an epoch.

        Raises:
            UserError: if all parts are empty.
        """
        epoch, begin, first = cursor.epoch, cursor.turn, cursor.document
        empty: set[int] = set()
        while len(empty) < len(self._parts):
            order = np.random.RandomState([self._seed, epoch]).permutation(len(self._parts))
            own = order[stream :: len(self._streams)].tolist()
            for turn in range(begin, len(own)):
                part, num_tokens = self._parts[own[turn]], 0
                for number, (ids, name) in enumerate(self._encode_ahead(part, first), first):
                    num_tokens += len(ids)
                    yield _Document(ids, Cursor(0, epoch, turn, number, 0), name)
                if not first and not num_tokens:
                    empty.add(own[turn])
                first = 0
            epoch, begin = epoch + 1, 0
        raise UserError(f"{self.name}: no part holds text")

    def _encode_ahead(self, part: Any, first: int) -> Iterator[tuple[np.ndarray, str]]:
        """Yield ids and name of the documents of a part from number `first` on; threads tokenize the next ones."""
        waiting: deque[tuple[Future[np.ndarray], str]] = deque()
        for number, document in enumerate(self._source.read(part, first), first):
            name = f"{self.name}, part {part}, document {number}"
            if self._executor is None:
                yield self._encode(document, name), name
                continue
            waiting.append((self._executor.submit(self._encode, document, name), name))
            if len(waiting) > _DOCUMENTS_AHEAD * self._num_threads:
                future, name = waiting.popleft()
                yield future.result(), name
        for future, name in waiting:
            yield future.result(), name

    def _encode(self, document: str | Sequence[int], name: str) -> np.ndarray:
        """Return the ids of a document and the token that ends it; none of an empty one.

        As a sample by itself it needs no second one, unless it has no other id: a sample has a token and a label.
        """
        try:
            ids = self._tokenizer.tokenize(document) if isinstance(document, str) else list(document)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
        has_end = self._by_document and len(ids) > 1 and ids[-1] == self._tokenizer.eod
        return np.array([*ids, self._tokenizer.eod] if ids and not has_end else ids, dtype=np.int64)


class _Stream:
    """The documents of one stream that are partly read, from the cursor on."""

    def __init__(self, dataset: StreamedDataset, number: int, cursor: Cursor):
        self.cursor = cursor
        self._documents = dataset.documents(number, cursor)
        self._waiting: deque[_Document] = deque()

    def next_sample(self, length: int) -> tuple[np.ndarray, _Parts]:
        """Return the next `length` + 1 tokens with the parts they come from, and move on by `length`."""
        out, filled, offset = np.empty(length + 1, dtype=np.int64), 0, self.cursor.token
        parts: _Parts = []
        number = 0
        while filled <= length:
            if number == len(self._waiting):
                self._waiting.append(next(self._documents))
            document = self._waiting[number]
            ids = document.ids[offset : offset + length + 1 - filled]
            out[filled : filled + len(ids)] = ids
            if len(ids):
                parts.append((len(ids), document.name))
            filled, number = filled + len(ids), number + 1
            end, offset = offset + len(ids), 0
        # the last token of this sample is the first of the next one
        self.cursor = self._waiting[number - 1].cursor._replace(sample=self.cursor.sample + 1, token=end - 1)
        for _ in range(number - 1):
            self._waiting.popleft()
        return out, parts

    def next_document(self, length: int) -> tuple[np.ndarray, _Parts]:
        """Return the ids of the next document, the last of at most `length` + 1 the one that ends it, and its name."""
        document = next(each for each in self._documents if len(each.ids))
        self.cursor = document.cursor._replace(sample=self.cursor.sample + 1, document=document.cursor.document + 1)
        ids = document.ids[: length + 1].copy()  # the rest of a long document is not kept
        ids[-1] = document.ids[-1]
        return ids, [(len(ids), document.name)]


class StreamBlend(CombinedDataset[StreamedDataset]):
    """Several streamed datasets in the order of a weighted blend (blend.py)."""

    def __init__(self, datasets: Sequence[StreamedDataset], weights: Sequence[float], size: int):
        self.datasets = tuple(datasets)
        self._order, self._size = BlendOrder(weights), size

    def __len__(self) -> int:
        return self._size

    def _find(self, index: int) -> tuple[StreamedDataset, int]:
        number, inside = self._order.find(index)
        return self.datasets[number], inside

    def state(self) -> StreamState:
        """Return where this rank's next samples begin."""
        return {"blend": [dataset.state() for dataset in self.datasets], "order": self._order.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a state.

        Raises:
            UserError: if the sources are not those of the state.
        """
        if len(state.get("blend", ())) != len(self.datasets):
            raise UserError("the checkpoint was saved with another number of streamed datasets")
        for dataset, saved in zip(self.datasets, state["blend"]):
            dataset.load_state(saved)
        if "order" in state:  # else it is computed from the first sample on
            self._order.load_state(state["order"])


class ResumableDataset(Protocol):
    """What a StreamLoader needs of a dataset."""

    def state(self) -> StreamState: ...
    def load_state(self, state: Mapping[str, Any]) -> None: ...


class StreamLoader:
    """Batches of streamed samples, and the state of the dataset after the last one that was handed out.

    One thread reads ahead, since the documents of a stream are read in order.

    Args:
        loader: says which samples this rank reads.
        read_ahead: number of batches; 0 reads when a batch is asked for.
    """

    def __init__(self, dataset: ResumableDataset, loader: BatchLoader, read_ahead: int):
        self._dataset, self._loader, self._read_ahead = dataset, loader, read_ahead
        self.state = dataset.state()

    def __iter__(self) -> Iterator[Batch]:
        order = self._loader.indices()
        if not self._read_ahead:
            while (read := self._read_next(order)) is not None:
                batch, self.state = read
                yield batch
            return
        executor = ThreadPoolExecutor(1, thread_name_prefix="data")
        ahead: deque[Future] = deque()
        try:
            while True:
                while len(ahead) < self._read_ahead:
                    ahead.append(executor.submit(self._read_next, order))
                if (read := ahead.popleft().result()) is None:
                    return
                batch, self.state = read
                yield batch
        finally:
            executor.shutdown(cancel_futures=True)
            self._dataset.load_state(self.state)  # what was read ahead is read again

    def _read_next(self, order: Iterator[SampleNumbers]) -> tuple[Batch, StreamState] | None:
        """Return the next batch and the state after it, None at the end; the order of packs depends on what is read."""
        indices = next(order, None)
        if indices is None:
            return None
        batch = self._loader.read(indices)
        return batch, self._dataset.state()


def merge_states(states: Sequence[StreamState]) -> StreamState:
    """Return the state of all ranks: of every stream the cursor of the rank that has read most of it.

    Raises:
        ValueError: if the ranks read different sources.
    """
    if "blend" in states[0]:
        return {
            "blend": [merge_states(each) for each in zip(*(state["blend"] for state in states), strict=True)],
            "order": max(state["order"] for state in states),
        }
    if len({(state["parts"], len(state["cursors"])) for state in states}) > 1:
        raise UserError("the ranks see different files of the streamed data")
    return states[0] | {
        "cursors": [max(cursors) for cursors in zip(*(state["cursors"] for state in states))],
    }
