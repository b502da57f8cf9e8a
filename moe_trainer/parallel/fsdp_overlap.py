"""FSDP with overlapped forward and backward passes, and with deferred weight gradients.

fully_shard expects one pass at a time, and all gradients of a unit at the end of its backward. Its state is private to
torch; this is the only file that accesses it, and it raises an error for a torch that differs.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from moe_trainer.parallel.weight_grads import WeightGradQueue

_STATE_ATTRIBUTES = ("_training_state", "_state_ctx")
_GROUP_ATTRIBUTES = ("_training_state", "reshard", "post_backward", "finalize_backward", "fsdp_params")


class FSDPPassState:
    """Separate fully_shard states for the two passes of an AlternatingExecutor.

    A unit stays gathered while the other pass is inside it. The passes alternate in the same order on all ranks, so
    their collectives do too.
    """

    def __init__(self, chunks: Iterable[nn.Module]):
        modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, FSDPModule)]
        self._states = [module._get_fsdp_state() for module in modules]
        self._groups = [group for module in modules for group in _param_groups(module)]
        self._idle = _Saved(
            [TrainingState.IDLE] * len(self._states),
            [TrainingState.IDLE] * len(self._groups),
            [None] * len(self._states),
        )
        self._other_pass = self._idle
        for index, group in enumerate(self._groups):
            group.reshard = functools.partial(self._reshard, index, group.reshard)

    def begin(self) -> None:
        self._other_pass = self._idle

    def switch(self) -> None:
        other = self._other_pass
        self._other_pass = _Saved(
            [state._training_state for state in self._states],
            [group._training_state for group in self._groups],
            [state._state_ctx.iter_forward_root for state in self._states],
        )
        for state, training_state, root in zip(self._states, other.states, other.roots, strict=True):
            state._training_state, state._state_ctx.iter_forward_root = training_state, root
        for group, training_state in zip(self._groups, other.groups, strict=True):
            group._training_state = training_state

    def end(self) -> None:
        self._other_pass = self._idle

    def _reshard(self, index: int, reshard: Callable[[], None]) -> None:
        if self._other_pass.groups[index] not in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            reshard()


def reduce_after_weight_grads(chunk: nn.Module, queue: WeightGradQueue) -> None:
    """Delay the reduce-scatter and the reshard of a unit until its deferred weight gradients are computed."""
    for module in chunk.modules():
        for group in _param_groups(module) if isinstance(module, FSDPModule) else ():
            group.post_backward = _PostBackward(group, queue)


class _PostBackward:
    """Runs a parameter group's post_backward after its deferred weight gradients.

    torch calls it once or twice per backward.
    """

    def __init__(self, group: Any, queue: WeightGradQueue):
        self._group, self._queue, self._post_backward, self._is_deferred = group, queue, group.post_backward, False

    def __call__(self, *unused: Any) -> None:
        params = [param.unsharded_param for param in self._group.fsdp_params if hasattr(param, "_unsharded_param")]
        self._is_deferred = self._is_deferred or self._queue.run_after_pending(params, self._run_deferred)
        if not self._is_deferred:
            self._post_backward()

    def _run_deferred(self) -> None:
        self._is_deferred = False
        in_backward = self._group._training_state == TrainingState.PRE_BACKWARD
        self._post_backward()
        if not in_backward:  # torch has already waited for the reductions of this backward
            self._group.finalize_backward()
            self._group._training_state = TrainingState.IDLE


class _Saved(NamedTuple):
    """Training states of the units and of their parameter groups, and the root module of the pass per unit."""

    states: list[TrainingState]
    groups: list[TrainingState]
    roots: list[Any]


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group per module
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else list(groups)
    groups = [group for group in groups if group is not None]
    if any(not hasattr(state, name) for name in _STATE_ATTRIBUTES) or any(
        not hasattr(group, name) for group in groups for name in _GROUP_ATTRIBUTES
    ):
        raise ValueError(
            "FSDP with --overlap-moe-expert-parallel-comm or deferred weight gradients supports torch 2.11 to 2.14, "
            f"not {torch.__version__}: remove those flags"
        )
    return groups
