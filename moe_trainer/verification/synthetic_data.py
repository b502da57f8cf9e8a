"""Random tokens for a parity check: the same sequences for every mapping, from a seed and the index of a sample.

The loader's own `make_batch` makes batches of them, so flags about documents, positions and masks act as in a training.
Every sequence holds several documents. Packed samples (--use-varlen-dataset) have random lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from arguments import Arguments
from moe_trainer.data.build import batch_format
from moe_trainer.data.dataset import Sample
from moe_trainer.data.loader import Batch, make_batch, make_packed_batch
from moe_trainer.data.packing import PackFormat, PackingPlan, PackingPlanner
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import ParallelState

MASKED_FRACTION = 0.2
"""Fraction of the labels that have no loss."""
_NUM_DOCUMENT_ENDS = 2


class RandomTokenDataset:
    """Random sequences of `longest` tokens; see data.dataset.SampleReader."""

    def __init__(self, seed: int, longest: int, end: int):
        self.seed = seed
        self.longest = longest
        self.end = end

    def tokens(self, index: int) -> np.ndarray:
        """Return the token ids of a sample, [length + 1] int64: ids below `end`, and `end` after every document."""
        rng = np.random.default_rng((self.seed, index))
        ids = rng.integers(0, self.end, self.longest + 1)
        ids[rng.integers(1, self.longest - 1, _NUM_DOCUMENT_ENDS)] = self.end
        # equal first tokens would have equal scores up to rounding; chance would choose which ones a full expert drops
        ids[0] = (index * 37 + self.seed) % self.end
        return ids

    def sample(self, index: int) -> Sample:
        """Return the ids of a sample, all of which are trained as labels."""
        return Sample(self.tokens(index), None)

    def part_lengths(self, index: int) -> list[int]:
        """Return the lengths of the documents of a sample, including their ends."""
        ends = np.flatnonzero(self.tokens(index) == self.end) + 1
        return np.diff(np.concatenate([[0], ends, [self.longest + 1]])).tolist()

    def locate(self, index: int, position: int) -> str:
        """Say where a token is."""
        return f"random sequence {index}, token {position}"


class VaryingTokenDataset(RandomTokenDataset):
    """Dataset of random sequences of random lengths, up to `longest` tokens."""

    def length(self, index: int) -> int:
        """Return the number of tokens that the model reads of a sample."""
        return int(np.random.default_rng((self.seed, index, 2)).integers(1, self.longest + 1))

    def tokens(self, index: int) -> np.ndarray:
        """Return the first ids of a random sequence, [length + 1] int64."""
        return super().tokens(index)[: self.length(index) + 1]

    def sample(self, index: int) -> Sample:
        """Return the ids of a sample, and which are trained as labels."""
        trained = np.random.default_rng((self.seed, index, 1)).random(self.length(index)) >= MASKED_FRACTION
        return Sample(self.tokens(index), np.append(True, trained))


def make_null_tokenizer(args: Arguments) -> SimpleNamespace:
    """Return what a run uses of the NullTokenizer of --vocab-size."""
    eod = args.data.vocab_size or 0
    return SimpleNamespace(vocab_size=eod + 1, eod=eod, pad=None)


@dataclass(frozen=True)
class PackLayout:
    """What the packs of a global batch depend on, besides lengths.

    Attributes:
        format: of packs.
        num_data_ranks: that share the global batch. Fewer ranks run the same packs as more microbatches.
        group_size: see PackingPlanner.
        sets_padding: batches have the padding of `format`, not that of the run's own flags.
    """

    format: PackFormat
    num_data_ranks: int
    group_size: int = 1
    sets_padding: bool = False


def draw_batches(
    args: Arguments, ps: ParallelState, first_step: int, steps: int, seed: int = 0, layout: PackLayout | None = None
) -> list[list[Batch]]:
    """Draw this rank's microbatches of some steps: full sequences on every tp, cp and pp rank, some labels masked.

    `layout`: of packs (default: that of the flags).
    """
    training, dp = args.training, ps.dp
    micro, size = training.micro_batch_size, training.global_batch_size
    tokenizer = make_null_tokenizer(args)
    fmt = batch_format(args.data, tokenizer)
    all_steps = range(first_step, first_step + steps)
    if (packs := PackFormat.from_args(args)) is not None:
        layout = layout or PackLayout(packs, dp.size)
        return [_draw_packs(args, packs, layout, ps, step, seed) for step in all_steps]
    dataset = RandomTokenDataset(seed, args.data.seq_length, tokenizer.eod)
    return [
        [
            _mask_labels(make_batch(dataset, range(start, start + micro), fmt), range(start, start + micro), seed)
            for start in range(step * size + dp.rank * micro, (step + 1) * size, dp.size * micro)
        ]
        for step in all_steps
    ]


def plan_packs(args: Arguments, layout: PackLayout, seed: int, first_step: int = 0) -> Iterator[PackingPlan]:
    """Yield the packs of every step."""
    micro, size = args.training.micro_batch_size, args.training.global_batch_size
    lengths = _varying_dataset(args, seed).length
    planner = PackingPlanner(lengths, float, layout.format, micro, layout.num_data_ranks, layout.group_size)
    return (planner.plan(step * size, size) for step in itertools.count(first_step))


def _varying_dataset(args: Arguments, seed: int) -> VaryingTokenDataset:
    return VaryingTokenDataset(seed, args.data.seq_length, make_null_tokenizer(args).eod)


def _draw_packs(
    args: Arguments, own: PackFormat, layout: PackLayout, ps: ParallelState, step: int, seed: int
) -> list[Batch]:
    """Return this rank's packs of a step; `own` is the format of the run's flags."""
    fmt, dataset = batch_format(args.data, make_null_tokenizer(args)), _varying_dataset(args, seed)
    padding = layout.format if layout.sets_padding else own
    plan = next(plan_packs(args, layout, seed, step))
    if own.cp_sizes:
        packs = [plan.pack(microbatch, ps.dp_cp.rank) for microbatch in range(plan.num_microbatches)]
    else:  # the same packs, one after the other
        packs = [pack for packs in plan.packs for pack in packs][ps.dp.rank :: ps.dp.size]

    def pad(lengths: Sequence[int], cp_size: int | None) -> PackedSequences:
        packed = padding.pack(lengths, cp_size if padding.cp_sizes else None)
        return packed if own.cp_sizes else replace(packed, cp_size=None)

    return [make_packed_batch(dataset, pack.samples, fmt, partial(pad, cp_size=pack.cp_size)) for pack in packs]


def _mask_labels(batch: Batch, indices: Sequence[int], seed: int) -> Batch:
    """Remove the loss of some labels, a different number of them on every rank."""
    length = batch.tokens_BS.shape[1]
    mask = [np.random.default_rng((seed, index, 1)).random(length) >= MASKED_FRACTION for index in indices]
    return replace(batch, loss_mask_BS=batch.loss_mask_BS * torch.from_numpy(np.stack(mask)))
