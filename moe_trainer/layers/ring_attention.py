"""Attention over a zigzag-sharded sequence: every rank keeps its queries, and keys come to it.

Ring: keys and values are sent from rank to rank while the rank computes with those it has. In backward they circulate
again, followed by their gradient, which every rank adds to. Gathered: every rank all-gathers keys and values and
reduce-scatters their gradient. Both save inputs, output and log-sum-exp, and recompute the rest block by block
(ops/block_attention.py), skipping blocks above the diagonal or outside the window; the ring over packed sequences on
CUDA has one kernel for each rank's keys (packed_ring.py). Sums over blocks and the circulating gradient are fp32 or
wider.

A group of one rank serves packed documents and attention sinks (--softmax-type): a sink is the initial log-sum-exp.
Shapes: S local positions, B sequences, N query heads, G key-value heads, D key width, E value width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_trainer.layers.packed_ring import PackedRing
from moe_trainer.ops.block_attention import (
    BlockBackwardInputs,
    BlockMask,
    PositionRange,
    Selection,
    attend,
    attend_backward,
)
from moe_trainer.parallel import collectives
from moe_trainer.parallel.mappings import gather_rows, reduce_scatter_rows
from moe_trainer.parallel.p2p import Receive, Send, exchange
from moe_trainer.parallel.sequence import sequential_to_zigzag, zigzag_ranges, zigzag_to_sequential
from moe_trainer.parallel.state import Group


def ring_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    scale: float,
    block_mask: BlockMask,
    group: Group,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * q k^T) v of the local queries with the keys of all ranks, around a ring.

    Args:
        block_mask: which keys a query sees.
        sink_N: the score of an extra key per head, whose value is zero.

    Returns:
        [S, B, N * E].

    Communication: S * B * G * (D + E) elements to the next rank, size - 1 times forward and backward, and in backward
    as many fp32 elements size times.
    """
    return _RingAttention.apply(q_SBND, k_SBGD, v_SBGE, sink_N, scale, block_mask, group)


