"""Differentiable changes of the sharding of activations over a tensor-parallel group.

An activation is replicated, partial (the sum over the ranks is the value), or sharded evenly by rows (dimension 0;
sequence parallelism) or by columns (the last dimension). The gradient of a replicated tensor is replicated if its
consumer is, and partial if each rank's consumer is a shard of the model: the `_replicated` variants expect the former.

| mapping | forward | incoming gradient | backward |
|---|---|---|---|
| copy_to_group | replicated: identity | partial | all-reduce |
| reduce_from_group | partial -> replicated: all-reduce | replicated | identity |
| gather_rows_from_group | rows -> replicated: all-gather | partial | reduce-scatter |
| gather_rows_replicated | rows -> replicated: all-gather | replicated | this rank's rows |
| scatter_rows_to_group | replicated -> rows: this rank's | rows | all-gather |
| reduce_scatter_rows_to_group | partial -> rows: reduce-scatter | rows | all-gather |
| gather_last_dim | columns -> replicated: all-gather | partial | reduce-scatter |
| gather_last_dim_replicated | columns -> replicated: all-gather | replicated | this rank's columns |
| columns_to_rows | columns -> rows: all-to-all | rows | all-to-all |

In a group of one rank all of them return their input. Rows must divide evenly (ValueError); for uneven shards see
collectives.all_gather_rows.
"""

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import all_gather_flat, all_reduce, all_to_all_flat, reduce_scatter_flat
from moe_trainer.parallel.state import Group


def gather_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, object]:
    """All-gather along dimension 0, without autograd; also return the work object with async_op."""
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    return out, all_gather_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def reduce_scatter_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, object]:
    """Reduce-scatter along dimension 0, without autograd; returns as gather_rows."""
    out = x.new_empty(_rows_per_rank(x, group), *x.shape[1:])
    return out, reduce_scatter_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def _rows_per_rank(x: Tensor, group: Group) -> int:
    if x.shape[0] % group.size:
        raise ValueError(f"{x.shape[0]} rows do not divide evenly over the {group.size} ranks of {group.name}")
    return x.shape[0] // group.size


def local_rows(x: Tensor, group: Group) -> Tensor:
    """Return a view of this rank's shard along dimension 0."""
    size = _rows_per_rank(x, group)
    return x.narrow(0, group.rank * size, size)


def _columns_first(x: Tensor, group: Group) -> Tensor:
    """Change [..., size * C] to contiguous [size, ..., C]."""
    return x.view(*x.shape[:-1], group.size, -1).movedim(-2, 0).contiguous()


def _gather_columns(x: Tensor, group: Group) -> Tensor:
    parts = x.new_empty(group.size, *x.shape)
    all_gather_flat(parts.view(-1), x.contiguous().view(-1), group)
    return parts.movedim(0, -2).flatten(-2)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        # a copy: other consumers may read the same gradient tensor
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, replicated):
        ctx.group, ctx.replicated = group, replicated
        return gather_rows(x, group)[0]

    @staticmethod
    def backward(ctx, grad):
        if ctx.replicated:
            return local_rows(grad, ctx.group), None, None
        return reduce_scatter_rows(grad, ctx.group)[0], None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return local_rows(x, group).clone()  # a view would keep the full tensor alive

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, ctx.group)[0], None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_rows(x, group)[0]

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, ctx.group)[0], None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, replicated):
        ctx.group, ctx.replicated = group, replicated
        return _gather_columns(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.replicated:
            return grad.chunk(ctx.group.size, dim=-1)[ctx.group.rank], None, None
        parts = _columns_first(grad, ctx.group)
        shard = torch.empty_like(parts[0])
        reduce_scatter_flat(shard.view(-1), parts.view(-1), ctx.group)
        return shard, None, None


class _ColumnsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty(group.size, _rows_per_rank(x, group), *x.shape[1:])
        all_to_all_flat(parts.view(-1), x.contiguous().view(-1), group)
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        parts = _columns_first(grad, ctx.group)
        out = torch.empty_like(parts)
        all_to_all_flat(out.view(-1), parts.view(-1), ctx.group)
        return out.flatten(0, 1), None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)


def gather_rows_from_group(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _GatherRows.apply(x, group, False)


def gather_rows_replicated(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _GatherRows.apply(x, group, True)


def scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _ScatterRows.apply(x, group)


def reduce_scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _ReduceScatterRows.apply(x, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _GatherLastDim.apply(x, group, False)


def gather_last_dim_replicated(x: Tensor, group: Group) -> Tensor:
    return x if group.size == 1 else _GatherLastDim.apply(x, group, True)


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """Change [S, ..., C] to [S / size, ..., C * size]."""
    return x if group.size == 1 else _ColumnsToRows.apply(x, group)
