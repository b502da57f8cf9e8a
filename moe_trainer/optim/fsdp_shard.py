"""Gradients and optimizer state of parameters that torch's fully_shard shards (applied by parallel/fsdp.py).

The parameters are DTensors with a ParamInfo, in fp32 or (--megatron-fsdp-main-params-dtype) in the dtype in which the
model computes. They are sharded along one of the first two dimensions over the ranks that reduce them (dense: dp_cp,
experts: edp; or the part of them in one instance of the distributed optimizer). Their reductions are plain sums,
because gloo supports no average; the mean over dp_cp, also for experts, is one pass here. The forward gathers
parameters in the training dtype, so the shards are the main parameters, and no copy or gather follows a step.

torch reduces every microbatch and accumulates the results in `.grad`: accumulating unsharded gradients until the last
microbatch would need the memory that sharding saves. torch gives a gradient the dtype of its parameter. Therefore sums
in bf16 (--megatron-fsdp-main-grads-dtype) of fp32 parameters are fp32 sums rounded to bf16 after every microbatch: the
numbers of a bf16 buffer in the memory of an fp32 one. fp32 sums of narrower parameters are separate tensors, to which
every microbatch's gradient is added.

With --outer-dp-sharding-strategy optim each instance of the distributed optimizer has a range of every shard: gradients
are reduce-scattered over the instances once per iteration, and updated parameters are all-gathered.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import debug as tensor_debug
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.main_grad import set_main_grad
from moe_trainer.optim.buckets import Slot
from moe_trainer.optim.optimizer_shard import OptimizerShard, ParamShard, ParamState, Segment
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.optim.state_plan import MAIN, StatePlan
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info, is_unique_replica, unique_params
from moe_trainer.parallel.shards import full_tensor, local_shards, shard_at
from moe_trainer.parallel.state import Group, ParallelState

MAX_OUTER_NUMEL = 1 << 26
"""Elements of one collective over the instances."""


FinishedGradients = dict[Parameter, Tensor]
"""Sums of all microbatches; they may be wider than the parameters."""


class OuterSharding:
    """Ranges of this rank's shards, divided over the instances of the distributed optimizer.

    Args:
        is_on: each instance has a range of every shard; otherwise every instance has all of it.
    """

    def __init__(self, slots: Iterable[Slot], ps: ParallelState, is_on: bool):
        self.is_on = is_on
        self._outer = {"dense": ps.dp_cp_outer, "expert": ps.edp_outer}
        self._batches: list[tuple[Group, list[Slot]]] = []
        numel = 0
        by_kind = sorted(slots, key=lambda slot: get_param_info(slot.param).kind)
        for slot in by_kind if is_on else ():
            group = self.group(slot)
            numel += slot.stop - slot.start
            if not self._batches or self._batches[-1][0] is not group or numel > MAX_OUTER_NUMEL:
                self._batches.append((group, []))
                numel = slot.stop - slot.start
            self._batches[-1][1].append(slot)

    def group(self, slot: Slot) -> Group:
        """Return the ranks of all instances with the same shard."""
        return self._outer[get_param_info(slot.param).kind]

    def owned_range(self, slot: Slot) -> tuple[int, int]:
        """Return the elements of a shard whose state this rank has, in the flattened parameter."""
        if not self.is_on:
            return slot.start, slot.stop
        first = self.group(slot).rank * self._length(slot)
        return min(slot.stop, slot.start + first), min(slot.stop, slot.start + first + self._length(slot))

    def _length(self, slot: Slot) -> int:
        return -(-(slot.stop - slot.start) // self.group(slot).size)

    @torch.no_grad()
    def reduce_scatter(self, view: Callable[[Slot], Tensor]) -> None:
        """Sum this rank's range of every shard over the instances, in place; other ranges keep partial sums."""
        for group, slots in self._batches:
            padded = [F.pad(view(slot), (0, group.size * self._length(slot) - view(slot).numel())) for slot in slots]
            sent = torch.cat([each.view(group.size, -1) for each in padded], dim=1)
            received = torch.empty_like(sent[0])
            collectives.reduce_scatter_flat(received, sent.view(-1), group)
            for slot, values in zip(slots, received.split([self._length(slot) for slot in slots])):
                start, stop = self.owned_range(slot)
                view(slot)[start - slot.start : stop - slot.start] = values[: stop - start]

    @torch.no_grad()
    def all_gather(self, view: Callable[[Slot], Tensor]) -> None:
        """Copy every range from the instance that has it, in place."""
        for group, slots in self._batches:
            owned = []
            for slot in slots:
                start, stop = self.owned_range(slot)
                values = view(slot)[start - slot.start : stop - slot.start]
                owned.append(F.pad(values, (0, self._length(slot) - values.numel())))
            sent = torch.cat(owned)
            received = sent.new_empty(group.size, sent.numel())
            collectives.all_gather_flat(received.view(-1), sent, group)
            for slot, values in zip(slots, received.split([self._length(slot) for slot in slots], dim=1)):
                view(slot).copy_(values.reshape(-1)[: slot.stop - slot.start])


