"""Statistics and checks of token files and of text: lengths, ids, ends of documents, duplicates."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np

from moe_trainer.data.indexed import IndexedDataset, open_token_file
from moe_trainer.data.text_sequences import TextSequences
from moe_trainer.data.tokenizer import Tokenizer

QUANTILES = (0.5, 0.9, 0.99)
_COUNT_TOKENS = 1 << 19
"""Tokens that are counted at once: one document alone costs as much as the vocabulary has ids."""
_COUNTED_IDS = 1 << 22
"""Without a tokenizer only ids below it are counted one by one: those of damaged files may be of any size."""


@dataclass
class TokenStatistics:
    """What a pair of token files, or a file of text, holds.

    Attributes:
        length_bounds: documents of [bounds[i], bounds[i + 1]) tokens are in bin i of the histogram.
        documents_by_length: documents in each bin, as `tokens_by_length` their tokens.
        length_quantiles: the length below which a fraction QUANTILES of all documents lies.
        no_eod: documents that do not end with the end-of-document token; None without a tokenizer.
        no_bos: documents that do not begin with the begin token; None if the tokenizer has none.
        inner_eod: end-of-document tokens inside documents.
        distinct_ids: number of different ids in the vocabulary, or below 2**22 without a tokenizer.
        negative: tokens with negative ids.
        first_negative: the first document that holds one.
        outside: tokens above the vocabulary.
        duplicates: documents that repeat an earlier one, and the tokens in them.
        first_duplicate: its number and that of the document it repeats.
        trained: tokens of text that are trained; None for token files.
    """

    prefix: str
    dtype: str
    documents: int
    tokens: int
    empty: int
    shortest: int
    longest: int
    mean: float
    length_quantiles: list[int]
    length_bounds: list[int]
    documents_by_length: list[int]
    tokens_by_length: list[int]
    lowest_id: int | None = None
    highest_id: int | None = None
    distinct_ids: int = 0
    no_eod: int | None = None
    no_bos: int | None = None
    inner_eod: int | None = None
    negative: int = 0
    first_negative: int | None = None
    outside: int | None = None
    duplicates: int = 0
    duplicate_tokens: int = 0
    first_duplicate: tuple[int, int] | None = None
    trained: int | None = None
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def collect_statistics(prefix: str, tokenizer: Tokenizer | None = None) -> TokenStatistics:
    """Read a pair of token files once, document by document.

    Args:
        prefix: of the files.
        tokenizer: whose vocabulary and special tokens are compared with the ids.

    Raises:
        ValueError: if the files are missing or damaged.
    """
    dataset = open_token_file(prefix, memory_map=False)  # a map is for reading in random order
    dataset.check_sequences()
    return _collect(prefix, dataset.dtype.name, _documents(dataset), tokenizer)


def collect_text_statistics(sequences: TextSequences) -> TokenStatistics:
    """Tokenize a file of text once, sample by sample.

    Raises:
        UserError: naming the first row that cannot be used.
    """
    trained = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal trained
        for _, (ids, mask) in sequences.samples():
            trained += len(ids) if mask is None else int(mask.sum())
            yield ids

    found = _collect(sequences.name, "text", documents(), None)
    found.trained = trained
    return found


def _collect(prefix: str, dtype: str, documents: Iterator[np.ndarray], tokenizer: Tokenizer | None) -> TokenStatistics:
    counts = _IdCounts(_COUNTED_IDS if tokenizer is None else tokenizer.vocab_size)
    digests, lengths = array("Q"), array("q")
    first_negative = None
    eod, bos = (None, None) if tokenizer is None else (tokenizer.eod, tokenizer.bos)
    no_eod = no_bos = num_eod = num_waiting = 0
    waiting: list[np.ndarray] = []
    for number, ids in enumerate(documents):
        lengths.append(len(ids))
        digests.append(int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little"))
        if not len(ids):
            continue
        if first_negative is None and ids.min() < 0:
            first_negative = number
        if ids[-1] == eod:
            num_eod += 1
        else:
            no_eod += 1
        no_bos += int(ids[0] != bos)
        waiting.append(ids)
        num_waiting += len(ids)
        if num_waiting >= _COUNT_TOKENS:
            counts.add(np.concatenate(waiting))
            waiting, num_waiting = [], 0
    if waiting:
        counts.add(np.concatenate(waiting))
    found = _describe_lengths(prefix, dtype, np.array(lengths))
    found.first_negative = first_negative
    found.lowest_id, found.highest_id, found.negative = counts.lowest, counts.highest, counts.num_negative
    found.distinct_ids = int(np.count_nonzero(counts.by_id))
    if eod is not None:
        found.no_eod = no_eod
        found.inner_eod = int(counts.by_id[eod : eod + 1].sum()) - num_eod
    found.no_bos = None if bos is None else no_bos
    found.outside = None if tokenizer is None else counts.num_above
    _find_duplicates(found, np.array(digests), np.array(lengths))
    _list_problems(found, tokenizer)
    return found


class _IdCounts:
    """How often every id occurred, in memory that does not depend on the ids.

    Args:
        num_ids: ids from 0 to num_ids - 1 are counted one by one, all others together.
    """

    def __init__(self, num_ids: int):
        self.by_id = np.zeros(num_ids, dtype=np.int64)
        self.num_negative = self.num_above = 0
        self.lowest: int | None = None
        self.highest: int | None = None

    def add(self, ids: np.ndarray) -> None:
        """Count ids [n], n at least 1."""
        lowest, highest = int(ids.min()), int(ids.max())
        self.lowest = lowest if self.lowest is None else min(lowest, self.lowest)
        self.highest = highest if self.highest is None else max(highest, self.highest)
        if lowest < 0 or highest >= len(self.by_id):
            is_negative, is_above = ids < 0, ids >= len(self.by_id)
            self.num_negative += int(is_negative.sum())
            self.num_above += int(is_above.sum())
            ids = ids[~(is_negative | is_above)]
        seen = np.bincount(ids)
        self.by_id[: len(seen)] += seen


def _documents(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    """Yield the ids of every document."""
    bounds = dataset.document_indices.tolist()
    for first, last in zip(bounds, bounds[1:]):
        parts = [dataset.get(sequence) for sequence in range(first, last)]
        yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dataset.dtype), *parts])


def _describe_lengths(prefix: str, dtype: str, lengths: np.ndarray) -> TokenStatistics:
    longest = int(lengths.max(initial=0))
    bounds = [0, *(1 << power for power in range(longest.bit_length() + 1))]
    bins = np.searchsorted(bounds, lengths, side="right") - 1
    return TokenStatistics(
        prefix=prefix,
        dtype=dtype,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        empty=int((lengths == 0).sum()),
        shortest=int(lengths.min()) if len(lengths) else 0,
        longest=longest,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        length_quantiles=np.quantile(lengths, QUANTILES, method="higher").tolist() if len(lengths) else [0, 0, 0],
        length_bounds=bounds,
        documents_by_length=np.bincount(bins, minlength=len(bounds) - 1).tolist(),
        tokens_by_length=np.bincount(bins, weights=lengths, minlength=len(bounds) - 1).astype(np.int64).tolist(),
    )


def _find_duplicates(found: TokenStatistics, hashes: np.ndarray, lengths: np.ndarray) -> None:
    """Count documents whose 64-bit digest occurred before; empty ones do not count."""
    numbers = np.flatnonzero(lengths)
    _, first, group = np.unique(hashes[numbers], return_index=True, return_inverse=True)
    is_repeated = np.ones(len(numbers), dtype=bool)
    is_repeated[first] = False
    repeated = numbers[is_repeated]
    found.duplicates, found.duplicate_tokens = len(repeated), int(lengths[repeated].sum())
    if len(repeated):
        place = int(np.flatnonzero(is_repeated)[0])
        found.first_duplicate = int(numbers[place]), int(numbers[first[group[place]]])


def _list_problems(found: TokenStatistics, tokenizer: Tokenizer | None) -> None:
    if found.negative:
        found.problems.append(
            f"{found.negative:,} tokens have negative ids (the lowest is {found.lowest_id}); the first are in document "
            f"{found.first_negative}"
        )
    if found.outside and tokenizer is not None:
        found.problems.append(
            f"{found.outside:,} tokens lie outside the vocabulary of {tokenizer.vocab_size:,} ids (the highest is "
            f"{found.highest_id}): the files were made with another tokenizer"
        )
    if found.no_eod:
        found.problems.append(
            f"{found.no_eod:,} of {found.documents - found.empty:,} documents do not end with the end-of-document "
            "token: documents are not separated (--append-eod)"
        )
    if found.inner_eod:
        found.problems.append(f"{found.inner_eod:,} end-of-document tokens lie inside documents")
    if found.no_bos and found.no_bos < found.documents - found.empty:
        found.problems.append(f"{found.no_bos:,} documents do not begin with the begin token, others do")
    if found.empty:
        found.problems.append(f"{found.empty:,} documents are empty")
    if found.first_duplicate is not None:
        number, earlier = found.first_duplicate
        found.problems.append(
            f"{found.duplicates:,} documents ({found.duplicate_tokens:,} tokens) repeat an earlier one; the first is "
            f"document {number}, which repeats document {earlier}"
        )


def preview(prefix: str, tokenizer: Tokenizer | None, numbers: range, max_tokens: int) -> Iterator[str]:
    """Yield the beginnings of documents, as text where the tokenizer can tell it, else as ids."""
    dataset, to_text = IndexedDataset(prefix), _to_text(tokenizer)
    bounds = dataset.document_indices
    for number in numbers[: max(len(bounds) - 1, 0)]:
        sequences = range(int(bounds[number]), int(bounds[number + 1]))
        ids = [token for sequence in sequences for token in dataset.get(sequence)[:max_tokens].tolist()][:max_tokens]
        yield f"document {number}: {repr(to_text(ids)) if to_text is not None else ' '.join(map(str, ids))}"


def _to_text(tokenizer: Tokenizer | None) -> Callable[[list[int]], str] | None:
    return getattr(tokenizer, "decode", None) or getattr(tokenizer, "plain_text", None)


def preview_text(sequences: TextSequences, tokenizer: Tokenizer, count: int, max_tokens: int) -> Iterator[str]:
    """Yield the beginnings of samples of a text file, in runs of tokens that are trained and that are not."""
    to_text = _to_text(tokenizer)
    for (_, _, number, part), (ids, mask) in islice(sequences.samples(), count):
        is_trained = np.ones(len(ids), dtype=bool) if mask is None else mask
        yield f"{sequences.describe(number, part)}: {len(ids):,} tokens, {int(is_trained.sum()):,} trained"
        shown = ids[:max_tokens].tolist()
        for trained, run in groupby(zip(shown, is_trained.tolist()), key=lambda pair: pair[1]):
            own = [token for token, _ in run]
            text = repr(to_text(own)) if to_text is not None else " ".join(map(str, own))
            yield f"  {'trained' if trained else 'masked '} {text}"
