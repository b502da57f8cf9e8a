"""Random tokens for a parity check: the same sequences for every layout, from a seed and the index of a sample.

The loader's own `make_batch` makes batches of them, so flags about documents, positions and masks act as in a training.
Every sequence holds several documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from arguments import Arguments
from moe_trainer.data.build import batch_format
from moe_trainer.data.loader import Batch, make_batch
from moe_trainer.parallel.state import ParallelState

MASKED_FRACTION = 0.2
"""Fraction of the labels that have no loss."""
_NUM_DOCUMENT_ENDS = 2


class RandomTokenDataset:
    """Dataset of random sequences; see data.dataset.TokenDataset."""

    def __init__(self, seed: int, length: int, end: int):
        self.seed = seed
        self.length = length
        self.end = end

    def tokens(self, index: int) -> np.ndarray:
        """Return the token ids of a sample, [length + 1] int64: ids below `end`, and `end` after every document."""
        rng = np.random.default_rng((self.seed, index))
        ids = rng.integers(0, self.end, self.length + 1)
        ids[rng.integers(1, self.length - 1, _NUM_DOCUMENT_ENDS)] = self.end
        # equal first tokens would have equal scores up to rounding; chance would choose which ones a full expert drops
        ids[0] = (index * 37 + self.seed) % self.end
        return ids

    def part_lengths(self, index: int) -> np.ndarray:
        """Return the lengths of the documents of a sample, including their ends."""
        ends = np.flatnonzero(self.tokens(index) == self.end) + 1
        return np.diff(np.concatenate([[0], ends, [self.length + 1]]))


def make_null_tokenizer(args: Arguments) -> SimpleNamespace:
    """Return what a run uses of the NullTokenizer of --vocab-size."""
    return SimpleNamespace(vocab_size=args.data.vocab_size + 1, eod=args.data.vocab_size, pad=None)


def draw_batches(args: Arguments, ps: ParallelState, first_step: int, steps: int, seed: int = 0) -> list[Batch]:
    """Draw this rank's microbatches of some steps: full sequences on every tp, cp and pp rank, some labels masked."""
    training, dp = args.training, ps.dp
    micro, size = training.micro_batch_size, training.global_batch_size
    fmt = batch_format(args.data, make_null_tokenizer(args))
    dataset = RandomTokenDataset(seed, args.data.seq_length, fmt.eod)
    return [
        _mask_labels(make_batch(dataset, range(start, start + micro), fmt), range(start, start + micro), seed)
        for step in range(first_step, first_step + steps)
        for start in range(step * size + dp.rank * micro, (step + 1) * size, dp.size * micro)
    ]


def _mask_labels(batch: Batch, indices: Sequence[int], seed: int) -> Batch:
    """Remove the loss of some labels, a different number of them on every rank."""
    length = batch.tokens_BS.shape[1]
    mask = [np.random.default_rng((seed, index, 1)).random(length) >= MASKED_FRACTION for index in indices]
    return replace(batch, loss_mask_BS=batch.loss_mask_BS * torch.from_numpy(np.stack(mask)))
