"""A model in memory for forward passes under any mapping, and how texts become batches.

Every rank is given the same texts and returns the same results. Data-parallel ranks share the texts, all other ranks
compute together as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.schedule import Schedule


@dataclass(frozen=True)
class TextBatch:
    """Texts of similar length on one data-parallel rank.

    Attributes:
        numbers: of the texts, longest first; ranks have equally many, or fewer on later ranks.
        num_rows: with padding, the same on all ranks.
        length: padded, the same on all ranks.
    """

    numbers: tuple[int, ...]
    num_rows: int
    length: int

    def pad(self, texts: Sequence[Sequence[int]], num_rows: int) -> tuple[Tensor, tuple[int, ...]]:
        """Return the batch's texts among `texts` [num_rows, length], padded with zeros, and the tokens of every row."""
        tokens_BS = torch.zeros(num_rows, self.length, dtype=torch.int64)
        for row, number in enumerate(self.numbers):
            tokens_BS[row, : len(texts[number])] = torch.tensor(texts[number])
        filled = [len(texts[number]) for number in self.numbers]
        return tokens_BS, (*filled, *[0] * (num_rows - len(filled)))


@dataclass(frozen=True)
class Model:
    """A model in memory, as one rank sees it.

    Attributes:
        chunks: this rank's chunks.
        schedule: order of their forward passes.
        ps: process groups.
        device: of the parameters.
        max_length: number of positions.
        vocab_size: padded.
        length_multiple: that a padded length must have (sequence parallelism).
    """

    chunks: Sequence[Transformer]
    schedule: Schedule
    ps: ParallelState
    device: torch.device
    max_length: int
    vocab_size: int
    length_multiple: int = 1

    def padded(self, count: int) -> int:
        """Return the next multiple of `length_multiple`."""
        return -(-count // self.length_multiple) * self.length_multiple

    def plan(self, lengths: Sequence[int], max_rows: Callable[[int], int]) -> list[list[TextBatch]]:
        """Return the batches of texts of these lengths, those of each data-parallel rank.

        What ranks compute at the same time has one shape, because expert parallelism joins it. Rows without a text are
        padding.

        Args:
            max_rows: of a batch on one rank, by its padded length.
        """
        num_ranks = self.ps.dp.size
        order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
        batches: list[list[TextBatch]] = []
        start = 0
        while start < len(order):
            length = self.padded(lengths[order[start]])
            together = order[start : start + max(1, max_rows(length)) * num_ranks]
            start += len(together)
            rows = -(-len(together) // num_ranks)
            batches.append([TextBatch(tuple(together[rank::num_ranks]), rows, length) for rank in range(num_ranks)])
        return batches

    def share(self, values: Tensor) -> Tensor:
        """Return the values of the last stage on every rank, summed over data-parallel ranks.

        Communication: their size over the data-parallel group of the last stage, and over the pipeline.
        """
        values = values.to(self.device)
        if self.ps.is_last_stage:
            values = collectives.all_reduce(values, self.ps.dp)
        return collectives.broadcast(values, self.ps.pp, src=self.ps.pp.size - 1)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute without gradients in evaluation mode; switch the chunks back to the mode that they had."""
        modes = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for chunk, mode in zip(self.chunks, modes, strict=True):
                chunk.train(mode)
