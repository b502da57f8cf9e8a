"""Full sharding of a model's parameters over its data-parallel ranks, by torch's fully_shard.

A unit (a transformer layer) is gathered before its forward and its backward, and its gradients are reduced to shards right
behind its backward, so a rank holds one or two units whole. The experts of a unit are a unit of their own, over edp instead of
dp_cp; what belongs to no unit (embedding, final norm, head) is one more, which the whole chunk gathers. A shard is fp32 and is
the main parameter itself; param_dtype is the format in which units are gathered and computed. With several instances (`outer`
groups) every instance holds all of the model, and the reduced shards are summed over them behind the reduction.

All reductions are plain sums, since gloo knows no average: the mean is taken over shards, by whoever keeps the gradients
(optim/fsdp_shard.py). All communication of a step goes through collectives.py, so that a hang is told like any other; whole
tensors for export and proofs are torch's `full_tensor` (shards.py).

Shards are cuts of the first dimension, or of the second for a stack of experts whose number edp does not divide.

Rejected: torch's own hybrid mesh (its all-reduce would run unseen, and its groups are those that ParallelState has), and holding
gradients back until the last microbatch (it takes the memory that sharding saves).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import Group, ParallelState


class FullSharding:
    """How one model is sharded. Collective: every rank makes one, and shards the same chunks.

    param_dtype: of the computation; reduce_dtype: of gradients on the wire. keep_gathered: units stay whole between forward
    and backward.
    """

    def __init__(
        self,
        ps: ParallelState,
        device: torch.device,
        *,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        keep_gathered: bool = False,
    ):
        self._groups = {"dense": (ps.dp_cp_inner, ps.dp_cp_outer), "expert": (ps.edp_inner, ps.edp_outer)}
        self._meshes = _meshes({kind: inner for kind, (inner, _) in self._groups.items()}, ps.world.rank, device)
        self._keep = keep_gathered
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == torch.float32 else param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
        )

    def shard(self, chunk: nn.Module, units: Sequence[nn.Module]) -> None:
        """Cut the parameters of a chunk, in place: they become fp32 DTensors. `units`: modules inside it, called by forward.

        From here on `chunk.parameters()` are other objects, with the ParamInfo of the old ones.
        Raises: ValueError when a parameter carries no ParamInfo.
        """
        infos = {name: get_param_info(param) for name, param in chunk.named_parameters()}
        for unit in units:
            for experts in expert_modules(unit):
                self._shard(experts, "expert")
            self._shard(unit, "dense")
        self._shard(chunk, "dense")
        for name, param in chunk.named_parameters():
            param.info = infos[name]
        chunk.register_forward_hook(_leave_sharded)

    def _shard(self, module: nn.Module, kind: str) -> None:
        inner, outer = self._groups[kind]
        for param in module.parameters():
            if not isinstance(param, DTensor):
                param.data = param.data.float()
        fully_shard(
            module,
            mesh=self._meshes[kind],
            reshard_after_forward=not self._keep,
            mp_policy=self._policy,
            shard_placement_fn=functools.partial(_placement, inner.size),
        )
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if hasattr(
            module, "set_reduce_scatter_unused_params"
        ):  # torch 2.13; every rank's experts take part in every backward anyway
            module.set_reduce_scatter_unused_params(True)
        module.set_custom_all_gather(_AllGather(inner))
        module.set_custom_reduce_scatter(_ReduceScatter(inner))
        if outer.size > 1:
            module.set_all_reduce_hook(functools.partial(collectives.all_reduce, group=outer))


def expert_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of a unit whose parameters are all experts'."""
    for child in unit.children():
        kinds = {get_param_info(param).kind for param in child.parameters()}
        if kinds == {"expert"}:
            yield child
        elif "expert" in kinds:
            yield from expert_modules(child)


def _meshes(groups: dict[str, Group], rank: int, device: torch.device) -> dict[str, DeviceMesh]:
    """A mesh over every group; one rank alone gets a communicator of its own, since torch's meshes need one."""
    made: dict[Any, DeviceMesh] = {}
    for group in groups.values():
        if group.handle not in made:
            handle = group.handle
            if handle is None:
                handle = dist.new_group([rank], use_local_synchronization=True, group_desc="one rank")
            made[group.handle] = DeviceMesh.from_group(handle, device.type)
    return {kind: made[group.handle] for kind, group in groups.items()}


def _placement(ranks: int, param: Parameter) -> Shard:
    """The first dimension; the second for a stack of experts that would leave ranks without any, or with one more than others."""
    stacked = param.dim() > 1 and get_param_info(param).stacked
    return Shard(1) if stacked and param.shape[0] % ranks and param.shape[1] % ranks == 0 else Shard(0)


def _leave_sharded(chunk: nn.Module, inputs: tuple, output: Any) -> None:
    """After a forward without backward nothing else would give the gathered parameters back."""
    if not torch.is_grad_enabled():
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _AllGather:
    """torch's AllGather protocol on a Group."""

    def __init__(self, group: Group):
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        _only_sync(async_op)
        collectives.all_gather_flat(output_tensor, input_tensor, self._group)


class _ReduceScatter(_AllGather):
    """torch's ReduceScatter protocol on a Group; always a sum."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"reduction {op}"
        _only_sync(async_op)
        collectives.reduce_scatter_flat(output_tensor, input_tensor, self._group)


def _only_sync(async_op: bool) -> None:
    """torch waits only for works of its own class; one of ours would never be waited for."""
    assert not async_op, "fully_shard asks for an asynchronous collective (unshard_async_op)"
