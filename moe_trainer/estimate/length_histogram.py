"""Lengths of sequences (--length-histogram), and what packing them saves: arithmetic on (length, count) pairs.

Attention of a packed sequence sees its own tokens only, so its cost per token follows from the lengths. The mean token
is in a sequence of sum(l^2) / sum(l) tokens (`attention_length`), which replaces --seq-length in the cost of attention:
exactly where attention is causal and dense, about so with windows and sparse keys. Everything else costs a token the
same, and a pack needs the memory of one sequence of its length.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arguments.blend import Blend
from arguments.program import other_command
from arguments.regular_file import regular_file
from moe_trainer.data.group_packing import GroupSizes, pack_into_groups
from moe_trainer.estimate.flops import training_flops
from moe_trainer.token_index import read_sequence_lengths

if TYPE_CHECKING:
    from arguments import Arguments

CORPUS = "corpus"
_SAMPLE = 20_000
"""Sequences that are drawn to fill packs."""
_GROUPED_SAMPLE, _GROUPED_BATCHES = 4096, 64
"""Sequences that are drawn to plan groups, at least one global batch, and maximum of global batches."""


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

    def read_by_model(self, longest: int) -> LengthHistogram:
        """Return the tokens that the model reads of samples with so many ids: all but the last one, up to `longest`.

        As VarlenDataset.length counts them.
        """
        counts: defaultdict[int, float] = defaultdict(float)
        for length, count in self.counts:
            counts[max(1, min(length - 1, longest))] += count
        return LengthHistogram.of(counts)

    def write_csv(self, path: str) -> None:
        """Write a file that `read_histogram` reads."""
        with open(path, "w", encoding="utf-8") as file:
            file.write("length,count\n")
            file.writelines(f"{length},{count:.0f}\n" for length, count in self.counts)

    def sequences_per_pack(self, capacity: int, multiple: int = 1) -> float:
        """Return how many sequences, padded to a multiple, share a pack that is filled in order.

        Counted over sequences that are drawn from the histogram, always the same ones.
        """
        lengths, weights = zip(*self.counts)
        packs, space = 1, capacity
        for length in random.Random(0).choices(lengths, weights, k=_SAMPLE):
            padded = -(-length // multiple) * multiple
            if padded > space:
                packs, space = packs + 1, capacity
            space -= padded
        return _SAMPLE / packs


@dataclass(frozen=True)
class PackedGroups:
    """Packs of dynamic context parallelism, as the run plans them.

    Attributes:
        num_microbatches: of a global batch, the mean.
        per_pack: sequences of a pack.
        fill: share of all ranks' capacity that is no padding.
        token_shares: of the tokens, by the number of ranks of their group.
    """

    num_microbatches: float
    per_pack: float
    fill: float
    token_shares: Mapping[int, float]

    @staticmethod
    def of(
        histogram: LengthHistogram, args: Arguments, capacity: int, get_cost: Callable[[int], float], group_size: int
    ) -> PackedGroups:
        """Plan global batches of sequences that are drawn from a histogram, always the same ones.

        Args:
            histogram: of the tokens that the model reads of every sequence.
            args: with --dynamic-context-parallel.
            capacity: tokens of a pack of one rank.
            get_cost: of a sequence by its length, in FLOPs.
            group_size: the number of microbatches is a multiple of it.

        Raises:
            ValueError: if a global batch has fewer sequences than microbatches.
        """
        batch = args.training.global_batch_size
        limits = GroupSizes.of(
            args.dynamic_cp_sizes, capacity, args.sequence_padding_multiple, functools.lru_cache(None)(get_cost)
        )
        draws, (lengths, weights) = random.Random(0), zip(*histogram.counts)
        is_pipelined = args.parallel.pipeline_model_parallel_size > 1
        num_batches = min(_GROUPED_BATCHES, -(-_GROUPED_SAMPLE // batch))
        tokens: Counter[int] = Counter()
        num_packs = num_microbatches = 0
        for _ in range(num_batches):
            drawn = draws.choices(lengths, weights, k=batch)
            try:
                microbatches = pack_into_groups(drawn, limits, group_size, is_pipelined)
            except ValueError as error:
                raise ValueError(f"--length-histogram: {error}; raise --global-batch-size") from None
            num_microbatches += len(microbatches)
            for group in (group for groups in microbatches for group in groups):
                num_packs += 1
                tokens[group.size] += sum(drawn[position] for position in group.positions)
        return PackedGroups(
            num_microbatches / num_batches,
            num_batches * batch / num_packs,
            tokens.total() / (num_microbatches * limits.num_ranks * capacity),
            {size: tokens[size] / tokens.total() for size in sorted(tokens)},
        )

    @property
    def mean_size(self) -> int:
        """The size of groups nearest to that of the mean token."""
        mean = sum(size * share for size, share in self.token_shares.items())
        return min(self.token_shares, key=lambda size: abs(size - mean))


@dataclass(frozen=True)
class PackedLengths:
    """Sequences of a histogram in packs, and padded one by one to --seq-length.

    Attributes:
        histogram: sequences cut to --seq-length; of packed samples the tokens that the model reads.
        seq_length: that length.
        capacity: tokens of a pack: those of packed samples (Arguments.packed_capacity), else --seq-length.
        num_cut: sequences that were longer.
        per_pack: sequences of a pack.
        flops_per_token: of training, packed.
        padded_flops_per_token: the same for one padded sequence at a time, by tokens without padding.
        groups: packs of dynamic context parallelism, of `capacity` tokens per rank; None for packs of fixed ranks.
    """

    histogram: LengthHistogram
    seq_length: int
    capacity: int
    num_cut: float
    per_pack: float
    flops_per_token: float
    padded_flops_per_token: float
    groups: PackedGroups | None = None

    @staticmethod
    def of(histogram: LengthHistogram, args: Arguments, vocab_rows: int, group_size: int = 1) -> PackedLengths:
        """Pack sequences as the flags ask for.

        `group_size`: the number of microbatches is a multiple of it.

        Raises:
            ValueError: if dynamic groups need more sequences than --global-batch-size.
        """
        seq_length, capacity = args.data.seq_length, args.packed_capacity
        is_packed = capacity is not None
        multiple = args.sequence_padding_multiple if is_packed else 1
        capacity = capacity or seq_length
        get_flops = functools.partial(training_flops, args, 1, padded_vocab_size=vocab_rows)
        cut = histogram.read_by_model(seq_length) if is_packed else histogram.cut(seq_length)
        packed = sum(count * get_flops(length) for length, count in cut.counts)
        padded = cut.num_sequences * get_flops(seq_length)
        groups = PackedGroups.of(cut, args, capacity, get_flops, group_size) if args.dynamic_cp_sizes else None
        return PackedLengths(
            cut,
            seq_length,
            capacity,
            sum(count for length, count in histogram.counts if length > seq_length + is_packed),
            cut.sequences_per_pack(capacity, multiple) if groups is None else groups.per_pack,
            packed / cut.num_tokens,
            padded / cut.num_tokens,
            groups,
        )

    @property
    def fill(self) -> float:
        """Share of a pack's tokens that are no padding."""
        if self.groups is not None:
            return self.groups.fill
        return min(1.0, self.per_pack * self.histogram.mean / self.capacity)

    @property
    def padded_fill(self) -> float:
        """Share of a padded sequence's tokens that are no padding."""
        return self.histogram.mean / self.seq_length


