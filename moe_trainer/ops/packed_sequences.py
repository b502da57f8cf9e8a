"""Sequences of different lengths, one after another in one microbatch [1, T]: the THD layout.

Lengths are Python numbers: attention, shapes of messages and padding need them on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValidTokens:
    """Which tokens of a microbatch are no padding.

    Attributes:
        mask_T: of this rank's tokens.
        total: number of them in the microbatch, on all ranks that share it.
        cp_size: see PackedSequences.
    """

    mask_T: Tensor
    total: int
    cp_size: int | None = None


@dataclass(frozen=True)
class PackedSequences:
    """Lengths of the packed sequences.

    Attributes:
        lengths: tokens of every sequence.
        padded_lengths: the same with the padding at its end, which ranks need to shard it.
        cp_size: number of ranks that shard the sequences; None for that of all microbatches.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    cp_size: int | None = None

    @staticmethod
    def of(lengths: Sequence[int], multiple: int = 1) -> "PackedSequences":
        """Pad every sequence to a multiple of `multiple`."""
        return PackedSequences(tuple(lengths), tuple(-(-length // multiple) * multiple for length in lengths))

    def pad_tail(self, multiple: int, extend_last: bool = False) -> "PackedSequences":
        """Pad the microbatch to a multiple of `multiple` tokens: by a sequence of padding, or in the last one."""
        tail = -self.num_tokens % multiple
        if not tail:
            return self
        if extend_last:
            return replace(self, padded_lengths=(*self.padded_lengths[:-1], self.padded_lengths[-1] + tail))
        return replace(self, lengths=(*self.lengths, 0), padded_lengths=(*self.padded_lengths, tail))

    @property
    def num_tokens(self) -> int:
        """T: tokens with padding."""
        return sum(self.padded_lengths)

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Cumulative lengths, from 0."""
        return (0, *accumulate(self.lengths))

    @property
    def cu_seqlens_padded(self) -> tuple[int, ...]:
        """Cumulative lengths with padding, from 0: where the sequences are."""
        return (0, *accumulate(self.padded_lengths))

    def positions(self) -> Tensor:
        """Return the position of every token in its sequence, int64 [T]."""
        return torch.cat([torch.arange(length) for length in self.padded_lengths])

    def ids(self) -> Tensor:
        """Return the number of the sequence of every token, int32 [1, T]; padding belongs to its sequence."""
        numbers = torch.arange(len(self.padded_lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.padded_lengths)).unsqueeze(0)

    def is_valid(self) -> Tensor:
        """Return which tokens are no padding, bool [T]."""
        lengths = torch.tensor(self.lengths).repeat_interleave(torch.tensor(self.padded_lengths))
        return self.positions() < lengths

    def shift_left(self, x_BT: Tensor) -> Tensor:
        """Return the next token's value at every token, zero at the last one of a sequence."""
        shifted = torch.roll(x_BT, -1, dims=1)
        shifted[:, [end - 1 for end in self.cu_seqlens_padded[1:]]] = 0
        return shifted
