"""Blockwise attention: partial results over some keys, merged exactly into the result over all keys.

`attend` adds one block (a range of queries against a range of keys) to the running output and log-sum-exp, at least
fp32. Partial results (o1, l1), (o2, l2) merge into l = log(e^l1 + e^l2), o = o1 e^(l1 - l) + o2 e^(l2 - l), in any
order. Queries that see no key have l = -inf and o = 0. `attend_backward` recomputes a block from the final log-sum-exp
and delta = sum(grad * out). At most a tile of QUERY_TILE queries against one range exists; blocks that a flash kernel
can compute use it. Visibility is a rule over positions and documents, not a mask, except `Selection` (sparse
attention). Dropout masks come from a generator seeded by (seed, position).

Shapes: B sequences, N query heads, G key-value heads (n = N / G), S queries, K keys, D key width, E value width.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops import flash_attention
from moe_trainer.ops.transfer import to_device

QUERY_TILE = 64
QUERY_TILE_CUDA = 512


@dataclass(frozen=True)
class PositionRange:
    """Positions start..stop-1 of a sequence."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def within(self, outer: "PositionRange") -> slice:
        """Return the slice of these positions in a tensor that holds `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)


@dataclass(frozen=True)
class Documents:
    """Documents packed into sequences.

    Attributes:
        ids_BS: document of every position.
        earliest, latest: per position, the start of its document, minimum and maximum over B. With them blocks between
            documents are skipped, and blocks inside one need no mask.
        begins: document starts, if equal in all B sequences; else empty.
        is_static: the host does not know the boundaries. All blocks of the causal rule are computed, with a mask, so a
            CUDA graph serves all batches.
        lengths: of packed sequences, which context-parallel ranks shard one by one; () for documents in a sequence.
        derived: what a kind of attention derives from them for all layers and passes, by the size of its group.
    """

    ids_BS: Tensor
    earliest: Sequence[int]
    latest: Sequence[int]
    begins: Sequence[int]
    is_static: bool = False
    lengths: tuple[int, ...] = ()
    derived: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(ids_BS: Tensor, device: torch.device | None = None, lengths: tuple[int, ...] = ()) -> "Documents":
        """Find the document boundaries.

        Args:
            ids_BS: in (pinned) host memory; on a device, where reading them would synchronize, the result is static.
            device: where attention computes.
            lengths: see the attribute.

        Raises:
            ValueError: if ids decrease along a sequence.
        """
        if ids_BS.is_cuda:
            length = ids_BS.shape[1]
            return Documents(ids_BS, (0,) * length, (length,) * length, (), is_static=True)
        on_device = ids_BS if device is None else to_device(ids_BS, device)
        if lengths:  # no search for what is known: there may be a million positions
            begins = list(zip(itertools.accumulate(lengths, initial=0), lengths))
            earliest = list(itertools.chain.from_iterable([begin] * length for begin, length in begins))
            starts = [begin for begin, length in begins if length]
            return Documents(on_device, earliest, earliest, starts, lengths=lengths)
        if (ids_BS[:, 1:] < ids_BS[:, :-1]).any():
            raise ValueError("document ids must not decrease along the sequence")
        begins_BS = torch.zeros_like(ids_BS)
        begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
        begins_BS = (begins_BS * torch.arange(ids_BS.shape[1], device=ids_BS.device)).cummax(1).values
        earliest, latest = begins_BS.amin(0).tolist(), begins_BS.amax(0).tolist()
        return Documents(on_device, earliest, latest, sorted(set(earliest)) if earliest == latest else ())


@dataclass(frozen=True)
class Selection:
    """Keys selected one by one among the visible ones.

    Attributes:
        bits_BSC: uint8 [B, S, ceil(K / 8)]; key k of the full sequence is bit k % 8 of byte k // 8.
        runs: positions of the S queries, in order.
    """

    bits_BSC: Tensor
    runs: tuple[PositionRange, ...]

    @staticmethod
    def pack(chosen_BSK: Tensor) -> Tensor:
        """Pack a bool tensor into bits, [B, S, ceil(K / 8)]."""
        padded = F.pad(chosen_BSK.to(torch.uint8), (0, -chosen_BSK.shape[-1] % 8)).unflatten(-1, (-1, 8))
        return (padded << torch.arange(8, dtype=torch.uint8, device=padded.device)).sum(-1, dtype=torch.uint8)

    def of(self, queries: PositionRange, keys: PositionRange) -> Tensor:
        """Return bool [B, S, K], True = selected; `queries` lie within one of the runs."""
        row = 0
        for run in self.runs:
            if run.start <= queries.start < run.stop:
                row += queries.start - run.start
                break
            row += run.size
        first = keys.start // 8
        bits = self.bits_BSC[:, row : row + queries.size, first : -(-keys.stop // 8)].unsqueeze(-1)
        chosen = ((bits >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1).bool().flatten(-2)
        return chosen[:, :, keys.start - 8 * first : keys.stop - 8 * first]


@dataclass(frozen=True)
class BlockMask:
    """Which keys a query sees, and dropout.

    Attributes:
        left: query i sees keys i - left .. i; negative for all up to i.
        documents: of the full sequence; a query sees its own document only. None for a single one.
        selection: keys that count among the visible ones; None for all.
        fused: flash kernels may compute blocks.
        chunk: a query sees its own chunk of this number of positions only; 0 for no chunks. Packed sequences have
            their own chunks, documents in a sequence those of the sequence.
    """

    left: int = -1
    documents: Documents | None = None
    dropout_p: float = 0.0
    seed: int = 0
    selection: Selection | None = None
    fused: bool = True
    chunk: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of packed sequences, () for one sequence."""
        return () if self.documents is None else self.documents.lengths

    def _chunk_start(self, position: int) -> int:
        """Return the first position of the chunk of a position; 0 without chunks."""
        if not self.chunk:
            return 0
        origin = self.documents.earliest[position] if self.documents is not None and self.lengths else 0
        return position - (position - origin) % self.chunk

    def clip(self, queries: PositionRange, keys: PositionRange) -> PositionRange | None:
        """Return the keys that some of the queries may see, or None."""
        start, stop = max(keys.start, self.first_key(queries)), min(keys.stop, queries.stop)
        return PositionRange(start, stop) if start < stop else None

    def first_key(self, queries: PositionRange) -> int:
        """Return the first key that some of the queries may see."""
        start = 0 if self.left < 0 else max(0, queries.start - self.left)
        if self.documents is not None:
            start = max(start, self.documents.earliest[queries.start])
        return max(start, self._chunk_start(queries.start))

    def split(self, queries: PositionRange) -> list[PositionRange]:
        """Split queries at boundaries of documents or chunks if these are long, so that each block needs no mask."""
        begins = () if self.documents is None else self.documents.begins
        inside = {place for place in begins if queries.start < place < queries.stop}
        if self.chunk:
            for start, stop in itertools.pairwise([queries.start, *sorted(inside), queries.stop]):
                inside.update(range(self._chunk_start(start) + self.chunk, stop, self.chunk))
        if (len(inside) + 1) * flash_attention.CPU_LENGTH > queries.size:
            return [queries]
        return [PositionRange(*ends) for ends in itertools.pairwise([queries.start, *sorted(inside), queries.stop])]

    def flash_causal(self, queries: PositionRange, keys: PositionRange) -> bool | None:
        """Return None if the block needs tiles; else whether a flash kernel computes it with a causal mask."""
        outside = self.left >= 0 and keys.start < queries.stop - 1 - self.left
        apart = self.documents is not None and self.documents.latest[queries.stop - 1] > keys.start
        apart |= self._chunk_start(queries.stop - 1) > keys.start
        if not self.fused or outside or apart or self.dropout_p > 0.0 or self.selection is not None:
            return None
        if keys.stop - 1 <= queries.start:
            return False
        return True if keys == queries else None

    def hidden(self, queries: PositionRange, keys: PositionRange, device: torch.device) -> Tensor | None:
        """Return bool [1 or B, 1, S, K], True = hidden; None if every query sees every key."""
        if self.selection is not None:
            return ~self.selection.of(queries, keys).unsqueeze(1)
        later = keys.stop - 1 > queries.start
        outside = self.left >= 0 and keys.start < queries.stop - 1 - self.left
        hidden = None
        if later or outside:
            q = torch.arange(queries.start, queries.stop, device=device)[:, None]
            k = torch.arange(keys.start, keys.stop, device=device)
            hidden = k > q
            if outside:
                hidden |= k < q - self.left
            hidden = hidden[None, None]
        if self._chunk_start(queries.stop - 1) > keys.start:
            k = torch.arange(keys.start, keys.stop, device=device)
            if self.lengths:
                starts = torch.tensor([self._chunk_start(place) for place in range(queries.start, queries.stop)])
                starts = to_device(starts, device)
            else:
                starts = torch.arange(queries.start, queries.stop, device=device)
                starts = starts - starts % self.chunk
            earlier = k < starts[:, None]
            hidden = earlier[None, None] if hidden is None else hidden | earlier
        if self.documents is not None and self.documents.latest[queries.stop - 1] > keys.start:
            ids_BS = self.documents.ids_BS
            other = ids_BS[:, None, queries.start : queries.stop, None] != ids_BS[:, None, None, keys.start : keys.stop]
            hidden = other if hidden is None else hidden | other
        return hidden

    def keep(
        self, shape: torch.Size, queries: PositionRange, keys: PositionRange, device: torch.device
    ) -> Tensor | None:
        """Return the dropout factors of a tile, 0 or 1 / (1 - p); None without dropout."""
        if self.dropout_p == 0.0:
            return None
        # NOTE: one stream per tile; the tiles of a sequence start at different (query, key) places
        generator = torch.Generator(device).manual_seed(
            (self.seed + queries.start * 1_000_003 + keys.start) % (1 << 63)
        )
        keep = torch.rand(shape, generator=generator, device=device) >= self.dropout_p
        return keep.float() / (1.0 - self.dropout_p)


