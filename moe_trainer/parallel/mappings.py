"""Differentiable changes of layout over a tensor-parallel group.

An activation is in one of these states over the ranks of a group:

* replicated: every rank holds the same tensor;
* partial: the tensor is the sum over the ranks of what they hold;
* cut by rows (dimension 0; sequence parallelism) or by columns (the last dimension): rank r holds the r-th equal part.

Each mapping goes from one state to another, and its backward takes the gradient the other way. The gradient of a replicated
tensor is either replicated too (its consumers do the same everywhere) or partial (each rank's consumer is its own part of
the model): this is what tells `gather_rows_from_group` from `gather_rows_replicated`.

| mapping | forward | gradient that comes in | backward |
|---|---|---|---|
| copy_to_group | replicated, as it is | partial | all-reduce |
| reduce_from_group | partial -> replicated: all-reduce | replicated | as it is |
| gather_rows_from_group | rows -> replicated: all-gather | partial | reduce-scatter |
| gather_rows_replicated | rows -> replicated: all-gather | replicated | this rank's rows |
| scatter_rows_to_group | replicated -> rows: this rank's | rows | all-gather |
| reduce_scatter_rows_to_group | partial -> rows: reduce-scatter | rows | all-gather |
| gather_last_dim | columns -> replicated: all-gather | partial | reduce-scatter |
| gather_last_dim_replicated | columns -> replicated: all-gather | replicated | this rank's columns |
| columns_to_rows | columns -> rows: all-to-all | rows | all-to-all |

With a group of one rank all of them return their input. Rows must divide evenly; uneven ones are a dispatcher's business
(collectives.all_gather_rows). Every rank of the group must call them alike, in forward and so in backward.
"""

import torch
from torch import Tensor

from moe_trainer.parallel.collectives import all_gather_flat, all_reduce, all_to_all_flat, reduce_scatter_flat
from moe_trainer.parallel.state import Group


def gather_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, object]:
    """All-gather along dimension 0, without autograd. Returns: [size * rows, ...] and, with async_op, the work to wait for."""
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    return out, all_gather_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def reduce_scatter_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, object]:
    """Sum over the ranks and keep this one's rows, without autograd. Returns: as gather_rows; keep x until then."""
    out = x.new_empty(_even_part(x, group), *x.shape[1:])
    return out, reduce_scatter_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def _even_part(x: Tensor, group: Group) -> int:
    """Rows of each rank. Raises: ValueError when they do not divide evenly."""
    if x.shape[0] % group.size:
        raise ValueError(f"{x.shape[0]} rows cannot be dealt out evenly to the {group.size} ranks of {group.name}")
    return x.shape[0] // group.size


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's part of dimension 0, a view."""
    size = _even_part(x, group)
    return x.narrow(0, group.rank * size, size)


def _columns_first(x: Tensor, group: Group) -> Tensor:
    """[..., size * C] -> contiguous [size, ..., C]."""
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
            return own_rows(grad, ctx.group), None, None
        return reduce_scatter_rows(grad, ctx.group)[0], None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_rows(x, group).clone()  # not a view: the whole tensor may be freed

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
        own = torch.empty_like(parts[0])
        reduce_scatter_flat(own.view(-1), parts.view(-1), ctx.group)
        return own, None, None


class _ColumnsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty(group.size, _even_part(x, group), *x.shape[1:])
        all_to_all_flat(parts.view(-1), x.contiguous().view(-1), group)
        return parts.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        parts = _columns_first(grad, ctx.group)
        out = torch.empty_like(parts)
        all_to_all_flat(out.view(-1), parts.view(-1), ctx.group)
        return out.flatten(0, 1), None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Use a replicated x in each rank's own part of the model. Backward: all-reduce."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum partial results. Backward: identity."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group)


def gather_rows_from_group(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's rows for consumers that are each rank's own. Backward: reduce-scatter."""
    return x if group.size == 1 else _GatherRows.apply(x, group, False)


def gather_rows_replicated(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's rows for a consumer that is itself replicated. Backward: this rank's rows."""
    return x if group.size == 1 else _GatherRows.apply(x, group, True)


def scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of a replicated x. Backward: all-gather. Raises: ValueError when the rows do not divide evenly."""
    return x if group.size == 1 else _ScatterRows.apply(x, group)


def reduce_scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    """Sum partial results and keep this rank's rows. Backward: all-gather. Raises: as scatter_rows_to_group."""
    return x if group.size == 1 else _ReduceScatterRows.apply(x, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's columns for consumers that are each rank's own. Backward: reduce-scatter."""
    return x if group.size == 1 else _GatherLastDim.apply(x, group, False)


def gather_last_dim_replicated(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's columns for a consumer that is itself replicated. Backward: this rank's columns."""
    return x if group.size == 1 else _GatherLastDim.apply(x, group, True)


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """From a cut of the last dimension to one of dimension 0: [S, ..., C] -> [S / size, ..., C * size]. Backward: the way back.

    Raises: as scatter_rows_to_group.
    """
    return x if group.size == 1 else _ColumnsToRows.apply(x, group)
