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

from moe_trainer.parallel.collectives import (
    CollectiveWork,
    all_gather_flat,
    all_reduce,
    all_to_all_flat,
    apply_mapping,
    reduce_scatter_flat,
)
from moe_trainer.parallel.state import Group


def gather_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, CollectiveWork]:
    """All-gather along dimension 0, without autograd; also return the work object with async_op."""
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    return out, all_gather_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def reduce_scatter_rows(x: Tensor, group: Group, async_op: bool = False) -> tuple[Tensor, CollectiveWork]:
    """Reduce-scatter along dimension 0, without autograd; returns as gather_rows."""
    out = x.new_empty(rows_per_rank(x, group), *x.shape[1:])
    return out, reduce_scatter_flat(out.view(-1), x.contiguous().view(-1), group, async_op=async_op)


def rows_per_rank(x: Tensor, group: Group) -> int:
    """Return the size of a rank's even shard along dimension 0."""
    if x.shape[0] % group.size:
        raise ValueError(f"{x.shape[0]} rows do not divide evenly over the {group.size} ranks of {group.name}")
    return x.shape[0] // group.size


def local_rows(x: Tensor, group: Group) -> Tensor:
    """Return a view of this rank's shard along dimension 0."""
    size = rows_per_rank(x, group)
    return x.narrow(0, group.rank * size, size)


def _alias(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    """All-reduce a copy: other consumers may read the same tensor."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def _gather_rows(x: Tensor, group: Group) -> Tensor:
    return gather_rows(x, group)[0]


def _reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    return reduce_scatter_rows(x, group)[0]


def _copy_local_rows(x: Tensor, group: Group) -> Tensor:
    return local_rows(x, group).clone()  # a view would keep the full tensor alive


def _columns_first(x: Tensor, group: Group) -> Tensor:
    """Change [..., size * C] to contiguous [size, ..., C]."""
    return x.view(*x.shape[:-1], group.size, -1).movedim(-2, 0).contiguous()


def _gather_columns(x: Tensor, group: Group) -> Tensor:
    parts = x.new_empty(group.size, *x.shape)
    all_gather_flat(parts.view(-1), x.contiguous().view(-1), group)
    return parts.movedim(0, -2).flatten(-2)


def _local_columns(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, dim=-1)[group.rank]


def _reduce_scatter_columns(x: Tensor, group: Group) -> Tensor:
    parts = _columns_first(x, group)
    shard = torch.empty_like(parts[0])
    reduce_scatter_flat(shard.view(-1), parts.view(-1), group)
    return shard


def _exchange_columns_for_rows(x: Tensor, group: Group) -> Tensor:
    parts = x.new_empty(group.size, rows_per_rank(x, group), *x.shape[1:])
    all_to_all_flat(parts.view(-1), x.contiguous().view(-1), group)
    return parts.movedim(0, -2).flatten(-2)


def _exchange_rows_for_columns(x: Tensor, group: Group) -> Tensor:
    parts = _columns_first(x, group)
    out = torch.empty_like(parts)
    all_to_all_flat(out.view(-1), parts.view(-1), group)
    return out.flatten(0, 1)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_alias, _sum, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_sum, _alias, x, group)


def gather_rows_from_group(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_gather_rows, _reduce_scatter_rows, x, group)


def gather_rows_replicated(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_gather_rows, local_rows, x, group)


def scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_copy_local_rows, _gather_rows, x, group)


def reduce_scatter_rows_to_group(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_reduce_scatter_rows, _gather_rows, x, group)


def gather_last_dim(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_gather_columns, _reduce_scatter_columns, x, group)


def gather_last_dim_replicated(x: Tensor, group: Group) -> Tensor:
    return apply_mapping(_gather_columns, _local_columns, x, group)


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """Change [S, ..., C] to [S / size, ..., C * size]."""
    return apply_mapping(_exchange_columns_for_rows, _exchange_rows_for_columns, x, group)
