"""Blocks of a ring over packed sequences: one kernel for all sequences and the keys of a rank.

Every sequence is sharded in zigzag: a rank has two chunks of it, an early one and its mirror image. So its queries see

* of its own keys those of the causal rule;
* of an earlier rank the first chunk of every sequence, and with both of their chunks;
* of a later rank both chunks, with their second chunk only.

Kernels for variable lengths compute each of them for all sequences at once, where blocks (ops/block_attention.py) need
a kernel per sequence. A group of one rank has its own keys alone, with windows or attention sinks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops import varlen_attention
from moe_trainer.ops.block_attention import BlockBackwardInputs, BlockMask, merge_block
from moe_trainer.ops.transfer import to_device
from moe_trainer.ops.varlen_attention import Borders, KeyBlock


class _Chunks(NamedTuple):
    """The chunks of all sequences: borders of one chunk of each, and the rows of the first and the second ones."""

    borders: Borders
    first: Tensor
    second: Tensor

    @staticmethod
    def of(local_lengths: Sequence[int], device: torch.device) -> "_Chunks":
        sizes = torch.tensor([length // 2 for length in local_lengths])
        is_second = torch.tensor([False, True]).repeat(len(sizes)).repeat_interleave(sizes.repeat_interleave(2))
        first, second = (to_device(mask.nonzero().view(-1), device) for mask in (~is_second, is_second))
        return _Chunks(_borders(sizes.tolist(), device), first, second)


@dataclass(frozen=True)
class PackedRing:
    """The local tokens of packed sequences.

    Attributes:
        borders: of the sequences. With the chunks, the same for all layers of a microbatch.
        chunks: of them; None in a group of one rank.
        scale: of the scores.
        left: see BlockMask.
        rank: of this rank in the group.
    """

    borders: Borders
    chunks: _Chunks | None
    scale: float
    left: int
    rank: int

    @staticmethod
    def of(
        q_SBND: Tensor, v_SBGE: Tensor, block_mask: BlockMask, scale: float, rank: int, size: int
    ) -> "PackedRing | None":
        """Return the local tokens of `size` ranks; None where blocks are needed."""
        documents, lengths = block_mask.documents, block_mask.lengths
        if (
            documents is None
            or not lengths
            or not block_mask.fused
            or block_mask.dropout_p > 0.0
            or block_mask.selection is not None
        ):
            return None
        if (size > 1 and block_mask.left >= 0) or block_mask.chunk:
            return None  # a window or a chunk begins at other keys for every rank
        if q_SBND.shape[1] != 1 or not varlen_attention.can_run(q_SBND[:, 0], v_SBGE[:, 0]):
            return None
        derived = documents.derived
        if size not in derived:
            device, local = q_SBND.device, [length // size for length in lengths]
            derived[size] = _borders(local, device), _Chunks.of(local, device) if size > 1 else None
        borders, chunks = derived[size]
        return PackedRing(borders, chunks, scale, block_mask.left, rank)

    def attend(self, source: int, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge the keys of rank `source` into the running output and its log-sum-exp, in place."""
        q, k, v = map(_tokens_first, (q_BNSD, k_BGSD, v_BGSE))
        rows, columns = self._rows(source)
        inputs = _pick(q, rows), _pick(k, columns), _pick(v, columns)
        part_TNE, part_lse = varlen_attention.varlen_block(*inputs, self._block(source))
        part, top = part_TNE.transpose(0, 1).unsqueeze(0), part_lse.to(lse.dtype).unsqueeze(0)
        if rows is not None:  # the other queries see no key
            part = torch.zeros(*out.shape, dtype=part.dtype, device=out.device).index_copy_(2, rows, part)
            top = torch.full_like(lse, float("-inf")).index_copy_(2, rows, top)
        merge_block(out, lse, part, top.unsqueeze(-1), torch.ones_like(top).unsqueeze(-1))

    def attend_backward(
        self,
        source: int,
        q_BNSD: Tensor,
        k_BGSD: Tensor,
        v_BGSE: Tensor,
        final: BlockBackwardInputs,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the gradients of `attend` in place to `grads` of q, k and v."""
        q, k, v, grad, out = map(_tokens_first, (q_BNSD, k_BGSD, v_BGSE, final.grad, final.out))
        rows, columns = self._rows(source)
        lse = final.lse[0] if rows is None else final.lse[0].index_select(1, rows)
        parts = varlen_attention.varlen_block_backward(
            _pick(grad, rows),
            _pick(q, rows),
            _pick(k, columns),
            _pick(v, columns),
            _pick(out, rows),
            lse,
            self._block(source),
        )
        for total, part, places in zip(map(_tokens_first, grads), parts, (rows, columns, columns)):
            if places is None:
                total += part
            else:
                total.index_add_(0, places, part.to(total.dtype))

    def _rows(self, source: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of the queries and of the keys that take part; None for all."""
        if self.chunks is None or source == self.rank:
            return None, None
        return (self.chunks.second, None) if source > self.rank else (None, self.chunks.first)

    def _borders(self, source: int) -> tuple[Borders, Borders]:
        """Return the borders of these queries and keys."""
        if self.chunks is None or source == self.rank:
            return self.borders, self.borders
        of_chunks = self.chunks.borders
        return (of_chunks, self.borders) if source > self.rank else (self.borders, of_chunks)

    def _block(self, source: int) -> KeyBlock:
        """Return the block of the keys of rank `source`."""
        return KeyBlock(*self._borders(source), self.scale, source == self.rank, self.left)


def _borders(lengths: Sequence[int], device: torch.device) -> Borders:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Borders(to_device(starts, device), max(lengths))


def _tokens_first(x_BHSD: Tensor) -> Tensor:
    """Return [S, H, D] of the only sequence."""
    return x_BHSD[0].transpose(0, 1)


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