def gathered_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    scale: float,
    block_mask: BlockMask,
    group: Group,
    sink_N: Tensor | None = None,
) -> Tensor:
    """Compute the same with all-gathered keys and values (again in backward) and reduce-scattered gradients."""
    return _GatheredAttention.apply(q_SBND, k_SBGD, v_SBGE, sink_N, scale, block_mask, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, scale, block_mask, group):
        q, out, lse = _begin(q_SBND, v_SBGE, sink_N)
        mine = position_ranges(group.rank, group.size, q.shape[2], block_mask.lengths)
        pair = _KeysValues.of(k_SBGD, v_SBGE)
        packed = PackedRing.of(q_SBND, v_SBGE, block_mask, scale, group.rank, group.size)
        for source, flat in _pass_round(pair.flat, group):
            k, v = pair.unpack(flat)
            if packed is not None:
                packed.attend(source, q, k, v, out, lse)
                continue
            _attend(
                _blocks(mine, position_ranges(source, group.size, q.shape[2], block_mask.lengths), block_mask),
                q,
                k,
                v,
                scale,
                block_mask,
                out,
                lse,
            )
        return _end(ctx, _Inputs(q_SBND, k_SBGD, v_SBGE, sink_N), out, lse, scale, block_mask, group)

    @staticmethod
    def backward(ctx, grad_SBH):
        (q_SBND, k_SBGD, v_SBGE, sink_N), (out_SBH, lse), (scale, block_mask, group) = _kept(ctx)
        q, final, grad_q = _begin_backward(q_SBND, grad_SBH, out_SBH, lse)
        mine = position_ranges(group.rank, group.size, q.shape[2], block_mask.lengths)
        pair = _KeysValues.of(k_SBGD, v_SBGE)
        packed = PackedRing.of(q_SBND, v_SBGE, block_mask, scale, group.rank, group.size)
        arriving, work = pair.flat, collectives.CompletedWork()  # until the first message
        for step, (source, flat) in enumerate(_pass_round(pair.flat, group)):
            k, v = pair.unpack(flat)
            sums = torch.zeros_like(flat, dtype=grad_q.dtype)
            grads = grad_q, *pair.unpack(sums)
            if packed is not None:
                packed.attend_backward(source, q, k, v, final, grads)
            else:
                theirs = position_ranges(source, group.size, q.shape[2], block_mask.lengths)
                blocks = _blocks(mine, theirs, block_mask)
                _attend_backward(blocks, q, k, v, scale, block_mask, final, grads)
            if step:
                work.wait()
                sums += arriving
            leaving, arriving, work = sums, *_send_on(sums, group)  # noqa: F841 - leaving lives until it is sent
        work.wait()
        grad_k, grad_v = pair.unpack(arriving)
        return (
            _like(grad_q, q_SBND),
            _like(grad_k, k_SBGD),
            _like(grad_v, v_SBGE),
            _sink_grad(sink_N, final),
            None,
            None,
            None,
        )


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, scale, block_mask, group):
        q, out, lse = _begin(q_SBND, v_SBGE, sink_N)
        k, v = _gather(k_SBGD, group, block_mask), _gather(v_SBGE, group, block_mask)
        _attend(_blocks_of_all(group, q.shape[2], block_mask), q, k, v, scale, block_mask, out, lse)
        return _end(ctx, _Inputs(q_SBND, k_SBGD, v_SBGE, sink_N), out, lse, scale, block_mask, group)

    @staticmethod
    def backward(ctx, grad_SBH):
        (q_SBND, k_SBGD, v_SBGE, sink_N), (out_SBH, lse), (scale, block_mask, group) = _kept(ctx)
        q, final, grad_q = _begin_backward(q_SBND, grad_SBH, out_SBH, lse)
        k, v = _gather(k_SBGD, group, block_mask), _gather(v_SBGE, group, block_mask)
        grad_k, grad_v = torch.zeros_like(k, dtype=grad_q.dtype), torch.zeros_like(v, dtype=grad_q.dtype)
        _attend_backward(
            _blocks_of_all(group, q.shape[2], block_mask), q, k, v, scale, block_mask, final, (grad_q, grad_k, grad_v)
        )
        return (
            _like(grad_q, q_SBND),
            _scatter(grad_k, group, block_mask).to(k_SBGD.dtype),
            _scatter(grad_v, group, block_mask).to(v_SBGE.dtype),
            _sink_grad(sink_N, final),
            None,
            None,
            None,
        )


class _Inputs(NamedTuple):
    """The tensors that have gradients."""

    q_SBND: Tensor
    k_SBGD: Tensor
    v_SBGE: Tensor
    sink_N: Tensor | None


_Block = tuple[PositionRange, slice, PositionRange, slice]
"""Queries and their rows in my tensors, keys and their rows in theirs."""


