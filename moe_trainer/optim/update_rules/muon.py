"""Muon: matrices step along the orthogonal factor of their momentum.

The momentum m <- m + (1 - beta) (g - m), or with Nesterov g + beta (m - g), is orthogonalized (ops/newton_schulz.py),
scaled and subtracted from the decayed weights: W <- (1 - lr wd) W - lr scale O. param_groups.is_matrix selects the
matrices; other parameters follow --muon-scalar-optimizer. Every expert is a separate matrix, and so are the queries,
keys, values and gates of a fused linear_qkv (of all query groups together), unless --muon-no-split-qkv is given.

This rank owns full matrices (buckets.py), except that tensor parallelism may shard them. Its peers own the other shards
of the same matrices. --muon-tp-mode:

* duplicated: momenta are all-gathered, every rank orthogonalizes the full matrix and keeps its shard.
* distributed: the iteration sums over the ranks, one square matrix per step. Equal to duplicated up to rounding, but
  half of the matrices iterate over their larger dimension, because the sharded dimension decides.
* blockwise: each shard is treated as a separate matrix, without communication. The result depends on the mapping.

GEMMs run in bf16, or with --muon-fp32-matmul-prec high in fp32 (TF32 on devices that have it). Stacked experts use
batched GEMMs.

Source: arXiv 2502.16982; order of operations, splits, scales and modes of Megatron-LM and Emerging-Optimizers.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.mechanisms.optimizer_kinds.muon import MUON
from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.newton_schulz import orthogonalize
from moe_trainer.ops.transfer import to_device
from moe_trainer.optim.update_rules.rule import MatrixRule
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, get_param_info, part_lengths
from moe_trainer.parallel.state import Group, ParallelState


def compute_scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor of a matrix's orthogonal factor: --muon-scale-mode."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns) if mode == "shape_scaling" else rows / columns)


class Muon(MatrixRule):
    """The update rule of matrices."""

    declaration = MUON

    def __init__(self, settings: OptimizerArgs, ps: ParallelState):
        self._settings = settings
        self._tp, self._etp = ps.tp, ps.etp
        self._dtype = torch.float32 if settings.muon_fp32_matmul_prec == "high" else torch.bfloat16

    @torch.no_grad()
    def update(
        self,
        param: Parameter,
        main: Tensor,
        grad: Tensor,
        moments: dict[str, Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        settings, momentum = self._settings, moments["momentum_buffer"]
        momentum.lerp_(grad, 1.0 - settings.muon_momentum)
        direction = grad.lerp(momentum, settings.muon_momentum) if settings.muon_nesterov else momentum
        main.mul_(1.0 - lr * weight_decay)
        main.sub_(self._orthogonal(get_param_info(param), direction.view(param.shape)).reshape(-1), alpha=lr)

    def describe(self) -> dict[str, Any]:
        return {"momentum": self._settings.muon_momentum}

    def _orthogonal(self, info: ParamInfo, x: Tensor) -> Tensor:
        """Orthogonalize and scale this rank's shard of a matrix, or of every matrix of a stack."""
        if info.row_counts:
            matrices = x.split(info.row_counts)
            return torch.cat([self._scaled(x.unsqueeze(0), len(x), x.shape[1], None, None)[0] for x in matrices])
        stack = x if info.stacked else x.unsqueeze(0)
        mode = self._settings.muon_tp_mode if info.shard_count > 1 else "blockwise"
        group, dim = self._etp if info.kind == "expert" else self._tp, info.sharded_dim
        if mode == "duplicated" and dim is not None:
            direction = self._by_projection(info, _gather_full(stack, info, 1 + dim, group), 0)
            direction = _local_shard(direction, info, 1 + dim)
        else:
            first_row = info.shard_rank * stack.shape[1] if dim == 0 else 0
            direction = self._by_projection(info, stack, first_row, group if mode == "distributed" else None)
        return direction.view(x.shape)

    def _by_projection(self, info: ParamInfo, stack: Tensor, first_row: int, group: Group | None = None) -> Tensor:
        """Orthogonalize every projection of fused matrices separately.

        Args:
            first_row: index of the first row in the full matrix.
            group: ranks that hold the other shards of these matrices; None if there are none.
        """
        ranks = 1 if group is None else group.size
        rows = stack.shape[1] * (ranks if info.sharded_dim == 0 else 1)
        columns = stack.shape[2] * (ranks if info.sharded_dim == 1 else 1)
        sharded_dim = None if group is None else info.sharded_dim
        if not info.row_blocks or not self._settings.muon_split_qkv:
            return self._scaled(stack, rows, columns, sharded_dim, group)
        period = sum(info.row_blocks)
        # a shard need neither start nor end with a query group
        row_in_group = (torch.arange(stack.shape[1]) + first_row) % period
        result, start = torch.empty_like(stack), 0
        for count in info.row_blocks:
            is_member = (row_in_group >= start) & (row_in_group < start + count)
            index = to_device(is_member.nonzero().view(-1), stack.device)
            start += count
            full_rows = len(index) if group is None else rows // period * count
            if full_rows:
                result[:, index] = self._scaled(stack[:, index], full_rows, columns, sharded_dim, group)
        return result

    def _scaled(self, stack: Tensor, rows: int, columns: int, sharded_dim: int | None, group: Group | None) -> Tensor:
        """Orthogonalize and scale matrices; `rows` and `columns` are those of the full matrices."""
        settings = self._settings
        sum_over_ranks = None if group is None else lambda x: collectives.all_reduce(x.contiguous(), group)
        with _allow_tf32(stack.is_cuda and self._dtype == torch.float32):
            factor = orthogonalize(
                stack,
                settings.muon_coefficient_type,
                settings.muon_num_ns_steps,
                dtype=self._dtype,
                sharded_dim=sharded_dim,
                sum_over_ranks=sum_over_ranks,
            )
        return factor * (compute_scale(settings.muon_scale_mode, rows, columns) * settings.muon_extra_scale_factor)


def _gather_full(stack: Tensor, info: ParamInfo, dim: int, group: Group) -> Tensor:
    """All-gather matrices [n, rows, columns] from their shards along `dim`."""
    shards = stack.new_empty((group.size, *stack.shape))
    collectives.all_gather_flat(shards.view(-1), stack.contiguous().view(-1), group)
    parts = shards.split(part_lengths(info, stack.shape[dim]), dim + 1)
    # [ranks, .., part, ..] -> [.., ranks, part, ..]
    return torch.cat([part.movedim(0, dim).flatten(dim, dim + 1) for part in parts], dim)


def _local_shard(full: Tensor, info: ParamInfo, dim: int) -> Tensor:
    """Return this rank's shard along `dim` of full matrices [n, rows, columns]."""
    parts = full.split(part_lengths(info, full.shape[dim]), dim)
    return torch.cat([part.chunk(info.shard_count, dim)[info.shard_rank] for part in parts], dim)


@contextlib.contextmanager
def _allow_tf32(enabled: bool) -> Iterator[None]:
    previous = torch.get_float32_matmul_precision()
    if enabled:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if enabled:
            torch.set_float32_matmul_precision(previous)


def make_matrix_rule(settings: OptimizerArgs, ps: ParallelState) -> MatrixRule:
    return Muon(settings, ps)
