"""FSDP: parameters sharded over the data-parallel ranks with torch's fully_shard.

Each transformer layer is a unit: it is gathered before its forward and its backward, and its gradients are
reduce-scattered right after its backward. The experts of a layer are a separate unit, sharded over edp instead of
dp_cp. The remaining parameters (embedding, final norm, output layer) are one more unit. Shards serve as the main
parameters, in fp32 unless the flags name the model's dtype. Tensors are sharded along dimension 0, or along dimension 1
for a stack of experts whose number edp does not divide. With several optimizer instances, gradient shards are
all-reduced over the instances, unless these share the optimizer state (optim/fsdp_shard.py).

Reductions are sums, because gloo has no average; optim/fsdp_shard.py divides. All communication goes through
collectives.py, so that the trace covers it. That is why torch's hybrid mesh is not used.
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
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.state import Group, ParallelState


class FullSharding:
    """Shards the chunks of one model. Construction and `shard` are collective.

    Args:
        param_dtype: of the gathered parameters and the computation.
        reduce_dtype: of gradients in the reduce-scatter.
        main_dtype: of the shards.
        keep_gathered: do not reshard units between forward and backward.
        reduces_outer: sum gradients over the optimizer instances in backward.
    """

    def __init__(
        self,
        ps: ParallelState,
        device: torch.device,
        *,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        main_dtype: torch.dtype = torch.float32,
        keep_gathered: bool = False,
        reduces_outer: bool = True,
    ):
        self._groups = {"dense": (ps.dp_cp_inner, ps.dp_cp_outer), "expert": (ps.edp_inner, ps.edp_outer)}
        self._meshes = _meshes({kind: inner for kind, (inner, _) in self._groups.items()}, ps.world.rank, device)
        self._main_dtype, self._keep_gathered, self._reduces_outer = main_dtype, keep_gathered, reduces_outer
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == main_dtype else param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
        )

    def shard(self, chunk: nn.Module, layers: Sequence[nn.Module], apart: Sequence[nn.Module] = ()) -> None:
        """Replace the parameters of a chunk by DTensors, which take over the ParamInfo of the old ones.

        Args:
            layers: units, in the order of their forwards.
            apart: further units, whose forwards come before.
        """
        infos = {name: get_param_info(param) for name, param in chunk.named_parameters()}
        units = [self._shard(unit, "dense") for unit in apart]
        for unit in layers:
            units += [self._shard(experts, "expert") for experts in expert_modules(unit)]
            units.append(self._shard(unit, "dense"))
        units.append(self._shard(chunk, "dense"))
        # By default torch goes back from the last unit of the last forward. Where several microbatches are in flight,
        # the first unit then prefetches the last one of another microbatch, which nothing waits for: a wasted
        # all-gather, and memory that the next one may overwrite while it is received. The first unit names itself,
        # which is gathered then, because an empty list means the default.
        for unit, previous in zip(units, units[:1] + units[:-1], strict=True):
            unit.set_modules_to_backward_prefetch([previous])
        for name, param in chunk.named_parameters():
            set_param_info(param, infos[name])
        chunk.register_forward_hook(_reshard_after_eval)

    def _shard(self, module: nn.Module, kind: str) -> Any:
        inner, outer = self._groups[kind]
        params = [param for param in module.parameters() if not isinstance(param, DTensor)]
        for param in params:
            param.data = param.data.to(self._main_dtype)
        fsdp: Any = fully_shard(
            module,
            mesh=self._meshes[kind],
            reshard_after_forward=not self._keep_gathered,
            mp_policy=self._policy,
            shard_placement_fn=functools.partial(_placement, inner.size),
        )
        fsdp.set_force_sum_reduction_for_comms(True)
        fsdp.set_gradient_divide_factor(1.0)
        # torch 2.13; every rank's experts take part in every backward anyway
        if hasattr(fsdp, "set_reduce_scatter_unused_params"):
            fsdp.set_reduce_scatter_unused_params(True)
        fsdp.set_custom_all_gather(_AllGather(inner))
        fsdp.set_custom_reduce_scatter(_ReduceScatter(inner))
        if outer.size > 1 and self._reduces_outer:
            fsdp.set_all_reduce_hook(functools.partial(collectives.all_reduce, group=outer))
        return fsdp


def expert_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of a unit that have expert parameters only."""
    for child in unit.children():
        kinds = {get_param_info(param).kind for param in child.parameters()}
        if kinds == {"expert"}:
            yield child
        elif "expert" in kinds:
            yield from expert_modules(child)


def _meshes(groups: dict[str, Group], rank: int, device: torch.device) -> dict[str, DeviceMesh]:
    """Return a device mesh per group; torch's meshes need a communicator even for one rank."""
    meshes: dict[Any, DeviceMesh] = {}
    for group in groups.values():
        if group.handle not in meshes:
            handle = group.handle
            if handle is None:
                handle = dist.new_group([rank], use_local_synchronization=True, group_desc="one rank")
            meshes[group.handle] = DeviceMesh.from_group(handle, device.type)
    return {kind: meshes[group.handle] for kind, group in groups.items()}


def _placement(ranks: int, param: Parameter) -> Shard:
    stacked = param.dim() > 1 and get_param_info(param).stacked
    return Shard(1) if stacked and param.shape[0] % ranks and param.shape[1] % ranks == 0 else Shard(0)


def _reshard_after_eval(chunk: nn.Module, inputs: tuple, output: Any) -> None:
    # fully_shard frees the gathered parameters in backward only
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
        _check_sync(async_op)
        collectives.all_gather_flat(output_tensor, input_tensor, self._group)


class _ReduceScatter(_AllGather):
    """torch's ReduceScatter protocol on a Group; always a sum."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"reduction {op}"
        _check_sync(async_op)
        collectives.reduce_scatter_flat(output_tensor, input_tensor, self._group)


def _check_sync(async_op: bool) -> None:
    # torch would never wait for a work object that is not its own
    assert not async_op, "asynchronous collectives of fully_shard are not supported (unshard_async_op)"
