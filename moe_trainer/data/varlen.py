"""Samples of different lengths (--use-varlen-dataset, --sft): one sequence of the data is one sample.

A sample has at most sequence_length + 1 ids. With --use-varlen-dataset it ends with the end-of-document token, which is
appended, or replaces the last id of a sample that is cut; with --sft it ends as its prompt format does. It gives one
token less to the model: tokens are its ids without the last, labels those without the first. Samples come in the order
of the data, without shuffling, as often as needed.

Source: Megatron-LM, varlen_dataset.py and sft_dataset.py (dev branch, commit d48bd6be0a). There the data is text; here
a token file's sequences are samples too. There --sft joins the conversations of a row in one row of --seq-length, whose
padding belongs to the last one.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from arguments.mock_lengths import MockLengths
from arguments.regular_file import regular_file
from moe_trainer.data.dataset import DatasetConfig, Sample
from moe_trainer.data.indexed import IndexedDataset, open_token_file
from moe_trainer.errors import UserError

NUM_MOCK_SEQUENCES = 1_000_000


class Sequences(Protocol):
    """Sequences of token ids, whose lengths are known without reading them.

    `sequence_length` counts ids; those of mock data and token files with the end-of-document token that may be missing
    in the ids. `sample` may leave out ids that no sample holds. `ends_with_eod` tells whether a sample that is cut ends
    with that token.
    """

    name: str
    ends_with_eod: bool

    def __len__(self) -> int: ...
    def sequence_length(self, index: int) -> int: ...
    def sample(self, index: int) -> Sample: ...
    def prefetch(self, index: int, length: int) -> None: ...
    def locate(self, index: int) -> str: ...


class FileSequences:
    """Sequences of a token file.

    Args:
        source: of the ids.
        name: of the file.
        eod: the end-of-document token.
        max_length: ids that samples have at most. No more of a sequence is read, and nothing to find its length if it
            has as many.
    """

    ends_with_eod = True

    def __init__(self, source: IndexedDataset, name: str, eod: int, max_length: int):
        self._source, self.name, self._eod, self._max_length = source, name, eod, max_length

    def __len__(self) -> int:
        return len(self._source)

    def count_longer(self, length: int) -> int:
        """Return how many sequences of the file have more ids than `length`."""
        return int((self._source.sequence_lengths > length).sum())

    def sequence_length(self, index: int) -> int:
        """Return the number of ids; reads the last one of a sequence that is not cut.

        A token file's index does not say whether sequences end with the end-of-document token: it may hold documents
        of several sequences, of which only the last one does, and be made without --append-eod.
        """
        length = int(self._source.sequence_lengths[index])
        if length >= self._max_length:
            return length
        return length + (length == 0 or int(self._source.get(index, length - 1)[0]) != self._eod)

    def sample(self, index: int) -> Sample:
        """Return the ids that a sample may have; all are trained."""
        length = min(int(self._source.sequence_lengths[index]), self._max_length)
        return Sample(self._source.get(index, 0, length).astype(np.int64), None)

    def locate(self, index: int) -> str:
        return f"{self.name}.bin, sequence {index}"

    def prefetch(self, index: int, length: int) -> None:
        """Start reading up to `length` ids that are in object storage."""
        self._source.prefetch(index, 0, min(length, int(self._source.sequence_lengths[index])))


class MockSequences:
    """Sequences of given lengths (--varlen-mock-dataset-config-json); ids count up, or come from a token file.

    Source: MockSFTLowLevelDataset (sft_dataset.py); ids modulo the vocabulary size. Megatron-LM cuts them shorter than
    other samples, to `max_length` ids.
    """

    name = "mock data"
    ends_with_eod = True

    def __init__(self, lengths: MockLengths, vocab_size: int, max_length: int):
        self._vocab_size = vocab_size
        self._source = None if lengths.data_path is None else open_token_file(lengths.data_path, memory_map=True)
        if self._source is not None and not self._source.sequence_lengths.any():
            raise UserError(f"--varlen-mock-dataset-config-json: {lengths.data_path} holds no tokens")
        if lengths.path is not None:
            self.lengths = _cut(_read_lengths(lengths.path), max_length)
            return
        mu = np.log(lengths.mean_seq_len) - lengths.lognormal_sigma**2 / 2
        drawn = np.random.RandomState(0).lognormal(mu, lengths.lognormal_sigma, NUM_MOCK_SEQUENCES)
        self.lengths = _cut(np.clip(drawn, lengths.min_seq_len, lengths.max_seq_len).astype(int), max_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence_length(self, index: int) -> int:
        return int(self.lengths[index])

    def sample(self, index: int) -> Sample:
        """Return the ids without the end-of-document token; all are trained."""
        return Sample(self._ids(index), None)

    def _ids(self, index: int) -> np.ndarray:
        length = int(self.lengths[index]) - 1
        if self._source is None:
            return np.arange(1, length + 1, dtype=np.int64) % self._vocab_size
        parts: list[np.ndarray] = []
        missing, number = length, index
        while missing:
            parts.append(self._source.get(number % len(self._source)).astype(np.int64)[:missing])
            missing -= len(parts[-1])
            number += 1
        return np.concatenate(parts)

    def locate(self, index: int) -> str:
        return f"{self.name}, sequence {index}"

    def prefetch(self, index: int, length: int) -> None:
        """Do nothing: no sequence is in object storage."""


def _cut(lengths: np.ndarray, max_length: int) -> np.ndarray:
    return np.where(lengths > max_length + 1, max_length, lengths)


def _read_lengths(path: str) -> np.ndarray:
    """Read a CSV file of lengths; its first line is a title."""
    flag = f"--varlen-mock-dataset-config-json: {path}"
    try:
        lines = regular_file(path).read_text(encoding="utf-8").splitlines()[1:]
        lengths = np.array([int(word) for line in lines for word in line.split(",") if word.strip()])
    except OSError as error:
        raise UserError(f"{flag}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{flag}: lengths must be integers ({error})") from None
    if not len(lengths) or lengths.min() < 2:
        raise UserError(f"{flag}: needs lengths of at least 2 below the title: a sample has a token and a label")
    return lengths


class VarlenDataset:
    """Samples of one split of some sequences.

    Args:
        sequences: of all splits.
        path: of the data, None for mock data.
        begin: first sequence of the split.
        end: one past the last one.
        num_samples: None for one pass.

    Raises:
        ValueError: if samples are asked of a split without sequences.
    """

    def __init__(
        self,
        sequences: Sequences,
        path: str | None,
        begin: int,
        end: int,
        num_samples: int | None,
        split_name: str,
        config: DatasetConfig,
    ):
        if begin == end:
            raise ValueError(
                f"{sequences.name}: the {split_name} split (sequences {begin} to {end} of {len(sequences)}) is empty, "
                "and samples were asked of it; change --split, add data, or do not evaluate (--eval-iters 0)"
            )
        self._sequences, self._path, self._begin, self._end = sequences, path, begin, end
        self._num_samples, self._split_name, self._config = num_samples, split_name, config

    @property
    def name(self) -> str:
        return self._sequences.name

    def __len__(self) -> int:
        return self._end - self._begin if self._num_samples is None else self._num_samples

    @property
    def identifiers(self) -> dict[str, Any]:
        """Everything that the samples depend on."""
        config = self._config
        return {
            "class": "VarlenDataset",
            "dataset_path": self._path,
            "num_samples": self._num_samples,
            "index_split": self._split_name,
            "sequence_length": config.sequence_length,
            "split": config.split,
            "split_matrix": config.split_matrix,
            "tokenizer": config.tokenizer.unique_identifiers,
        }

    def write_cache(self) -> None:
        """Do nothing: there is no index."""

    def load(self) -> None:
        """Do nothing: there is no index."""

    def _sequence(self, index: int) -> int:
        return self._begin + index % (self._end - self._begin)

    def length(self, index: int) -> int:
        """Return the number of tokens of sample `index` that the model reads."""
        return max(1, min(self._sequences.sequence_length(self._sequence(index)), self._longest) - 1)

    @property
    def _longest(self) -> int:
        return self._config.sequence_length + 1

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of sample `index`, int64 [length + 1]."""
        return self.sample(index).ids

    def sample(self, index: int) -> Sample:
        """Return the ids of sample `index`, and which are trained as labels, each [length + 1].

        An end-of-document token in place of the id at which the sample is cut is trained if that id is.
        """
        ids, mask = self._sequences.sample(self._sequence(index))
        size, eod = self.length(index) + 1, self._config.tokenizer.eod or 0
        missing = max(0, size - len(ids))
        sample = np.pad(ids[:size], (0, missing), constant_values=eod)
        if self._sequences.ends_with_eod:
            sample[-1] = eod
        return Sample(sample, None if mask is None else np.pad(mask[:size], (0, missing), constant_values=True))

    def prefetch(self, index: int) -> None:
        """Start reading a sample that is in object storage."""
        self._sequences.prefetch(self._sequence(index), self._longest)

    def part_lengths(self, index: int) -> list[int]:
        """Return the number of ids: a sample is one document."""
        return [self.length(index) + 1]

    def locate(self, index: int, position: int) -> str:
        """Say where id `position` of sample `index` comes from."""
        return f"{self._sequences.locate(self._sequence(index))}, token {position}"
