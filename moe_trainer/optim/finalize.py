"""Gradient sums over the ranks of one model replica, after the data-parallel reduction.

Two kinds of parameters have partial gradients on several ranks of a replica: those that every tensor-parallel rank
applies to a part of the tokens or heads (`ParamInfo.is_grad_partial`: norms, routers, biases under sequence
parallelism), and those of several pipeline stages (`tied`: the embedding that is also the output head, or feeds
multi-token prediction). Their sums commute with the data-parallel mean, so they come last, over what this rank owns:
with the distributed optimizer a fraction of the data. The ranks of a group own the same elements: tensor-parallel ranks
lay out equal buffers, and a tied parameter has a separate bucket.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_trainer.optim.buckets import Slot
from moe_trainer.optim.fsdp_shard import FsdpGrads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, get_param_info
from moe_trainer.parallel.state import Group, ParallelState


def finalize_grads(
    grads: DataParallelGrads | FsdpGrads,
    ps: ParallelState,
    timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> None:
    """Sum partial gradients over tp (of experts over etp) and tied ones over the stages, in place.

    Call it after grads.finish() and before the gradients are read; a factor per token may be applied before or after.

    Communication: one all-reduce per group and gradient dtype.

    Args:
        timer: returns a context manager for a Megatron timer name.

    Raises:
        RuntimeError: the ranks of a group do not hold the same parameters (checked in the first iteration).
    """
    with timer("layernorm-grads-all-reduce"):
        _sum_over(grads, ps.tp, lambda info: info.is_grad_partial and info.kind == "dense")
        _sum_over(grads, ps.etp, lambda info: info.is_grad_partial and info.kind == "expert")
    with timer("embedding-grads-all-reduce"):
        _sum_over(grads, ps.embedding, lambda info: info.tied)


@torch.no_grad()
def _sum_over(grads: DataParallelGrads | FsdpGrads, group: Group, selects: Callable[[ParamInfo], bool]) -> None:
    if group.size == 1:
        return
    # by name: the order of tied parameters differs between stages
    selected = sorted(
        ((slot, view) for slot, view in grads.owned_views() if selects(get_param_info(slot.param))),
        key=lambda entry: get_param_info(entry[0].param).names[0],
    )
    if grads.num_finished == 1:
        _check_equal_layout(selected, group)
    views = [view for _, view in selected if view.numel()]
    for dtype in dict.fromkeys(view.dtype for view in views):
        _all_reduce_together([view for view in views if view.dtype == dtype], group)


def _all_reduce_together(views: Sequence[Tensor], group: Group) -> None:
    if len(views) == 1:
        collectives.all_reduce(views[0], group)
        return
    flat = collectives.all_reduce(torch.cat(list(views)), group)
    torch._foreach_copy_(list(views), list(flat.split([view.numel() for view in views])))


def _check_equal_layout(views: Sequence[tuple[Slot, Tensor]], group: Group) -> None:
    # sums of different parameters, or of different parts of them, would be wrong or hang
    local = [
        (get_param_info(slot.param).names[0], tuple(slot.param.shape), view.numel(), str(view.dtype))
        for slot, view in views
    ]
    for rank, remote in zip(group.ranks, collectives.all_gather_object(local, group)):
        if remote != local:
            differing = next(((a, b) for a, b in zip(local, remote) if a != b), (local[-1:], remote[-1:]))
            raise RuntimeError(
                f"gradients to be summed over {group.name} differ between ranks: {len(local)} on this rank, "
                f"{len(remote)} on rank {rank}; first mismatch: {differing[0]} on this rank, {differing[1]} on rank "
                f"{rank}"
            )
