"""Samples of different lengths from text: rows of JSONL, Parquet and Arrow files (--use-varlen-dataset, --sft).

An index tells where every sample is and how many tokens it has. One rank builds it by tokenizing the file once, so that
packing is planned without text, and a row that cannot be used ends the run before it begins. Ids are not kept: a rank
tokenizes again what it reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import numpy as np

from moe_trainer.data.conversations import read_conversations, read_row, tokenize_conversation
from moe_trainer.data.dataset import Sample
from moe_trainer.data.document_sources import COMPRESSED, TableRows, parse_json_object
from moe_trainer.data.index_cache import CachedIndex
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.data.tokenizer_libraries import SFTTokenizer
from moe_trainer.errors import UserError

logger = logging.getLogger(__name__)

_JSON = (".jsonl", ".json", ".ndjson")
_TABLES = (".parquet", ".arrow")


def is_text_file(path: str) -> bool:
    """Return whether a name is of a file of rows, and not the prefix of a token file."""
    return path.endswith((*_JSON, *_TABLES, *COMPRESSED))


class _Rows(Protocol):
    """Rows of a file. A place is (first byte or row, number of bytes); a number is that of a line or row, from 1."""

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield the place and the number of every row."""
        ...

    def read(self, place: int, size: int, where: str) -> dict[str, Any]:
        """Return a row."""
        ...


class _JsonRows:
    def __init__(self, path: str):
        self._path = path
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (as long as the rows)

    def places(self) -> Iterator[tuple[int, int, int]]:
        at = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield at, len(line), number
                at += len(line)

    def read(self, place: int, size: int, where: str) -> dict[str, Any]:
        return parse_json_object(os.pread(self._file.fileno(), size, place), where)


class _TableRows:
    def __init__(self, path: str):
        self._table = TableRows(path)

    def places(self) -> Iterator[tuple[int, int, int]]:
        for number in range(len(self._table)):
            yield number, 0, number + 1

    def read(self, place: int, size: int, where: str) -> dict[str, Any]:
        try:
            return self._table.row(place)
        except (OSError, ValueError) as error:  # a damaged page, text that is not UTF-8
            raise UserError(f"{where}: cannot be read ({error})") from None


