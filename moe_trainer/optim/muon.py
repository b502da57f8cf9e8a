"""Muon: matrices step along the orthogonal factor of their momentum.

The momentum m <- m + (1 - beta) (g - m), or with Nesterov g + beta (m - g) of it, is orthogonalised (ops/newton_schulz.py), scaled to the matrix and
taken off the decayed weights: W <- (1 - lr wd) W - lr scale O. Which parameters are matrices says param_groups.is_matrix; the
others follow --muon-scalar-optimizer. Every expert is a matrix of its own, and so are the queries, keys, values and gates of a fused
linear_qkv (of all query groups together), unless --muon-no-split-qkv is given.

This rank has all of the matrices that it updates but for the cut over tensor-parallel ranks (buckets.py deals out whole parameters), whose peers own the
same ones. What becomes of that cut says --muon-tp-mode:

* duplicated: momenta are gathered, and every rank orthogonalises the whole and keeps its part. One all-gather.
* distributed: sums over the ranks inside the iteration (one of a square matrix per step). The same numbers up to rounding. Half of the
  matrices iterate over their larger dimension: it is the cut that decides.
* blockwise: each rank's part is taken for a matrix of its own. Nothing travels; with more than one rank it is another algorithm, whose
  results depend on the mapping.

The products run in bf16 unless --muon-fp32-matmul-prec is high: then in fp32, or on devices that have it TF32. Stacked experts go through
batched products; other parameters go one by one: their shapes differ.

Source: arXiv 2502.16982; order of operations, splits, scales and modes of Megatron-LM and Emerging-Optimizers.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.newton_schulz import orthogonalize
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, get_param_info, part_lengths
from moe_trainer.parallel.state import Group, ParallelState


def compute_scale(mode: str, rows: int, columns: int) -> float:
    """--muon-scale-mode: what the orthogonal factor of a matrix is multiplied by."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns) if mode == "shape_scaling" else rows / columns)


class Muon:
    """The update rule of matrices."""

    def __init__(self, settings: OptimizerArgs, ps: ParallelState):
        self._settings = settings
        self._tp, self._etp = ps.tp, ps.etp
        self._dtype = torch.float32 if settings.muon_fp32_matmul_prec == "high" else torch.bfloat16

    @torch.no_grad()
    def update(
        self, param: Parameter, main: Tensor, grad: Tensor, momentum: Tensor, lr: float, weight_decay: float
    ) -> None:
        """One step of a parameter whose flat fp32 main values and momentum are overwritten. Collective over the ranks it is cut over.

        Shapes: all but `param` are flat, of all its elements on this rank.
        """
        settings = self._settings
        momentum.lerp_(grad, 1.0 - settings.muon_momentum)
        direction = grad.lerp(momentum, settings.muon_momentum) if settings.muon_nesterov else momentum
        main.mul_(1.0 - lr * weight_decay)
        main.sub_(self._orthogonal(get_param_info(param), direction.view(param.shape)).reshape(-1), alpha=lr)

    def _orthogonal(self, info: ParamInfo, x: Tensor) -> Tensor:
        """Orthogonalise and scale this rank's part of a matrix, or of every matrix of a stack."""
        stack = x if info.stacked else x.unsqueeze(0)
        mode = self._settings.muon_tp_mode if info.shard_count > 1 else "blockwise"
        group = self._etp if info.kind == "expert" else self._tp
        if mode == "duplicated":
            found = own_cut(self._by_block(info, gather_cut(stack, info, group), 0), info)
        else:
            first = info.shard_rank * stack.shape[1] if info.sharded_dim == 0 else 0
            found = self._by_block(info, stack, first, group if mode == "distributed" else None)
        return found.view(x.shape)

    def _by_block(self, info: ParamInfo, stack: Tensor, first: int, group: Group | None = None) -> Tensor:
        """Every projection of fused matrices by itself.

        first: number of the first row in the whole matrix. group: holds the other parts of these matrices; None where there are none.
        """
        ranks = 1 if group is None else group.size
        whole = (
            stack.shape[1] * (ranks if info.sharded_dim == 0 else 1),
            stack.shape[2] * (ranks if info.sharded_dim == 1 else 1),
        )
        cut = None if group is None else info.sharded_dim
        if not info.row_blocks or not self._settings.muon_split_qkv:
            return self._scaled(stack, whole, cut, group)
        run = sum(info.row_blocks)
        # a part of the rows need neither begin nor end with a query group
        rows = (torch.arange(stack.shape[1]) + first) % run
        found, start = torch.empty_like(stack), 0
        for count in info.row_blocks:
            here = to_device(((rows >= start) & (rows < start + count)).nonzero().view(-1), stack.device)
            start += count
            if group is not None:
                found[:, here] = self._scaled(stack[:, here], (whole[0] // run * count, whole[1]), cut, group)
            elif len(here):
                found[:, here] = self._scaled(stack[:, here], (len(here), whole[1]), cut, group)
        return found

    def _scaled(self, stack: Tensor, whole: tuple[int, int], cut: int | None, group: Group | None) -> Tensor:
        """whole: rows and columns of the matrices that these are, or are parts of."""
        settings = self._settings
        total = None if group is None else lambda part: collectives.all_reduce(part.contiguous(), group)
        with _tf32_where_there_is_one(stack.is_cuda and self._dtype == torch.float32):
            found = orthogonalize(
                stack,
                settings.muon_coefficient_type,
                settings.muon_num_ns_steps,
                dtype=self._dtype,
                cut=cut,
                total=total,
            )
        return found * (compute_scale(settings.muon_scale_mode, *whole) * settings.muon_extra_scale_factor)


def gather_cut(stack: Tensor, info: ParamInfo, group: Group) -> Tensor:
    """Whole matrices of the parts that the ranks of a group hold. Shapes: [n, rows, columns], like the result. Collective."""
    every = stack.new_empty((group.size, *stack.shape))
    collectives.all_gather_flat(every.view(-1), stack.contiguous().view(-1), group)
    dim = 1 + info.sharded_dim
    parts = every.split(part_lengths(info, stack.shape[dim]), dim + 1)
    # [ranks, .., piece, ..] -> [.., ranks, piece, ..]
    return torch.cat([part.movedim(0, dim).flatten(dim, dim + 1) for part in parts], dim)


def own_cut(whole: Tensor, info: ParamInfo) -> Tensor:
    """This rank's part of whole matrices [n, rows, columns]."""
    dim = 1 + info.sharded_dim
    parts = whole.split(part_lengths(info, whole.shape[dim]), dim)
    return torch.cat([part.chunk(info.shard_count, dim)[info.shard_rank] for part in parts], dim)


@contextlib.contextmanager
def _tf32_where_there_is_one(wanted: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if wanted:
            torch.set_float32_matmul_precision(before)
