"""Sequences of different lengths, one after another in one microbatch [1, T]: the THD layout.

Lengths are Python numbers: shapes of messages, blocks of attention and padding need them on the host. A CUDA graph
serves microbatches of other lengths, so it reads them from tensors of fixed sizes (`PackedOnDevice`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.transfer import to_device


@dataclass(frozen=True)
class ValidTokens:
    """Which tokens of a microbatch are no padding.

    Attributes:
        mask_T: of this rank's tokens.
        total: number of them in the microbatch, on all ranks that share it.
        sequence_T: number of the sequence of this rank's tokens; None for one sequence.
        lengths_B: of the sequences, on all ranks; None for one sequence.
        cp_size: see PackedSequences.
    """

    mask_T: Tensor
    total: int | Tensor
    sequence_T: Tensor | None = None
    lengths_B: Tensor | None = None
    cp_size: int | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences, with those of padding."""
        return 1 if self.lengths_B is None else len(self.lengths_B)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> "ValidTokens":
        """Return the same with fn(x) in the place of every tensor x."""
        return replace(
            self,
            mask_T=fn(self.mask_T),
            total=fn(self.total) if isinstance(self.total, Tensor) else self.total,
            sequence_T=None if self.sequence_T is None else fn(self.sequence_T),
            lengths_B=None if self.lengths_B is None else fn(self.lengths_B),
        )


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

    @property
    def num_valid(self) -> int:
        """Number of tokens that are no padding."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence, with padding."""
        return max(self.padded_lengths)

    def on_device(self, device: torch.device, max_sequences: int) -> "PackedOnDevice":
        """Return the lengths in tensors that have the same sizes for all microbatches of T tokens.

        Sequences of no token follow the last one, so that there are `max_sequences`.
        """
        lengths = torch.zeros(2, max_sequences, dtype=torch.int32)
        lengths[:, : len(self.lengths)] = torch.tensor([self.lengths, self.padded_lengths])
        lengths = to_device(lengths, device)
        return PackedOnDevice(lengths[0], F.pad(lengths[1].cumsum(0, dtype=torch.int32), (1, 0)), self.num_tokens)

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


@dataclass(frozen=True)
class PackedOnDevice:
    """Lengths of packed sequences as tensors of fixed sizes, on one context-parallel rank. Nothing waits for them.

    Attributes:
        lengths: tokens of every sequence, int32 [N]; zero after the last one.
        cu_seqlens_padded: where the sequences are, int32 [N + 1].
        num_tokens: T, with padding.
    """

    lengths: Tensor
    cu_seqlens_padded: Tensor
    num_tokens: int

    @property
    def cp_size(self) -> None:
        """Number of ranks that shard the sequences: that of all microbatches."""
        return None

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Lengths on the host: none, as nothing is sharded by them."""
        return ()

    @property
    def num_valid(self) -> Tensor:
        """Number of tokens that are no padding."""
        return self.lengths.sum()

    @property
    def max_seqlen(self) -> int:
        """Upper bound of the length of a sequence."""
        return self.num_tokens

    def _tokens(self) -> Tensor:
        return torch.arange(self.num_tokens, dtype=torch.int32, device=self.lengths.device)

    def positions(self) -> Tensor:
        """Return the position of every token in its sequence, int32 [T]."""
        return self._tokens() - self.cu_seqlens_padded[self.ids()[0]]

    def ids(self) -> Tensor:
        """Return the number of the sequence of every token, int32 [1, T]; padding belongs to its sequence."""
        ends = self.cu_seqlens_padded[1:]
        return torch.searchsorted(ends, self._tokens(), right=True, out_int32=True).unsqueeze(0)

    def is_valid(self) -> Tensor:
        """Return which tokens are no padding, bool [T]."""
        return self.positions() < self.lengths[self.ids()[0]]

    def shift_left(self, x_BT: Tensor) -> Tensor:
        """Return the next token's value at every token, zero at the last one of a sequence."""
        is_last = self._tokens() + 1 == self.cu_seqlens_padded[1:][self.ids()[0]]
        return torch.roll(x_BT, -1, dims=1).masked_fill(is_last, 0)


Packed = PackedSequences | PackedOnDevice
"""Lengths on the host, or on the device."""
