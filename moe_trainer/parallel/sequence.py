"""Which positions of a sequence a context-parallel rank holds.

The sequence is cut into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, in that order. Under a causal mask
early positions attend to few keys and late ones to many, and one of each gives every rank the same work (the cut is
called zigzag). Everything that goes in per token (tokens, labels, masks, position ids) is cut the same way, so a rank's
loss is that of its own positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.parallel.mappings import gather_rows
from moe_trainer.parallel.state import Group


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Numbers of the two chunks (of 2 * size) that member `rank` holds, in order."""
    return rank, 2 * size - 1 - rank


@dataclass(frozen=True)
class SequenceShard:
    """The cut of one rank of `cp`. With one rank everything is the whole sequence, and tensors come back as they are."""

    cp: Group

    def chunks(self) -> tuple[int, int]:
        """Numbers of the two chunks (of 2 * cp) that this rank holds, in order."""
        return zigzag_chunks(self.cp.rank, self.cp.size)

    def _chunk(self, length: int) -> int:
        if length % (2 * self.cp.size):
            raise ValueError(
                f"a sequence of {length} positions cannot be cut over {self.cp.size} context-parallel ranks: "
                f"it must be a multiple of {2 * self.cp.size}"
            )
        return length // (2 * self.cp.size)

    def local(self, x: Tensor, dim: int) -> Tensor:
        """This rank's positions along `dim`: S -> S / cp; contiguous (at cp 1 x itself).

        Raises: ValueError when the length is not a multiple of 2 * cp.
        """
        if self.cp.size == 1:
            return x
        chunk = self._chunk(x.shape[dim])
        return torch.cat([x.narrow(dim, number * chunk, chunk) for number in self.chunks()], dim=dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Place in the whole sequence of every local position, int64 [length / cp]. length: of the whole sequence."""
        return self.local(torch.arange(length, device=device), 0)

    def full(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence, from every rank's part, along `dim`: S / cp -> S. No gradient passes.

        Communication: all-gather of x over cp.
        """
        if self.cp.size == 1:
            return x
        parts, _ = gather_rows(x.detach().movedim(dim, 0), self.cp)
        return zigzag_to_sequential(parts, self.cp.size).movedim(0, dim)


def zigzag_to_sequential(x: Tensor, size: int) -> Tensor:
    """Rows of all ranks' parts, in rank order -> rows in the order of the sequence. Differentiable. [S, ...] -> [S, ...]."""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat(
        [chunks[2 * rank] for rank in range(size)] + [chunks[2 * rank + 1] for rank in reversed(range(size))]
    )


def sequential_to_zigzag(x: Tensor, size: int) -> Tensor:
    """The inverse of zigzag_to_sequential: rank 0's two chunks, rank 1's, and so on. Differentiable."""
    if size == 1:
        return x
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[number] for rank in range(size) for number in zigzag_chunks(rank, size)])
