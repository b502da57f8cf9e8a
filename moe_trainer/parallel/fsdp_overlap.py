"""Two passes through fully sharded units at once, and weight gradients that come after a unit's backward.

fully_shard (parallel/fsdp.py) expects one pass at a time, whose backward leaves a unit with all its gradients. What it keeps of a pass
is private to torch; this file is the only one that reaches for it, and refuses a torch in which it is not found.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from moe_trainer.parallel.weight_grads import WeightGradQueue

_OF_STATES = ("_training_state", "_state_ctx")
_OF_GROUPS = ("_training_state", "reshard", "post_backward", "finalize_backward", "fsdp_params")


class FSDPPassState:
    """What fully_shard keeps of a pass, for two passes that take turns (overlap_executor.PassState): forward of one microbatch, backward of another.

    torch's units are in one state each (forward, backward, idle), and a unit is sharded again when a pass leaves it. Here every pass has
    states of its own, and a unit stays gathered while the other pass is inside it. Both passes run in one order on all ranks, so the
    collectives do too.
    """

    def __init__(self, chunks: Iterable[nn.Module]):
        modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, FSDPModule)]
        self._states = [module._get_fsdp_state() for module in modules]
        self._groups = [group for module in modules for group in _param_groups(module)]
        self._waiting: _Saved | None = None
        for index, group in enumerate(self._groups):
            group.reshard = functools.partial(self._reshard, index, group.reshard)

    def begin(self) -> None:
        """Two passes begin; the one that waits starts idle."""
        idle = TrainingState.IDLE
        self._waiting = _Saved([idle] * len(self._states), [idle] * len(self._groups), [None] * len(self._states))

    def switch(self) -> None:
        """Save the states of the pass that stops, and put those of the other one in their place."""
        saved = _Saved(
            [state._training_state for state in self._states],
            [group._training_state for group in self._groups],
            [state._state_ctx.iter_forward_root for state in self._states],
        )
        for state, training_state, root in zip(self._states, self._waiting.states, self._waiting.roots, strict=True):
            state._training_state, state._state_ctx.iter_forward_root = training_state, root
        for group, training_state in zip(self._groups, self._waiting.groups, strict=True):
            group._training_state = training_state
        self._waiting = saved

    def end(self) -> None:
        """Both passes have ended: units are sharded again as soon as they are left."""
        self._waiting = None

    def _reshard(self, index: int, reshard: Callable[[], None]) -> None:
        if self._waiting is None or self._waiting.groups[index] not in (
            TrainingState.FORWARD,
            TrainingState.PRE_BACKWARD,
        ):
            reshard()


def reduce_after_weight_grads(chunk: nn.Module, queue: WeightGradQueue) -> None:
    """Let the units of a chunk wait, where weight gradients are put off, until these are there: then they are reduced, and the unit is
    sharded again."""
    for module in chunk.modules():
        for group in _param_groups(module) if isinstance(module, FSDPModule) else ():
            group.post_backward = _PostBackward(group, queue)


class _PostBackward:
    """The post_backward of a parameter group, which waits for the weight gradients in a queue. torch calls it once or twice a backward."""

    def __init__(self, group: Any, queue: WeightGradQueue):
        self._group, self._queue, self._post_backward, self._waits = group, queue, group.post_backward, False

    def __call__(self, *unused: Any) -> None:
        params = [param.unsharded_param for param in self._group.fsdp_params if hasattr(param, "_unsharded_param")]
        self._waits = self._waits or self._queue.run_after_pending(params, self._late)
        if not self._waits:
            self._post_backward()

    def _late(self) -> None:
        self._waits = False
        in_backward = self._group._training_state == TrainingState.PRE_BACKWARD
        self._post_backward()
        if not in_backward:  # torch has waited for the reductions of this backward already
            self._group.finalize_backward()
            self._group._training_state = TrainingState.IDLE


class _Saved(NamedTuple):
    """The state of the units, of their parameter groups, and the module that the pass began with, by unit."""

    states: list[TrainingState]
    groups: list[TrainingState]
    roots: list[Any]


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group per module
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else list(groups)
    groups = [group for group in groups if group is not None]
    if any(not hasattr(state, name) for name in _OF_STATES) or any(
        not hasattr(group, name) for group in groups for name in _OF_GROUPS
    ):
        raise ValueError(
            f"full sharding beside --overlap-moe-expert-parallel-comm or delayed weight gradients knows torch 2.11 to 2.13 from inside, and torch "
            f"{torch.__version__} is different: leave those flags out"
        )
    return groups