class BlockBackwardInputs(NamedTuple):
    """Inputs of every block's backward: grad and out [B, N, S, E], lse and delta = sum(grad * out) [B, N, S]."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor

    def of(self, rows: slice) -> "BlockBackwardInputs":
        """Return the inputs of a part of the queries."""
        return BlockBackwardInputs(*(x[:, :, rows] for x in self))


def attend(
    q_BNSD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    queries: PositionRange,
    keys: PositionRange,
    scale: float,
    block_mask: BlockMask,
    out_BNSE: Tensor,
    lse_BNS: Tensor,
) -> None:
    """Add the keys of one block to the running result, in place.

    q, k, v hold exactly the positions `queries` and `keys`. out, lse: fp32 or wider; before the first block 0 and -inf.
    """
    causal = block_mask.flash_causal(queries, keys)
    if causal is not None and flash_attention.can_run(q_BNSD, k_BGKD, v_BGKE):
        part, part_lse = flash_attention.flash_block(q_BNSD, k_BGKD, v_BGKE, scale, causal)
        merge_block(out_BNSE, lse_BNS, part, part_lse.unsqueeze(-1), torch.ones_like(part_lse).unsqueeze(-1))
        return
    for tile, seen in _tiles(queries, keys, block_mask, q_BNSD.device):
        rows, columns = tile.within(queries), seen.within(keys)
        scores = _scores(q_BNSD[:, :, rows], k_BGKD[:, :, columns], scale, block_mask, tile, seen)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top.masked_fill(top == float("-inf"), 0.0)).exp_()
        total = weights.sum(-1, keepdim=True)
        keep = block_mask.keep(weights.shape, tile, seen, weights.device)
        if keep is not None:
            weights = weights * keep
        part = _grouped(weights.to(v_BGKE.dtype), v_BGKE[:, :, columns])
        merge_block(out_BNSE[:, :, rows], lse_BNS[:, :, rows], part, top, total)


def merge_block(out: Tensor, lse: Tensor, part: Tensor, top: Tensor, total: Tensor) -> None:
    """Merge a block's result into the running one, in place.

    Args:
        part: sum of e^(score - top) v over the new keys.
        top: their maximum; -inf, with zeros for both sums, if all are hidden.
        total: sum of e^(score - top).
    """
    before = lse.unsqueeze(-1)
    after = torch.logaddexp(before, top + total.log())
    base = after.masked_fill(after == float("-inf"), 0.0)  # nothing seen yet: e^-inf = 0 below, not e^(inf - inf)
    out.mul_((before - base).exp()).add_(part * (top - base).exp())
    lse.copy_(after.squeeze(-1))


def attend_backward(
    q_BNSD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    queries: PositionRange,
    keys: PositionRange,
    scale: float,
    block_mask: BlockMask,
    final: BlockBackwardInputs,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add one block's gradients in place to `grads` of q, k and v, which are fp32 or wider."""
    grad_q, grad_k, grad_v = grads
    causal = block_mask.flash_causal(queries, keys)
    if causal is not None and flash_attention.can_run(q_BNSD, k_BGKD, v_BGKE):
        parts = flash_attention.flash_block_backward(
            final.grad, q_BNSD, k_BGKD, v_BGKE, final.out, final.lse, scale, causal
        )
        for total, part in zip(grads, parts):
            total += part
        return
    for tile, seen in _tiles(queries, keys, block_mask, q_BNSD.device):
        rows, columns = tile.within(queries), seen.within(keys)
        q, k, v, grad = q_BNSD[:, :, rows], k_BGKD[:, :, columns], v_BGKE[:, :, columns], final.grad[:, :, rows]
        lse = final.lse[:, :, rows, None]
        probs = _scores(q, k, scale, block_mask, tile, seen).sub_(lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
        grad_probs = _grouped(grad, v.transpose(2, 3)).to(probs.dtype)
        keep = block_mask.keep(probs.shape, tile, seen, probs.device)
        kept = probs if keep is None else probs * keep
        if keep is not None:
            grad_probs *= keep
        _add_transposed(grad_v[:, :, columns], kept.to(grad.dtype), grad)
        grad_scores = grad_probs.sub_(final.delta[:, :, rows, None]).mul_(probs).mul_(scale).to(q.dtype)
        grad_q[:, :, rows] += _grouped(grad_scores, k)
        _add_transposed(grad_k[:, :, columns], grad_scores, q)


def _tiles(
    queries: PositionRange, keys: PositionRange, block_mask: BlockMask, device: torch.device
) -> Iterator[tuple[PositionRange, PositionRange]]:
    size = QUERY_TILE_CUDA if device.type == "cuda" else QUERY_TILE
    for start in range(queries.start, queries.stop, size):
        tile = PositionRange(start, min(start + size, queries.stop))
        seen = block_mask.clip(tile, keys)
        if seen is not None:
            yield tile, seen


def _scores(
    q: Tensor, k: Tensor, scale: float, block_mask: BlockMask, queries: PositionRange, keys: PositionRange
) -> Tensor:
    """Return scaled scores [B, N, S, K], fp32 or wider, with -inf where hidden."""
    scores = _grouped(q, k.transpose(2, 3))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    hidden = block_mask.hidden(queries, keys, q.device)
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))


def _grouped(x_BNSD: Tensor, y_BGDK: Tensor) -> Tensor:
    """Return x @ y, [B, N, S, K], with the queries of a group stacked into one matrix."""
    batch, heads, rows, width = x_BNSD.shape
    groups = y_BGDK.shape[1]
    x = x_BNSD.reshape(batch * groups, heads // groups * rows, width)
    return torch.bmm(x, y_BGDK.flatten(0, 1)).view(batch, heads, rows, -1)


def _add_transposed(total_BGKD: Tensor, x_BNSK: Tensor, y_BNSD: Tensor) -> None:
    """Add x^T @ y to total, summed over the queries of a group."""
    batch, heads, rows, keys = x_BNSK.shape
    groups = total_BGKD.shape[1]
    x = x_BNSK.reshape(batch * groups, heads // groups * rows, keys)
    y = y_BNSD.reshape(batch * groups, heads // groups * rows, -1)
    total_BGKD += torch.bmm(x.transpose(1, 2), y).view(batch, groups, keys, -1)