def _attend(
    blocks: Iterable[_Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    block_mask: BlockMask,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge the blocks into the running output and its log-sum-exp."""
    for queries, rows, keys, columns in blocks:
        attend(
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            queries,
            keys,
            scale,
            block_mask,
            out[:, :, rows],
            lse[:, :, rows],
        )


def _attend_backward(
    blocks: Iterable[_Block],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    block_mask: BlockMask,
    final: BlockBackwardInputs,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the blocks' contributions to the gradients of q, k and v."""
    grad_q, grad_k, grad_v = grads
    for queries, rows, keys, columns in blocks:
        attend_backward(
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            queries,
            keys,
            scale,
            block_mask,
            final.of(rows),
            (grad_q[:, :, rows], grad_k[:, :, columns], grad_v[:, :, columns]),
        )


def position_ranges(rank: int, size: int, length: int, lengths: Sequence[int] = ()) -> tuple[PositionRange, ...]:
    """Return the positions of a rank, in its order.

    Args:
        length: number of local positions.
        lengths: see zigzag_ranges.
    """
    return tuple(PositionRange(*ends) for ends in zigzag_ranges(rank, size, length * size, lengths))


def _blocks(
    mine: tuple[PositionRange, ...], theirs: tuple[PositionRange, ...], block_mask: BlockMask
) -> Iterator[_Block]:
    """Yield blocks in which a query sees a key."""
    if len(block_mask.lengths) > 1 and len(mine) == len(theirs) > 1:
        yield from _blocks_by_sequence(mine, theirs, block_mask)
    else:
        yield from _blocks_of_runs(mine, theirs, block_mask)


def _blocks_by_sequence(
    mine: tuple[PositionRange, ...], theirs: tuple[PositionRange, ...], block_mask: BlockMask
) -> Iterator[_Block]:
    """Yield the blocks of packed sequences, of each of which both ranks have two runs."""
    row = column = 0
    for first in range(0, len(mine), 2):
        of_mine, of_theirs = mine[first : first + 2], theirs[first : first + 2]
        yield from _blocks_of_runs(of_mine, of_theirs, block_mask, row, column)
        row += sum(run.size for run in of_mine)
        column += sum(run.size for run in of_theirs)


def _blocks_of_runs(
    mine: tuple[PositionRange, ...],
    theirs: tuple[PositionRange, ...],
    block_mask: BlockMask,
    row: int = 0,
    column: int = 0,
) -> Iterator[_Block]:
    """Yield the blocks of runs that begin at a row of my tensors and a column of theirs."""
    for queries, rows in _parts(mine, block_mask, row):
        first_column = column
        for run in theirs:
            keys = block_mask.clip(queries, run)
            # keys before the queries apart from those among them: the first block needs no mask, the second is square
            border = 0 if keys is None else min(max(queries.start, keys.start), keys.stop)
            for part in () if keys is None else (PositionRange(keys.start, border), PositionRange(border, keys.stop)):
                if part.size:
                    columns = part.within(run)
                    yield queries, rows, part, slice(first_column + columns.start, first_column + columns.stop)
            first_column += run.size


def _parts(mine: tuple[PositionRange, ...], block_mask: BlockMask, row: int) -> Iterator[tuple[PositionRange, slice]]:
    """Yield queries that are processed together, with their rows in the local tensors, from `row` on."""
    for run in mine:
        for queries in block_mask.split(run):
            yield queries, slice(row, row + queries.size)
            row += queries.size


def _blocks_of_all(group: Group, length: int, block_mask: BlockMask) -> Iterator[_Block]:
    return _blocks(
        position_ranges(group.rank, group.size, length, block_mask.lengths),
        (PositionRange(0, length * group.size),),
        block_mask,
    )


def _begin(q_SBND: Tensor, v_SBGE: Tensor, sink_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q with heads first, and the initial output and log-sum-exp: of nothing, or of the sink."""
    q = q_SBND.permute(1, 2, 0, 3)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v_SBGE.shape[3], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    return q, out, lse if sink_N is None else lse.copy_(sink_N[:, None])


def _end(ctx, inputs: _Inputs, out: Tensor, lse: Tensor, scale: float, block_mask: BlockMask, group: Group) -> Tensor:
    out_SBH = out.permute(2, 0, 1, 3).to(inputs.q_SBND.dtype).flatten(2)
    selection = block_mask.selection
    # the bits too are saved as tensors are: where activations are computed again, they are
    ctx.save_for_backward(*inputs, out_SBH, lse, None if selection is None else selection.bits_BSC)
    ctx.runs = () if selection is None else selection.runs
    ctx.how = scale, block_mask if selection is None else replace(block_mask, selection=None), group
    return out_SBH


def _kept(ctx) -> tuple[_Inputs, tuple[Tensor, Tensor], tuple[float, BlockMask, Group]]:
    """Return what `_end` saved."""
    *inputs, out_SBH, lse, bits = ctx.saved_tensors
    scale, block_mask, group = ctx.how
    if bits is not None:
        block_mask = replace(block_mask, selection=Selection(bits, ctx.runs))
    return _Inputs(*inputs), (out_SBH, lse), (scale, block_mask, group)


def _begin_backward(
    q_SBND: Tensor, grad_SBH: Tensor, out_SBH: Tensor, lse_BNS: Tensor
) -> tuple[Tensor, BlockBackwardInputs, Tensor]:
    """Return q with heads first, the inputs of its blocks' backward, and a zero gradient of q."""
    q = q_SBND.permute(1, 2, 0, 3)
    wide = torch.promote_types(q.dtype, torch.float32)
    grad, out = (x.unflatten(2, (q.shape[1], -1)).permute(1, 2, 0, 3) for x in (grad_SBH.contiguous(), out_SBH))
    delta = (grad.to(wide) * out).sum(-1)
    return q, BlockBackwardInputs(grad, out, lse_BNS, delta), torch.zeros(q.shape, dtype=wide, device=q.device)


def _sink_grad(sink_N: Tensor | None, final: BlockBackwardInputs) -> Tensor | None:
    """Return the gradient of the sinks, over the local queries."""
    if sink_N is None:
        return None
    return -((sink_N[:, None] - final.lse).exp() * final.delta).sum((0, 2)).to(sink_N.dtype)


def _like(grad_BNSD: Tensor, x_SBND: Tensor) -> Tensor:
    return grad_BNSD.permute(2, 0, 1, 3).to(x_SBND.dtype)


class _KeysValues:
    """Keys and values of one rank in one flat tensor, for a single message; heads first."""

    def __init__(self, flat: Tensor, k_shape: torch.Size, v_shape: torch.Size):
        self.flat = flat
        self._shapes = k_shape, v_shape

    @staticmethod
    def of(k_SBGD: Tensor, v_SBGE: Tensor) -> "_KeysValues":
        k, v = k_SBGD.permute(1, 2, 0, 3), v_SBGE.permute(1, 2, 0, 3)
        return _KeysValues(torch.cat([k.flatten(), v.flatten()]), k.shape, v.shape)

    def unpack(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of another rank's keys and values, or of their gradients."""
        k_shape, v_shape = self._shapes
        k, v = flat.split([k_shape.numel(), v_shape.numel()])
        return k.view(k_shape), v.view(v_shape)


def _pass_round(flat: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, tensor) for every rank, the local one first; the next arrives while the caller works."""
    for step in range(group.size - 1):
        following, work = _send_on(flat, group)
        yield (group.rank - step) % group.size, flat
        work.wait()
        flat = following
    yield (group.rank + 1) % group.size, flat


def _send_on(flat: Tensor, group: Group) -> tuple[Tensor, Any]:
    """Start sending to the next rank; return the tensor that will arrive from the previous one, and the work."""
    if group.size == 1:
        return flat, collectives.CompletedWork()
    arriving = torch.empty_like(flat)
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    return arriving, exchange([Receive(arriving, before), Send(flat, after)], group)


def _gather(x_SBGD: Tensor, group: Group, block_mask: BlockMask) -> Tensor:
    """Gather keys or values in sequence order, heads first: [B, G, S * size, D]."""
    parts, _ = gather_rows(x_SBGD, group)
    return zigzag_to_sequential(parts, group.size, block_mask.lengths).permute(1, 2, 0, 3).contiguous()


def _scatter(grad_BGSD: Tensor, group: Group, block_mask: BlockMask) -> Tensor:
    """Reduce-scatter a gradient to the local positions: [S, B, G, D]."""
    rows = sequential_to_zigzag(grad_BGSD.permute(2, 0, 1, 3), group.size, block_mask.lengths)
    return reduce_scatter_rows(rows, group)[0]
