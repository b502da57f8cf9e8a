"""Which rows of a sequence a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """Ranks that share a sequence. Shard number context_rank * tp + tensor_rank."""

    tp: int = 1
    cp: int = 1

    @property
    def shards(self) -> int:
        """Into how many pieces a sequence is cut."""
        return self.tp * self.cp

    def positions(self, index: int, length: int) -> Tensor:
        """Positions of one shard: context ranks take a piece from the front and its mirror from the back, tensor ranks cut what
        their context rank holds."""
        cp_rank, tp_rank = divmod(index, self.tp)
        held = torch.arange(length)
        if self.cp > 1:
            pieces = held.chunk(2 * self.cp)
            held = torch.cat([pieces[cp_rank], pieces[2 * self.cp - 1 - cp_rank]])
        return held.chunk(self.tp)[tp_rank]

    def rows(self, index: int, length: int, batch: int) -> Tensor:
        """Rows of x_TH (token s * B + b) of one shard."""
        return (self.positions(index, length)[:, None] * batch + torch.arange(batch)).flatten()
