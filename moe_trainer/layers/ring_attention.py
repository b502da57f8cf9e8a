"""Attention over a sequence cut (zigzag) over the ranks of a group: every rank keeps its queries, keys come to it.

Two ways. In the ring, each rank's keys and values travel from neighbour to neighbour; while a rank computes with those it
has, the next ones are on their way. In backward they travel again, and the gradient of each rank's keys and values
travels one hop behind them, summed at every stop, until it is home. Gathered, every rank receives all keys and values at
once and reduce-scatters their gradient; simpler, and keys and values of the whole sequence (no scores) are in memory.

Both save the inputs, the output and its log-sum-exp, and recompute everything else from blocks (ops/block_attention.py).
Blocks above the causal diagonal or outside the window are not computed; with the zigzag cut every rank is left with the
same amount of work. Sums over blocks and the travelling gradient are fp32 (or wider), whatever the inputs are.

A group of one rank computes the whole sequence: that is how packed documents are attended to without a mask, and attention sinks
(--softmax-type): a sink is where the running result begins, the log-sum-exp of one key whose value is zero.

Shapes: S local positions, B sequences, N query heads, G key-value heads, D key width, E value width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_trainer.ops.block_attention import Final, Rule, Run, attend, attend_backward
from moe_trainer.parallel import collectives
from moe_trainer.parallel.mappings import gather_rows, reduce_scatter_rows
from moe_trainer.parallel.p2p import Receive, Send, exchange
from moe_trainer.parallel.sequence import chunks_of, natural_order, rank_order
from moe_trainer.parallel.state import Group


def ring_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, rule: Rule, group: Group,
                   sink_N: Tensor | None = None) -> Tensor:
    """softmax(scale * q k^T) v of this rank's queries with the keys of all ranks that `rule` lets them see.

    sink_N: the score of one key more for every head, whose value is zero.
    Returns: [S, B, N * E].
    Communication: S * B * G * (D + E) elements to the next member, size - 1 times forward and backward, and in backward
    as many fp32 elements size times.
    """
    return _RingAttention.apply(q_SBND, k_SBGD, v_SBGE, sink_N, scale, rule, group)


def gathered_attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, rule: Rule, group: Group,
                       sink_N: Tensor | None = None) -> Tensor:
    """The same result with keys and values all-gathered (again in backward) and their fp32 gradients reduce-scattered."""
    return _GatheredAttention.apply(q_SBND, k_SBGD, v_SBGE, sink_N, scale, rule, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, scale, rule, group):
        q, out, lse = _begin(q_SBND, v_SBGE, sink_N)
        mine = runs_of(group.rank, group.size, q.shape[2])
        pair = _KeysValues.of(k_SBGD, v_SBGE)
        for source, flat in _pass_round(pair.flat, group):
            k, v = pair.unpack(flat)
            _attend(_blocks(mine, runs_of(source, group.size, q.shape[2]), rule), q, k, v, scale, rule, out, lse)
        return _end(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, out, lse, scale, rule, group)

    @staticmethod
    def backward(ctx, grad_SBH):
        (q_SBND, k_SBGD, v_SBGE, sink_N, out_SBH, lse), (scale, rule, group) = _kept(ctx)
        q, final, grad_q = _begin_backward(q_SBND, grad_SBH, out_SBH, lse)
        mine = runs_of(group.rank, group.size, q.shape[2])
        pair = _KeysValues.of(k_SBGD, v_SBGE)
        arriving, work = None, None
        for source, flat in _pass_round(pair.flat, group):
            k, v = pair.unpack(flat)
            sums = torch.zeros_like(flat, dtype=grad_q.dtype)
            blocks = _blocks(mine, runs_of(source, group.size, q.shape[2]), rule)
            _attend_backward(blocks, q, k, v, scale, rule, final, (grad_q, *pair.unpack(sums)))
            if work is not None:
                work.wait()
                sums += arriving
            leaving, arriving, work = sums, *_send_on(sums, group)  # noqa: F841 - leaving lives until it is sent
        work.wait()
        grad_k, grad_v = pair.unpack(arriving)
        return (_like(grad_q, q_SBND), _like(grad_k, k_SBGD), _like(grad_v, v_SBGE), _sink_grad(sink_N, final),
                None, None, None)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, scale, rule, group):
        q, out, lse = _begin(q_SBND, v_SBGE, sink_N)
        k, v = _gather(k_SBGD, group), _gather(v_SBGE, group)
        _attend(_blocks_of_all(group, q.shape[2], rule), q, k, v, scale, rule, out, lse)
        return _end(ctx, q_SBND, k_SBGD, v_SBGE, sink_N, out, lse, scale, rule, group)

    @staticmethod
    def backward(ctx, grad_SBH):
        (q_SBND, k_SBGD, v_SBGE, sink_N, out_SBH, lse), (scale, rule, group) = _kept(ctx)
        q, final, grad_q = _begin_backward(q_SBND, grad_SBH, out_SBH, lse)
        k, v = _gather(k_SBGD, group), _gather(v_SBGE, group)
        grad_k, grad_v = torch.zeros_like(k, dtype=grad_q.dtype), torch.zeros_like(v, dtype=grad_q.dtype)
        _attend_backward(_blocks_of_all(group, q.shape[2], rule), q, k, v, scale, rule, final, (grad_q, grad_k, grad_v))
        return (_like(grad_q, q_SBND), _scatter(grad_k, group).to(k_SBGD.dtype), _scatter(grad_v, group).to(v_SBGE.dtype),
                _sink_grad(sink_N, final), None, None, None)


_Block = tuple[Run, slice, Run, slice]
"""Queries and their rows in my tensors, keys and their rows in theirs."""


def _attend(blocks: Iterable[_Block], q: Tensor, k: Tensor, v: Tensor, scale: float, rule: Rule, out: Tensor, lse: Tensor) -> None:
    """Merge the blocks into the running output and its log-sum-exp."""
    for queries, rows, keys, columns in blocks:
        attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], queries, keys, scale, rule, out[:, :, rows], lse[:, :, rows])


def _attend_backward(blocks: Iterable[_Block], q: Tensor, k: Tensor, v: Tensor, scale: float, rule: Rule, final: Final,
                     grads: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add the blocks' shares to the gradients of q, k and v."""
    grad_q, grad_k, grad_v = grads
    for queries, rows, keys, columns in blocks:
        attend_backward(q[:, :, rows], k[:, :, columns], v[:, :, columns], queries, keys, scale, rule, final.of(rows),
                        (grad_q[:, :, rows], grad_k[:, :, columns], grad_v[:, :, columns]))


