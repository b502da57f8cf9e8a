"""Lengths of sequences (--length-histogram), and what packing them saves: arithmetic on (length, count) pairs.

Attention of a packed sequence sees its own tokens only, so its cost per token follows from the lengths. The mean token
is in a sequence of sum(l^2) / sum(l) tokens (`attention_length`), which replaces --seq-length in the cost of attention:
exactly where attention is causal and dense, about so with windows and sparse keys. Everything else costs a token the
same, and a pack of --seq-length tokens needs the memory of one sequence of that length.
"""

from __future__ import annotations

import csv
import json
import random
import struct
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from arguments.regular_file import regular_file
from moe_trainer.estimate.flops import training_flops

if TYPE_CHECKING:
    from arguments import Arguments

CORPUS = "corpus"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic bytes, version, dtype, numbers of sequences and documents, of an .idx file (data/indexed.py)."""
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_SAMPLE = 20_000
"""Sequences that are drawn to fill packs."""


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths of sequences in tokens, each with a count, in increasing order."""

    counts: tuple[tuple[int, float], ...]

    @staticmethod
    def of(counts: Mapping[int, float]) -> LengthHistogram:
        """Make a histogram; lengths with a count of zero are left out.

        Raises:
            ValueError: if a length or a count is out of range, or nothing is left.
        """
        kept = tuple(sorted((length, count) for length, count in counts.items() if count))
        if any(length < 1 or count < 0 for length, count in kept):
            raise ValueError("lengths must be at least 1, and counts at least 0")
        if not kept:
            raise ValueError("it holds no sequences")
        return LengthHistogram(kept)

    @property
    def num_sequences(self) -> float:
        return sum(count for _, count in self.counts)

    @property
    def num_tokens(self) -> float:
        return sum(length * count for length, count in self.counts)

    @property
    def mean(self) -> float:
        return self.num_tokens / self.num_sequences

    @property
    def attention_length(self) -> float:
        """Length of the sequence of the mean token."""
        return sum(length * length * count for length, count in self.counts) / self.num_tokens

    def quantile(self, fraction: float) -> int:
        """Return the length that a fraction of the sequences does not exceed."""
        passed, total = 0.0, self.num_sequences
        for length, count in self.counts:
            passed += count
            if passed >= fraction * total:
                return length
        return self.counts[-1][0]

    def cut(self, longest: int) -> LengthHistogram:
        """Return the histogram with longer sequences cut to `longest` tokens."""
        counts: defaultdict[int, float] = defaultdict(float)
        for length, count in self.counts:
            counts[min(length, longest)] += count
        return LengthHistogram.of(counts)

    def sequences_per_pack(self, capacity: int) -> float:
        """Return how many sequences share a pack that is filled in order, as --sequence-packing-scheduler dp_balanced.

        Counted over sequences that are drawn from the histogram, always the same ones.
        """
        lengths, weights = zip(*self.counts)
        packs, space = 1, capacity
        for length in random.Random(0).choices(lengths, weights, k=_SAMPLE):
            if length > space:
                packs, space = packs + 1, capacity
            space -= length
        return _SAMPLE / packs


@dataclass(frozen=True)
class PackedLengths:
    """Sequences of a histogram in packs of --seq-length tokens, and padded to that length.

    Attributes:
        histogram: sequences cut to the capacity.
        capacity: --seq-length.
        num_cut: sequences that were longer.
        per_pack: sequences of a pack.
        flops_per_token: of training, packed.
        padded_flops_per_token: the same for one padded sequence at a time, by tokens without padding.
    """

    histogram: LengthHistogram
    capacity: int
    num_cut: float
    per_pack: float
    flops_per_token: float
    padded_flops_per_token: float

    @staticmethod
    def of(histogram: LengthHistogram, args: Arguments, vocab_rows: int) -> PackedLengths:
        capacity = args.data.seq_length
        cut = histogram.cut(capacity)
        packed = sum(count * training_flops(args, 1, length, vocab_rows) for length, count in cut.counts)
        padded = cut.num_sequences * training_flops(args, 1, capacity, vocab_rows)
        return PackedLengths(
            cut,
            capacity,
            sum(count for length, count in histogram.counts if length > capacity),
            cut.sequences_per_pack(capacity),
            packed / cut.num_tokens,
            padded / cut.num_tokens,
        )

    @property
    def fill(self) -> float:
        """Share of a pack's tokens that are no padding."""
        return min(1.0, self.per_pack * self.histogram.mean / self.capacity)

    @property
    def padded_fill(self) -> float:
        """Share of a padded sequence's tokens that are no padding."""
        return self.histogram.mean / self.capacity


