"""After the data-parallel reduction: sums over ranks of one model replica.

Two kinds of parameters have their gradient spread over the ranks of one replica: those that every tensor-parallel rank
holds but applies to a part of the tokens or heads (`ParamInfo.partial`: norms, routers, biases under sequence parallelism), and
those that several pipeline stages hold (`tied`: the embedding that is also the output head, or feeds multi-token
prediction). Their sums commute with the data-parallel mean, so they are taken last, over what this rank owns: with the
distributed optimizer a fraction of the data. The ranks of a group own the same elements: tensor-parallel ranks lay out equal
buffers, and a tied parameter has a bucket of its own.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_trainer.optim.flat import Slot
from moe_trainer.optim.fully_sharded import ShardedGrads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, info_of
from moe_trainer.parallel.state import Group, ParallelState


def finalize_grads(grads: DataParallelGrads | ShardedGrads, ps: ParallelState,
                   timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext()) -> None:
    """Sum the gradients of partial parameters over tp (of experts over etp) and of tied ones over the stages, in place.

    Call it after grads.finish() and before anything reads the gradients; a factor per token may be applied before or after.
    timer: context manager per Megatron timer name.
    Communication: one all-reduce per group and gradient dtype.
    Raises: RuntimeError, after the first iteration, when the ranks of a group do not hold the same parameters.
    """
    with timer("layernorm-grads-all-reduce"):
        _sum(grads, ps.tp, lambda info: info.partial and info.kind == "dense")
        _sum(grads, ps.etp, lambda info: info.partial and info.kind == "expert")
    with timer("embedding-grads-all-reduce"):
        _sum(grads, ps.embedding, lambda info: info.tied)


@torch.no_grad()
def _sum(grads: DataParallelGrads | ShardedGrads, group: Group, chosen: Callable[[ParamInfo], bool]) -> None:
    if group.size == 1:
        return
    # by name: the stages do not reach tied parameters in one order
    found = sorted(((slot, view) for slot, view in grads.owned_views() if chosen(info_of(slot.param))),
                   key=lambda entry: info_of(entry[0].param).names[0])
    if grads.finished == 1:
        _check_alike(found, group)
    views = [view for _, view in found if view.numel()]
    for dtype in dict.fromkeys(view.dtype for view in views):
        _all_reduce_together([view for view in views if view.dtype == dtype], group)


def _all_reduce_together(views: Sequence[Tensor], group: Group) -> None:
    if len(views) == 1:
        collectives.all_reduce(views[0], group)
        return
    flat = collectives.all_reduce(torch.cat(list(views)), group)
    torch._foreach_copy_(list(views), list(flat.split([view.numel() for view in views])))


def _check_alike(found: Sequence[tuple[Slot, Tensor]], group: Group) -> None:
    """Sums of different parameters, or of different parts of them, would be silent nonsense (or a hang)."""
    mine = [(info_of(slot.param).names[0], tuple(slot.param.shape), view.numel(), str(view.dtype)) for slot, view in found]
    for rank, theirs in zip(group.ranks, collectives.all_gather_object(mine, group)):
        if theirs != mine:
            here, there = next(((a, b) for a, b in zip(mine, theirs) if a != b), (mine[-1:], theirs[-1:]))
            raise RuntimeError(f"gradients to be summed over {group.name} differ between ranks: {len(mine)} here, {len(theirs)} "
                               f"on rank {rank}; first difference: {here} here, {there} there")
