"""Positions of a microbatch that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.training.run import TrainRun


@dataclass(frozen=True)
class SequenceSharding:
    """Ranks that share a sequence. Shard index: context_rank * tp + tensor_rank."""

    tp: int = 1
    cp: int = 1

    @property
    def num_shards(self) -> int:
        return self.tp * self.cp

    def positions(self, index: int, lengths: Sequence[int]) -> Tensor:
        """Return the positions of one shard of one sequence, or of packed ones.

        A context rank has a chunk from the front of every sequence and its mirror image from the back. Tensor ranks
        split the positions of their context rank.
        """
        cp_rank, tp_rank = divmod(index, self.tp)
        positions = torch.arange(sum(lengths))
        if self.cp > 1:
            chunks = [chunk for sequence in positions.split(list(lengths)) for chunk in sequence.chunk(2 * self.cp)]
            pairs = zip(chunks[cp_rank :: 2 * self.cp], chunks[2 * self.cp - 1 - cp_rank :: 2 * self.cp])
            positions = torch.cat([chunk for pair in pairs for chunk in pair])
        return positions.chunk(self.tp)[tp_rank]

    def token_indices(self, index: int, lengths: Sequence[int], batch_size: int) -> Tensor:
        """Return the rows of x_TH (token s * B + b) of one shard."""
        return (self.positions(index, lengths)[:, None] * batch_size + torch.arange(batch_size)).flatten()


def track_lengths(run: TrainRun) -> Callable[[], tuple[int, ...]]:
    """Return a function that returns the padded lengths of the sequences in the microbatch of the last forward pass.

    It is one length without packing.
    """
    lengths = (run.args.data.seq_length,)

    def record(_chunk, _inputs, options) -> None:
        nonlocal lengths
        if (packed := options["borders"].packed) is not None:
            lengths = packed.padded_lengths

    run.chunks[0].register_forward_pre_hook(record, with_kwargs=True)
    return lambda: lengths
