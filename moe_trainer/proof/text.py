"""Random text for a proof: the same sequences for every layout, drawn from a seed and the number of a sample.

Batches are made of them by the loader's own `make_batch`, so whatever the flags ask of documents, positions and masks happens here as
in a training. Every sequence holds several documents.
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

MASKED = 0.2
"""Share of the labels that carry no loss."""
_ENDS = 2


class RandomText:
    """A dataset of random sequences; see data.dataset.TokenDataset."""

    def __init__(self, seed: int, length: int, end: int):
        self.seed = seed
        self.length = length
        self.end = end

    def tokens(self, index: int) -> np.ndarray:
        """Token ids of a sample, [length + 1] int64; ids below `end`, and `end` after every document."""
        dice = np.random.default_rng((self.seed, index))
        ids = dice.integers(0, self.end, self.length + 1)
        ids[dice.integers(1, self.length - 1, _ENDS)] = self.end
        # equal first tokens have equal scores up to rounding: which of them a full expert keeps would be a matter of chance
        ids[0] = (index * 37 + self.seed) % self.end
        return ids

    def part_lengths(self, index: int) -> np.ndarray:
        """Lengths of the documents of a sample, each with its end."""
        ends = np.flatnonzero(self.tokens(index) == self.end) + 1
        return np.diff(np.concatenate([[0], ends, [self.length + 1]]))


def tokenizer(args: Arguments) -> SimpleNamespace:
    """The NullTokenizer of --vocab-size as far as a run asks: ids, the end of a document, no padding."""
    return SimpleNamespace(vocab_size=args.data.vocab_size + 1, eod=args.data.vocab_size, pad=None)


def batches(args: Arguments, ps: ParallelState, first: int, steps: int, seed: int = 0) -> list[Batch]:
    """Draw this rank's micro-batches of some steps, full sequences on every tp, cp and pp rank; some labels carry no loss."""
    training, dp = args.training, ps.dp
    micro, size = training.micro_batch_size, training.global_batch_size
    fmt = batch_format(args.data, tokenizer(args))
    text = RandomText(seed, args.data.seq_length, fmt.eod)
    return [
        _masked(make_batch(text, range(start, start + micro), fmt), range(start, start + micro), seed)
        for step in range(first, first + steps)
        for start in range(step * size + dp.rank * micro, (step + 1) * size, dp.size * micro)
    ]


def _masked(batch: Batch, indices: Sequence[int], seed: int) -> Batch:
    """Without the loss of some labels, a different number of them on every rank."""
    rows = [np.random.default_rng((seed, index, 1)).random(batch.tokens_BS.shape[1]) >= MASKED for index in indices]
    return replace(batch, loss_mask_BS=batch.loss_mask_BS * torch.from_numpy(np.stack(rows)))
