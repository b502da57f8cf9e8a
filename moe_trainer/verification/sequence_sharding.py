"""Positions of a sequence that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceSharding:
    """Ranks that share a sequence. Shard index: context_rank * tp + tensor_rank."""

    tp: int = 1
    cp: int = 1

    @property
    def num_shards(self) -> int:
        return self.tp * self.cp

    def positions(self, index: int, length: int) -> Tensor:
        """Return the positions of one shard.

        A context rank has a chunk from the front and its mirror image from the back. Tensor ranks split the positions
        of their context rank.
        """
        cp_rank, tp_rank = divmod(index, self.tp)
        positions = torch.arange(length)
        if self.cp > 1:
            chunks = positions.chunk(2 * self.cp)
            positions = torch.cat([chunks[cp_rank], chunks[2 * self.cp - 1 - cp_rank]])
        return positions.chunk(self.tp)[tp_rank]

    def token_indices(self, index: int, length: int, batch_size: int) -> Tensor:
        """Return the rows of x_TH (token s * B + b) of one shard."""
        return (self.positions(index, length)[:, None] * batch_size + torch.arange(batch_size)).flatten()