def runs_of(rank: int, size: int, length: int) -> tuple[Run, ...]:
    """The positions that member `rank` holds, in its order; length: its number of positions."""
    if size == 1:
        return (Run(0, length),)
    half = length // 2
    return tuple(Run(number * half, (number + 1) * half) for number in chunks_of(rank, size))


def _blocks(mine: tuple[Run, ...], theirs: tuple[Run, ...], rule: Rule) -> Iterator[_Block]:
    """Blocks with something to see."""
    for queries, rows in _parts(mine, rule):
        first_column = 0
        for run in theirs:
            keys = rule.clip(queries, run)
            # keys before the queries apart from those among them: the first block needs no mask, the second is square
            border = 0 if keys is None else min(max(queries.start, keys.start), keys.stop)
            for part in () if keys is None else (Run(keys.start, border), Run(border, keys.stop)):
                if part.size:
                    columns = part.within(run)
                    yield queries, rows, part, slice(first_column + columns.start, first_column + columns.stop)
            first_column += run.size


def _parts(mine: tuple[Run, ...], rule: Rule) -> Iterator[tuple[Run, slice]]:
    """Queries that are looked at together, with their rows in my tensors."""
    row = 0
    for run in mine:
        for queries in rule.split(run):
            yield queries, slice(row, row + queries.size)
            row += queries.size


def _blocks_of_all(group: Group, length: int, rule: Rule) -> Iterator[_Block]:
    return _blocks(runs_of(group.rank, group.size, length), (Run(0, length * group.size),), rule)