def read_histogram(source: str, corpus: Sequence[str] = ()) -> LengthHistogram:
    """Read a histogram.

    Args:
        source: CSV file (length,count; a title is skipped), JSON file (an object {length: count} or a list of pairs),
            data prefix, or "corpus".
        corpus: words of --data-path, for "corpus". The weights of a blend are shares of its tokens.

    Raises:
        ValueError: with what is wrong.
    """
    try:
        if source == CORPUS:
            return LengthHistogram.of(_read_corpus(corpus))
        if source.endswith(".csv"):
            return LengthHistogram.of(_read_csv(source))
        if source.endswith(".json"):
            return LengthHistogram.of(_read_json(source))
        return LengthHistogram.of(_read_index(source))
    except OSError as error:
        raise ValueError(
            f"--length-histogram {source}: cannot read {error.filename} ({error.strerror}); needed is a .csv or .json "
            "file, a data prefix, or the word corpus for those of --data-path"
        ) from None
    except ValueError as error:
        raise ValueError(f"--length-histogram {source}: {error}") from None


def _read_corpus(words: Sequence[str]) -> dict[int, float]:
    if not words:
        raise ValueError("corpus needs --data-path or --train-data-path")
    try:
        weights = [float(word) for word in words[::2]] if len(words) > 1 else []
    except ValueError:
        weights = []  # prefixes alone: by their sizes
    found = [_read_index(prefix) for prefix in (words[1::2] if weights else words)]
    tokens = [sum(length * count for length, count in counts.items()) for counts in found]
    if weights and not all(tokens):
        raise ValueError("a prefix of the blend holds no tokens")
    total: defaultdict[int, float] = defaultdict(float)
    for index, counts in enumerate(found):
        share = weights[index] / sum(weights) * sum(tokens) / tokens[index] if weights else 1.0
        for length, count in counts.items():
            total[length] += share * count
    return total


def _read_csv(path: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    with regular_file(path).open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            try:
                length, count = map(int, row)
            except ValueError:
                if number == 1 or not any(row):
                    continue
                raise ValueError(f"line {number}: needs a length and a count, not {','.join(row)!r}") from None
            counts[length] += count
    return counts


def _read_json(path: str) -> Counter[int]:
    try:
        found = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not readable as JSON ({error})") from None
    counts: Counter[int] = Counter()
    try:
        for length, count in found.items() if isinstance(found, dict) else found:
            counts[int(length)] += int(count)
    except (TypeError, ValueError):
        raise ValueError("needs an object {length: count}, or a list of [length, count]") from None
    return counts


def _read_index(prefix: str) -> Counter[int]:
    """Read the lengths of the sequences of a data prefix. Its index alone, so that a plan needs no numpy."""
    path = Path(f"{prefix}.idx")
    with regular_file(path).open("rb") as file:
        head = file.read(_INDEX_HEADER.size)
        if len(head) < _INDEX_HEADER.size or not head.startswith(_INDEX_MAGIC):
            raise ValueError(f"{path} is no index of token files")
        num_sequences = _INDEX_HEADER.unpack(head)[3]
        lengths = array("i")
        data = file.read(num_sequences * lengths.itemsize)
    if len(data) < num_sequences * lengths.itemsize:
        raise ValueError(f"{path} is truncated: it holds fewer than its {num_sequences} sequences")
    lengths.frombytes(data)
    return Counter(length for length in lengths if length)