def _open_rows(path: str) -> _Rows:
    """Open a file.

    Raises:
        UserError: if it cannot be read by the row.
    """
    if path.endswith(COMPRESSED):
        raise UserError(f"{path}: a compressed file cannot be read from the middle; decompress it")
    if not path.endswith((*_JSON, *_TABLES)):
        raise UserError(f"{path}: needed a file {', '.join((*_JSON, *_TABLES))}")
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file")
    try:
        return _JsonRows(path) if path.endswith(_JSON) else _TableRows(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _get_eod(tokenizer: Tokenizer, path: str) -> int:
    if tokenizer.eod is None:
        raise UserError(f"{path}: samples end with the end-of-document token, and the tokenizer has none")
    return tokenizer.eod


def _end(row: Sample, eod: int) -> Sample:
    """Append the end-of-document token, which is trained, where it is missing."""
    ids, mask = row
    if len(ids) and int(ids[-1]) == eod:
        return row
    return Sample(np.append(ids, eod), None if mask is None else np.append(mask, True))


class TextSequences(CachedIndex):
    """Samples of a file: conversations, or with `only_conversations` False also texts.

    Its index holds, for every sample, its place: (first byte or row, number of bytes, number of the line or row,
    number of the conversation within it), its number of ids, and the first of them that is trained as a label.

    Args:
        path: of the file.
        tokenizer: of the run; conversations need a SFTTokenizer.
        only_conversations: --sft: rows have messages, and several conversations may be in one. Otherwise a row is a
            sample, which ends with the end-of-document token.
        cache_path: folder of the index; None for FILE.cache next to the file.

    Raises:
        UserError: if the file cannot be read, or its samples end with a token that the tokenizer does not have.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, only_conversations: bool, cache_path: str | None = None):
        self.name, self._tokenizer, self._only_conversations = path, tokenizer, only_conversations
        self.ends_with_eod = not only_conversations
        self._eod = None if only_conversations else _get_eod(tokenizer, path)
        self._rows = _open_rows(path)
        folder = cache_path or f"{path}.cache"
        super().__init__("TextSequences", "all", {"place": None, "length": None, "label": None}, folder, path)

    @property
    def identifiers(self) -> dict[str, Any]:
        status = os.stat(self.name)  # a file may be replaced by an older one
        return {
            "class": self.class_name,
            "dataset_path": self.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "only_conversations": self._only_conversations,
            "tokenizer": self._tokenizer.unique_identifiers,
        }

    def load(self) -> None:
        """Map the cached index, or build it.

        Raises:
            UserError: if its files do not belong together.
        """
        super().load()
        places, lengths, labels = self.index
        if not (places.shape == (len(lengths), 4) and len(labels) == len(lengths) and (lengths > 0).all()):
            raise UserError(f"{self.name}: the files of its index do not fit; delete those in {self._cache_folder}")

    def __len__(self) -> int:
        return len(self.index[1])

    def sequence_length(self, index: int) -> int:
        """Return the number of ids."""
        return int(self.index[1][index])

    def count_longer(self, length: int) -> int:
        """Return how many samples have more ids than `length`."""
        return int((self.index[1] > length).sum())

    def count_untrained(self, length: int) -> int:
        """Return how many samples have no trained label within their first `length` ids."""
        return int((self.index[2] >= length).sum())

    def prefetch(self, index: int, length: int) -> None:
        """Do nothing: the file is local."""

    def locate(self, index: int) -> str:
        """Say where a sample comes from."""
        _, _, number, part = self.index[0][index].tolist()
        return self.describe(number, part)

    def describe(self, number: int, part: int = 0) -> str:
        """Name a line or row, from 1, and a conversation within it, from 0."""
        kind = "line" if self.name.endswith(_JSON) else "row"
        return f"{self.name}, {kind} {number}" + (f", conversation {part + 1}" if part else "")

    def sample(self, index: int) -> Sample:
        """Return a sample, uncut.

        Raises:
            UserError: if it is not as long as when the index was built.
        """
        place, size, number, part = self.index[0][index].tolist()
        where = self.describe(number, part)
        samples = self._tokenize(self._rows.read(place, size, where), number)
        if not 0 <= part < len(samples):
            raise self.damaged(index)
        tokenized = samples[part]
        if len(tokenized.ids) != self.sequence_length(index):
            raise UserError(
                f"{where}: {len(tokenized.ids)} tokens, {self.sequence_length(index)} when its index was built: the "
                f"tokenizer or the file has changed; delete the index in {self._cache_folder}"
            )
        return tokenized

    def _tokenize(self, row: dict[str, Any], number: int) -> list[Sample]:
        """Tokenize the samples of a row.

        Raises:
            UserError: naming the row and what is wrong with it.
        """
        samples: list[Sample] = []
        try:
            for sample in read_conversations(row) if self._only_conversations else [read_row(row)]:
                if isinstance(sample, str):
                    tokenized = Sample(np.array(self._tokenizer.tokenize(sample), dtype=np.int64), None)
                elif isinstance(self._tokenizer, SFTTokenizer):
                    tokenized = tokenize_conversation(sample, self._tokenizer)
                else:
                    raise ValueError("conversations need --tokenizer-type SFTTokenizer")
                samples.append(tokenized if self._eod is None else _end(tokenized, self._eod))
                if len(samples[-1].ids) < 2 and not self.ends_with_eod:
                    raise ValueError("the conversation has fewer than two tokens")
        except ValueError as error:
            raise UserError(f"{self.describe(number, len(samples))}: {error}") from None
        return samples

    def samples(self) -> Iterator[tuple[tuple[int, int, int, int], Sample]]:
        """Yield (place, sample) in the order of the file, without the index."""
        for place, size, number in self._rows.places():
            row = self._rows.read(place, size, self.describe(number))
            for part, sample in enumerate(self._tokenize(row, number)):
                yield (place, size, number, part), sample

    def _build(self) -> tuple[np.ndarray, ...]:
        logger.info("tokenizing %s once, for the lengths of its samples", self.name)
        places, lengths, labels = [], [], []
        for place, sample in self.samples():
            places.append(place)
            lengths.append(len(sample.ids))
            labels.append(first_label(sample))
        if not lengths:
            raise UserError(f"{self.name}: there is nothing to read")
        logger.info("%s: %d samples, %d tokens", self.name, len(lengths), sum(lengths))
        return np.array(places, dtype=np.int64), np.array(lengths, dtype=np.int32), np.array(labels, dtype=np.int32)


def first_label(sample: Sample) -> int:
    """Return the number of the first id that is trained as a label, at least 1: a sample's first id is none."""
    return 1 if sample.loss_mask is None else 1 + int(sample.loss_mask[1:].argmax())