class FsdpGrads:
    """Gradients of fully sharded parameters, with the interface of grad_buffer.DataParallelGrads.

    After finish(), `owned_views` are this rank's part of the mean over dp_cp (of the sum with per_token_loss).

    Args:
        params: in order of use.
        sums_in_bf16: round the accumulated gradients to bf16.
        shards_outer: divide the shards over the instances of the distributed optimizer. The backward then reduces
            gradients inside an instance only.

    Raises:
        ValueError: a parameter has no ParamInfo.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        ps: ParallelState,
        *,
        per_token_loss: bool,
        sums_in_bf16: bool = False,
        shards_outer: bool = False,
    ):
        self.num_finished = 0  # iterations
        self._sums_in_bf16 = sums_in_bf16
        self._factor = 1.0 if per_token_loss else 1.0 / ps.dp_cp.size
        self.params = [param for param in unique_params(params) if param.requires_grad]
        self.slots = tuple(
            Slot(param, position, start, stop)
            for position, param in enumerate(self.params)
            for _, start, stop in local_shards(param)
        )
        self.outer = OuterSharding(self.slots, ps, shards_outer)
        self._sums: dict[Parameter, Tensor] = {}
        self._finished: FinishedGradients = {}
        self._has_sums = not sums_in_bf16 and any(param.dtype != torch.float32 for param in self.params)

    def close(self) -> None:
        """Clear the cache in which DTensor keeps device meshes, and with them process groups, in C++."""
        clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)  # the only function that does
        if clear is not None:
            clear()

    def zero(self) -> None:
        """Start an iteration."""
        self._sums.clear()
        self._finished = {}
        for param in self.params:
            param.grad = None

    @property
    def are_finished(self) -> bool:
        """Whether this iteration's gradients are complete."""
        return bool(self._finished)

    def view(self, slot: Slot) -> Tensor:
        """Return the gradient of a shard, flat, after finish(); live."""
        return shard_at(self._finished[slot.param], slot.start)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Enclose the backward of every microbatch but the last."""
        yield
        self._end_microbatch()

    @torch.no_grad()
    def _end_microbatch(self) -> None:
        """Round the sums to bf16, or add narrow gradients to fp32 sums."""
        if self._sums_in_bf16:
            for slot in self.slots:
                if slot.param.grad is not None and slot.param.dtype != torch.bfloat16:
                    view = shard_at(slot.param.grad, slot.start)
                    view.copy_(view.bfloat16())
        for param in self.params if self._has_sums else ():
            grad, param.grad = param.grad, None
            if grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(grad)
            else:
                self._sums[param] = grad.float()

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the mean. Every reduction is complete when its backward is."""
        for param in self.params:
            if param.grad is None and param not in self._sums:
                param.grad = torch.zeros_like(param)
        self._end_microbatch()
        self._finished = self._sums | {param: param.grad for param in self.params if param.grad is not None}
        self.outer.reduce_scatter(self.view)
        self.num_finished += 1
        self.scale(self._factor)

    def get_finished(self) -> FinishedGradients:
        """Return the tensors that the last finish(), in a captured CUDA graph, left the gradients in."""
        return self._finished

    def mark_finished(self, finished: FinishedGradients) -> None:
        """Note that a replayed graph has computed the gradients in these tensors, as the captured finish() did."""
        self._finished = finished
        self.num_finished += 1

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """Iterate over this rank's part of every gradient, flat, in the same order on every rank; may be empty."""
        for slot in self.slots:
            start, stop = self.outer.owned_range(slot)
            yield slot, self.view(slot)[start - slot.start : stop - slot.start]

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        if factor != 1.0:
            for _, view in self.owned_views():
                view.mul_(factor)

    def gather(self) -> None:
        """Set every `main_grad` to the full gradient, after finish(). Collective over the ranks that shard it."""
        self.outer.all_gather(self.view)
        for param in self.params:
            set_main_grad(param, full_tensor(self._finished[param]))


