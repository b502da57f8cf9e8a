"""Zigzag sharding of the sequence over context-parallel ranks.

The sequence is split into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, in this order. With one early
and one late chunk every rank has the same work under a causal mask. Tokens, labels, masks and position ids are sharded
the same way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.parallel.mappings import gather_rows
from moe_trainer.parallel.state import Group


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of the two chunks (of 2 * size) of a rank."""
    return rank, 2 * size - 1 - rank


@dataclass(frozen=True)
class SequenceShard:
    """This rank's shard of a sequence over `cp`; with one rank tensors are returned unchanged."""

    cp: Group

    def chunks(self) -> tuple[int, int]:
        return zigzag_chunks(self.cp.rank, self.cp.size)

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard along `dim`: S -> S / cp."""
        if self.cp.size == 1:
            return x
        length, num_chunks = x.shape[dim], 2 * self.cp.size
        if length % num_chunks:
            raise ValueError(
                f"a sequence of {length} positions cannot be sharded over {self.cp.size} context-parallel ranks: "
                f"it must be a multiple of {num_chunks}"
            )
        size = length // num_chunks
        return torch.cat([x.narrow(dim, index * size, size) for index in self.chunks()], dim=dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the position in the full sequence, of `length`, of every local one: int64 [length / cp]."""
        return self.local(torch.arange(length, device=device), 0)

    def full(self, x: Tensor, dim: int) -> Tensor:
        """All-gather the full sequence along `dim`: S / cp -> S. Without gradient."""
        if self.cp.size == 1:
            return x
        parts, _ = gather_rows(x.detach().movedim(dim, 0), self.cp)
        return zigzag_to_sequential(parts, self.cp.size).movedim(0, dim)


def zigzag_to_sequential(x: Tensor, size: int) -> Tensor:
    """Reorder the shards of all ranks, concatenated in rank order, to the order of the sequence. Differentiable."""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat(
        [chunks[2 * rank] for rank in range(size)] + [chunks[2 * rank + 1] for rank in reversed(range(size))]
    )


def sequential_to_zigzag(x: Tensor, size: int) -> Tensor:
    """Reorder a sequence to the concatenated shards of all ranks. Differentiable."""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[index] for rank in range(size) for index in zigzag_chunks(rank, size)])