def read_histogram(source: str, blend: Blend | None = None, by_samples: bool = False) -> LengthHistogram:
    """Read a histogram.

    Args:
        source: CSV file (length,count; a title is skipped), JSON file (an object {length: count} or a list of pairs),
            data prefix, or "corpus".
        blend: token files of "corpus".
        by_samples: its weights are shares of samples, of one sequence each, instead of tokens.

    Raises:
        ValueError: with what is wrong.
    """
    try:
        if source == CORPUS:
            return LengthHistogram.of(_read_corpus(blend, by_samples))
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


def _read_corpus(blend: Blend | None, by_samples: bool) -> dict[int, float]:
    if blend is None:
        raise ValueError("corpus needs token files: --data-path, --train-data-path or a file that names them")
    for path in filter(os.path.isfile, blend.prefixes):
        raise ValueError(
            f"{path} is text, and only a tokenizer gives its lengths: write them with {other_command('inspect')} "
            f"{path} --length-histogram FILE.csv, the tokenizer of the run, and --sft if the run has it, and name "
            "FILE.csv"
        )
    histograms = [_read_index(prefix) for prefix in blend.prefixes]
    sizes = [sum(count * (1 if by_samples else length) for length, count in each.items()) for each in histograms]
    weights: Sequence[float] = blend.weights or sizes
    total: defaultdict[int, float] = defaultdict(float)
    for prefix, histogram, weight, size in zip(blend.prefixes, histograms, weights, sizes):
        if weight and not size:
            raise ValueError(f"{prefix} has a weight and holds no tokens")
        scale = 1.0  # without weights in proportion to the sizes
        if blend.weights is not None:
            scale = weight / sum(weights) * sum(sizes) / size if weight else 0.0
        for length, count in histogram.items():
            total[length] += scale * count
    return total


def _read_csv(path: str) -> dict[int, float]:
    counts: defaultdict[int, float] = defaultdict(float)
    with regular_file(path).open(newline="", encoding="utf-8-sig") as file:  # Excel writes a byte order mark
        for number, row in enumerate(csv.reader(file), start=1):
            is_title = number == 1 and not any(character.isdigit() for field in row for character in field)
            if is_title or not any(row):
                continue
            try:
                length, count = row
                counts[_read_length(length)] += _read_count(count)
            except ValueError:
                raise ValueError(f"line {number}: needs a length and a count, not {','.join(row)[:80]!r}") from None
    return counts


def _read_json(path: str) -> dict[int, float]:
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not readable as JSON ({error})") from None
    counts: defaultdict[int, float] = defaultdict(float)
    try:
        for length, count in content.items() if isinstance(content, dict) else content:
            counts[_read_length(length)] += _read_count(count)
    except (TypeError, ValueError):
        raise ValueError(
            "needs an object {length: count}, or a list of [length, count]: lengths are integers, counts numbers"
        ) from None
    return counts


def _read_length(value: object) -> int:
    length = int(value) if isinstance(value, str) else value
    if type(length) is not int or abs(length) >= 2**31:
        raise ValueError
    return length


def _read_count(value: object) -> float:
    """Return a count, or a share."""
    count = float(value) if isinstance(value, str) else value
    if isinstance(count, bool) or not isinstance(count, int | float) or not abs(count) < 2**63:
        raise ValueError
    return count


def _read_index(prefix: str) -> Counter[int]:
    """Read the lengths of the sequences of a data prefix. Its index alone, so that a plan needs no numpy."""
    if "://" in prefix:
        raise ValueError(f"{prefix} is in object storage: copy its .idx file and name that prefix")
    return Counter(length for length in read_sequence_lengths(f"{prefix}.idx") if length)