def _begin(q_SBND: Tensor, v_SBGE: Tensor, sink_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q with heads first, and the running output and log-sum-exp of nothing, or of the sink, whose value is zero."""
    q = q_SBND.permute(1, 2, 0, 3)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v_SBGE.shape[3], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    return q, out, lse if sink_N is None else lse.copy_(sink_N[:, None])


def _end(ctx, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, sink_N: Tensor | None, out: Tensor, lse: Tensor, scale: float,
         rule: Rule, group: Group) -> Tensor:
    out_SBH = out.permute(2, 0, 1, 3).to(q_SBND.dtype).flatten(2)
    selection = rule.selection
    # the bits too are saved as tensors are: where activations are computed again, they are
    ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, sink_N, out_SBH, lse, None if selection is None else selection.bits_BSC)
    ctx.how = scale, rule if selection is None else replace(rule, selection=replace(selection, bits_BSC=None)), group
    return out_SBH


def _kept(ctx) -> tuple[tuple[Tensor | None, ...], tuple[float, Rule, Group]]:
    """What `_end` kept: the tensors and the rest."""
    *tensors, bits = ctx.saved_tensors
    scale, rule, group = ctx.how
    if bits is not None:
        rule = replace(rule, selection=replace(rule.selection, bits_BSC=bits))
    return tuple(tensors), (scale, rule, group)


def _begin_backward(q_SBND: Tensor, grad_SBH: Tensor, out_SBH: Tensor, lse_BNS: Tensor) -> tuple[Tensor, Final, Tensor]:
    """q with heads first, what its blocks need to know, and a zero gradient of q."""
    q = q_SBND.permute(1, 2, 0, 3)
    wide = torch.promote_types(q.dtype, torch.float32)
    grad, out = (x.unflatten(2, (q.shape[1], -1)).permute(1, 2, 0, 3) for x in (grad_SBH.contiguous(), out_SBH))
    delta = (grad.to(wide) * out).sum(-1)
    return q, Final(grad, out, lse_BNS, delta), torch.zeros(q.shape, dtype=wide, device=q.device)


def _sink_grad(sink_N: Tensor | None, final: Final) -> Tensor | None:
    """Of the sinks: their probability of every query, times what it takes from the keys, over this rank's queries."""
    if sink_N is None:
        return None
    return -((sink_N[:, None] - final.lse).exp() * final.delta).sum((0, 2)).to(sink_N.dtype)


def _like(grad_BNSD: Tensor, x_SBND: Tensor) -> Tensor:
    return grad_BNSD.permute(2, 0, 1, 3).to(x_SBND.dtype)


class _KeysValues:
    """Keys and values of one rank in one flat tensor, so that they travel in one message; heads first inside."""

    def __init__(self, flat: Tensor, k_shape: torch.Size, v_shape: torch.Size):
        self.flat = flat
        self._shapes = k_shape, v_shape

    @staticmethod
    def of(k_SBGD: Tensor, v_SBGE: Tensor) -> "_KeysValues":
        k, v = k_SBGD.permute(1, 2, 0, 3), v_SBGE.permute(1, 2, 0, 3)
        return _KeysValues(torch.cat([k.flatten(), v.flatten()]), k.shape, v.shape)

    def unpack(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Views of another rank's keys and values, or of their gradients."""
        k_shape, v_shape = self._shapes
        k, v = flat.split([k_shape.numel(), v_shape.numel()])
        return k.view(k_shape), v.view(v_shape)


def _pass_round(flat: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (whose, tensor) for every member, own first; the next one arrives while the caller works."""
    for step in range(group.size):
        last = step == group.size - 1
        following, work = (None, None) if last else _send_on(flat, group)
        yield (group.rank - step) % group.size, flat
        if not last:
            work.wait()
            flat = following


def _send_on(flat: Tensor, group: Group) -> tuple[Tensor, object]:
    """Start sending to the next member; returns what will arrive from the one before, and the work."""
    if group.size == 1:
        return flat, collectives.Done()
    arriving = torch.empty_like(flat)
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    return arriving, exchange([Receive(arriving, before), Send(flat, after)], group)


def _gather(x_SBGD: Tensor, group: Group) -> Tensor:
    """Everybody's keys or values in the order of the sequence, heads first: [B, G, S * size, D]."""
    parts, _ = gather_rows(x_SBGD, group)
    return natural_order(parts, group.size).permute(1, 2, 0, 3).contiguous()


def _scatter(grad_BGSD: Tensor, group: Group) -> Tensor:
    """Sum a gradient over the members and keep the rows of this one: [S, B, G, D]."""
    return reduce_scatter_rows(rank_order(grad_BGSD.permute(2, 0, 1, 3), group.size), group)[0]
