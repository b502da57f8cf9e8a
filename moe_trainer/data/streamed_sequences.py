"""Documents of streamed text as samples of different lengths (--dataloader-type external with --use-varlen-dataset).

Only the tokens of a document tell its length, and a plan of packs needs the lengths of a whole global batch: every rank
reads and tokenizes all of its samples, in their order, and keeps them until its own packs of them are made. Where the
next global batch begins is therefore the same on all ranks, and does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from moe_trainer.data.dataset import Sample
from moe_trainer.data.stream import StreamBlend, StreamedDataset, StreamState


class _Kept(NamedTuple):
    ids: np.ndarray
    name: str


class StreamedSequences:
    """Samples of streamed documents, read in ascending order and kept until `forget`.

    Training and the thread that reads ahead ask for lengths at the same time.

    Args:
        source: of which a sample is a document.
    """

    def __init__(self, source: StreamedDataset | StreamBlend):
        self._source = source
        self._lock, self._kept, self._next = Lock(), dict[int, _Kept](), 0
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._source)

    def state(self) -> StreamState:
        """Return where the samples begin that were not read yet."""
        with self._lock:
            return self._source.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a state.

        Raises:
            UserError: if the sources are not those of the state.
        """
        with self._lock:
            self._source.load_state(state)
            self._kept.clear()
            self._error = None

    def forget(self, first: int) -> None:
        """Drop the samples before `first`."""
        with self._lock:
            for index in [index for index in self._kept if index < first]:
                del self._kept[index]

    def _read(self, index: int) -> _Kept:
        """Return a sample.

        Raises:
            UserError: if a document before it cannot be read, on every later call too: training may ask after the
                thread that reads ahead, whose error it has not seen.
        """
        with self._lock:
            if index not in self._kept and self._error is not None:
                raise self._error
            try:
                return self._read_up_to(index)
            except Exception as error:
                self._error = error
                raise

    def _read_up_to(self, index: int) -> _Kept:
        if index not in self._kept and (not self._kept or index < self._next):
            self._kept.clear()  # the first of a run; or one that was dropped, which the source reads again
            self._next = index
        while self._next <= index:
            ids = self._source.tokens(self._next)
            self._kept[self._next] = _Kept(ids, self._source.locate(self._next, 0))
            self._next += 1
        return self._kept[index]

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [length + 1]."""
        return self._read(index).ids

    def sample(self, index: int) -> Sample:
        """Return the ids of sample `index`, all of which are trained as labels."""
        return Sample(self.tokens(index), None)

    def length(self, index: int) -> int:
        """Return the number of tokens that the model reads of a sample."""
        return len(self.tokens(index)) - 1

    def part_lengths(self, index: int) -> list[int]:
        """Return the number of ids: a sample is one document."""
        return [len(self.tokens(index))]

    def locate(self, index: int, position: int) -> str:
        """Say where id `position` of sample `index` comes from."""
        return f"{self._read(index).name}, token {position}"

    def prefetch(self, index: int) -> None:
        """Do nothing: streams are read in order, and their source reads ahead by itself."""


Streamed = StreamedDataset | StreamBlend | StreamedSequences
"""What --dataloader-type external reads."""