class FsdpShard(OptimizerShard):
    """Main parameters (the FSDP shards themselves), gradients and moments.

    Args:
        names_main_params: the model computes in bf16 or fp16 and the shards are fp32, so checkpoints contain the shards
            in addition to its weights.
    """

    def __init__(
        self,
        grads: FsdpGrads,
        settings: OptimizerArgs,
        plan: StatePlan,
        ps: ParallelState,
        device: torch.device,
        names_main_params: bool,
    ):
        self.device, self._grads = device, grads
        self._names_main_params = names_main_params
        parts: list[ParamShard] = []
        offset = 0
        for slot in grads.slots:
            start, stop = grads.outer.owned_range(slot)
            if stop > start:
                group = get_param_group(slot.param, settings, ps.ep.size > 1)
                is_unique = grads.outer.is_on or grads.outer.group(slot).rank == 0
                is_counted = is_unique and is_unique_replica(get_param_info(slot.param), ps)
                parts.append(ParamShard(slot, start, stop, offset, group, is_counted))
                offset = parts[-1].end
        self.param_shards = parts
        # shards of different parameters are not contiguous
        self.contiguous_segments = [Segment(self, part.group, part.is_counted, part.offset, part.end) for part in parts]
        self._offsets = [part.offset for part in parts]
        self.allocate_state(plan, offset, parts[0].slot.param.dtype if parts else torch.float32)

    def model_at(self, start: int, stop: int) -> Tensor:
        """Return the shard's elements of a range inside a param shard; live."""
        part = self._part_at(start)
        return _local_param(part)[start - part.offset : stop - part.offset]

    def grad_at(self, start: int, stop: int) -> Tensor:
        """Return the gradients of a range inside a param shard; empty before the first finish()."""
        if not self._grads.are_finished:
            return torch.empty(0, device=self.device)
        part = self._part_at(start)
        first = part.start - part.slot.start - part.offset
        return self._grads.view(part.slot)[first + start : first + stop]

    def gather_model(self) -> None:
        """Copy updated parameters from the instances that have updated them."""
        self._grads.outer.all_gather(lambda slot: shard_at(slot.param, slot.start))

    def param_states(self, part: ParamShard) -> Iterator[ParamState]:
        """Iterate over the state of a param shard. NOTE: fp32_param is the parameter's own storage."""
        if self._names_main_params:
            yield ParamState(part.slot.param, MAIN, _local_param(part), part.start, part.stop)
        yield from super().param_states(part)

    def _part_at(self, start: int) -> ParamShard:
        return self.param_shards[bisect.bisect_right(self._offsets, start) - 1]


def _local_param(part: ParamShard) -> Tensor:
    first = part.start - part.slot.start
    return shard_at(part.slot.param, part.slot.start)[first : first + part.stop - part.start]
