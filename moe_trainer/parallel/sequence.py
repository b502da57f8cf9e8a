"""Zigzag sharding of the sequence over context-parallel ranks.

The sequence is split into 2 * cp equal chunks; rank r holds chunks r and 2 * cp - 1 - r, in this order. With one early
and one late chunk every rank has the same work under a causal mask. Tokens, labels, masks and position ids are sharded
the same way. Of packed sequences (`lengths`), each is sharded so: a rank has two chunks of every one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_trainer.parallel.mappings import gather_rows
from moe_trainer.parallel.state import ContextGroups, Group


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of the two chunks (of 2 * size) of a rank."""
    return rank, 2 * size - 1 - rank


def zigzag_ranges(rank: int, size: int, length: int, lengths: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the positions of a rank in a sequence of `length`, as (first, one past the last), in its order.

    Raises:
        ValueError: if a sequence does not divide into chunks.
    """
    if size == 1:
        return [(0, length)]
    ranges = []
    start = 0
    for each in lengths or (length,):
        chunk, rest = divmod(each, 2 * size)
        if rest:
            raise ValueError(
                f"a sequence of {each} positions cannot be sharded over {size} context-parallel ranks: "
                f"it must be a multiple of {2 * size}"
            )
        ranges += [(start + index * chunk, start + (index + 1) * chunk) for index in zigzag_chunks(rank, size)]
        start += each
    return ranges


@dataclass(frozen=True)
class SequenceShard:
    """This rank's shard of a sequence over `cp`; with one rank tensors are returned unchanged.

    Attributes:
        lengths: of packed sequences, which are sharded one by one; () for one sequence.
        groups: from which microbatches choose, with dynamic context parallelism.
    """

    cp: Group
    lengths: tuple[int, ...] = ()
    groups: ContextGroups | None = None

    @staticmethod
    def over(groups: ContextGroups) -> "SequenceShard":
        """Return the shard of sequences whose microbatches may choose a group."""
        return SequenceShard(groups.fixed, groups=groups)

    def of(self, lengths: Iterable[int], cp_size: int | None = None) -> "SequenceShard":
        """Return the shard of packed sequences, over `cp_size` ranks if they have chosen."""
        cp = self.cp if cp_size is None or self.groups is None else self.groups.of(cp_size)
        return replace(self, cp=cp, lengths=tuple(lengths))

    def local(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's shard along `dim`: S -> S / cp."""
        if self.cp.size == 1:
            return x
        ranges = zigzag_ranges(self.cp.rank, self.cp.size, x.shape[dim], self.lengths)
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the position in the full sequence, of `length`, of every local one: int64 [length / cp]."""
        return self.local(torch.arange(length, device=device), 0)

    def full(self, x: Tensor, dim: int) -> Tensor:
        """All-gather the full sequence along `dim`: S / cp -> S. Without gradient."""
        if self.cp.size == 1:
            return x
        parts, _ = gather_rows(x.detach().movedim(dim, 0), self.cp)
        return zigzag_to_sequential(parts, self.cp.size, self.lengths).movedim(0, dim)


def zigzag_to_sequential(x: Tensor, size: int, lengths: Sequence[int] = ()) -> Tensor:
    """Reorder the shards of all ranks, concatenated in rank order, to the order of the sequence. Differentiable.

    `lengths`: of packed sequences, or numbers in their proportion.
    """
    if size == 1:
        return x
    chunks = x.split([chunk for _ in range(size) for chunk in _chunk_sizes(x, size, lengths) for _ in range(2)])
    per_rank = len(chunks) // size
    return torch.cat(
        [
            chunks[rank * per_rank + first + half]
            for first in range(0, per_rank, 2)
            for half, ranks in ((0, range(size)), (1, reversed(range(size))))
            for rank in ranks
        ]
    )


def sequential_to_zigzag(x: Tensor, size: int, lengths: Sequence[int] = ()) -> Tensor:
    """Reorder a sequence to the concatenated shards of all ranks; the inverse of zigzag_to_sequential."""
    if size == 1:
        return x
    chunks = x.split([chunk for chunk in _chunk_sizes(x, size, lengths) for _ in range(2 * size)])
    return torch.cat(
        [
            chunks[first + index]
            for rank in range(size)
            for first in range(0, len(chunks), 2 * size)
            for index in zigzag_chunks(rank, size)
        ]
    )


def _chunk_sizes(x: Tensor, size: int, lengths: Sequence[int]) -> list[int]:
    """Return the rows of a chunk of every sequence in x."""
    total = sum(lengths)
    return [length * x.shape[0] // total // (2 * size) for length in lengths] if lengths else [x.shape[0] // (2 * size)]
