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
import math
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
from moe_trainer.parallel.fsdp_buffers import BufferOptions, BufferPool, RegisteredMemory, allocate_plain
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import Group, ParallelState


class FullSharding:
    """Shards the chunks of one model. Construction and `shard` are collective.

    Args:
        param_dtype: of the gathered parameters and the computation.
        reduce_dtype: of gradients in the reduce-scatter.
        main_dtype: of the shards.
        keep_gathered: do not reshard units between forward and backward.
        reduces_outer: sum gradients over the optimizer instances in backward.
        buffers: options of persistent communication buffers; None to allocate as torch does.
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
        buffers: BufferOptions | None = None,
    ):
        self._groups = {"dense": (ps.dp_cp_inner, ps.dp_cp_outer), "expert": (ps.edp_inner, ps.edp_outer)}
        self._meshes = _meshes({kind: inner for kind, (inner, _) in self._groups.items()}, ps.world.rank, device)
        self._main_dtype, self._keep_gathered, self._reduces_outer = main_dtype, keep_gathered, reduces_outer
        self._buffers, self._memory = buffers, None
        if buffers is not None and buffers.registers:
            self._memory = RegisteredMemory([inner for inner, _ in self._groups.values()], device, buffers)
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if param_dtype == main_dtype else param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
        )

    def shard(self, chunk: nn.Module, layers: Sequence[nn.Module], apart: Sequence[nn.Module] = ()) -> None:
        """Replace the parameters of a chunk by DTensors, which take over the ParamInfo of the old ones.

        Args:
            layers: units, which have persistent buffers if any have.
            apart: further units.
        """
        infos = {name: get_param_info(param) for name, param in chunk.named_parameters()}
        pools = {kind: self._make_pools() for kind in self._groups}
        for unit in apart:
            self._shard(unit, "dense", pools["dense"], is_layer=False)
        for unit in layers:
            for experts in expert_modules(unit):
                self._shard(experts, "expert", pools["expert"], is_layer=True)
            self._shard(unit, "dense", pools["dense"], is_layer=True)
        self._shard(chunk, "dense", pools["dense"], is_layer=False)
        for name, param in chunk.named_parameters():
            param.info = infos[name]  # type: ignore[attr-defined]
        chunk.register_forward_hook(_reshard_after_eval)

    def register_buffers(self) -> None:
        """Register persistent buffers that are not registered yet with the communicators. Collective."""
        if self._memory is not None:
            self._memory.register()

    def _make_pools(self) -> tuple[BufferPool, BufferPool] | None:
        """Return the buffers of a chunk's all-gathers and reduce-scatters; chunks communicate on separate streams."""
        if self._buffers is None:
            return None
        allocate = allocate_plain if self._memory is None else self._memory.allocate
        return BufferPool(self._buffers, allocate), BufferPool(self._buffers, allocate)

    def _shard(self, module: nn.Module, kind: str, pools: tuple[BufferPool, BufferPool] | None, is_layer: bool) -> None:
        inner, outer = self._groups[kind]
        params = [param for param in module.parameters() if not isinstance(param, DTensor)]
        for param in params:
            param.data = param.data.to(self._main_dtype)
        numel = sum(_padded_numel(inner.size, param) for param in params)
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
        if pools is not None:
            for pool in pools if is_layer else ():
                pool.add_unit(numel)
            if hasattr(fsdp, "set_reduce_scatter_max_input_buffers"):
                fsdp.set_reduce_scatter_max_input_buffers(2, recurse=False)
        gathers, scatters = pools or (None, None)
        fsdp.set_custom_all_gather(_AllGather(inner, gathers))
        fsdp.set_custom_reduce_scatter(_ReduceScatter(inner, scatters))
        if outer.size > 1 and self._reduces_outer:
            fsdp.set_all_reduce_hook(functools.partial(collectives.all_reduce, group=outer))


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


def _padded_numel(ranks: int, param: Parameter) -> int:
    """Return the elements of a parameter whose sharded dimension is padded for equal shards."""
    size = param.shape[_placement(ranks, param).dim]
    return param.numel() // max(1, size) * -(-size // ranks) * ranks


def _reshard_after_eval(chunk: nn.Module, inputs: tuple, output: Any) -> None:
    # fully_shard frees the gathered parameters in backward only
    if not torch.is_grad_enabled():
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _AllGather:
    """torch's AllGather protocol on a Group; `allocate` returns its output."""

    def __init__(self, group: Group, pool: BufferPool | None):
        self._group, self._pool = group, pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._pool is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._pool.take(math.prod(size), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        _check_sync(async_op)
        collectives.all_gather_flat(output_tensor, input_tensor, self._group)


class _ReduceScatter(_AllGather):
    """torch's ReduceScatter protocol on a Group; always a sum.

    `allocate` returns first the input and then the output, which becomes the gradient and is therefore in no pool.
    """

    def __init__(self, group: Group, pool: BufferPool | None):
        super().__init__(group, pool)
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._has_input or self._group.size == 1:  # torch reduces nothing over one rank
            return torch.empty(*size, dtype=dtype, device=device)
        self._has_input = True
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"reduction {op}"
        self._has_input = False
        _check_sync(async_op)
        collectives.reduce_scatter_flat(output_tensor, input_tensor, self._group)


def _check_sync(async_op: bool) -> None:
    # torch would never wait for a work object that is not its own
    assert not async_op, "asynchronous collectives of fully_shard are not supported (unshard_async_op)"
