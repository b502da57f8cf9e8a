"""Gradients and optimizer state of parameters that torch's fully_shard shards (applied by parallel/fsdp.py).

The parameters are fp32 DTensors with a ParamInfo, sharded along one of the first two dimensions over the ranks that
reduce them (dense: dp_cp, experts: edp; or the part of them in one instance of the distributed optimizer). Their
reductions are plain sums, because gloo supports no average; the mean over dp_cp, also for experts, is one pass here.
The forward gathers parameters in the training dtype, so the shards are the main parameters, and no copy or gather
follows a step.

torch reduces every microbatch and accumulates the results in `.grad`, in fp32: accumulating unsharded gradients until
the last microbatch would need the memory that sharding saves. Sums in bf16 (--megatron-fsdp-main-grads-dtype) are fp32
sums rounded to bf16 after every microbatch: the numbers of a bf16 buffer in the memory of an fp32 one, since torch
gives a gradient the dtype of its parameter.
"""

import bisect
import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.buckets import Slot
from moe_trainer.optim.optimizer_shard import OptimizerShard, ParamShard, ParamState, Segment
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.optim.state_plan import MAIN, StatePlan
from moe_trainer.parallel.params import get_param_info, is_unique_replica, unique_params
from moe_trainer.parallel.shards import full_tensor, local_shards, shard_at
from moe_trainer.parallel.state import ParallelState


class FsdpGrads:
    """Gradients of fully sharded parameters, with the interface of grad_buffer.DataParallelGrads.

    After finish(), `.grad` of every parameter is this rank's shard of the mean over dp_cp (of the sum with
    per_token_loss).

    Args:
        params: in order of use.
        sums_in_bf16: round the accumulated gradients to bf16.

    Raises:
        ValueError: a parameter has no ParamInfo.
    """

    def __init__(
        self, params: Iterable[Parameter], ps: ParallelState, *, per_token_loss: bool, sums_in_bf16: bool = False
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
        for param in self.params:
            name = get_param_info(param).names[0]
            assert param.dtype == torch.float32, f"{name}: FSDP shards are main parameters, which must be fp32"

    def zero(self) -> None:
        """Start an iteration."""
        for param in self.params:
            param.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Enclose the backward of every microbatch but the last."""
        yield
        if self._sums_in_bf16:
            self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for slot in self.slots:
            if slot.param.grad is not None:
                view = shard_at(slot.param.grad, slot.start)
                view.copy_(view.bfloat16())

    @torch.no_grad()
    def finish(self) -> None:
        """Compute the mean. Every reduction is complete when its backward is."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if self._sums_in_bf16:
            self._round()
        self.num_finished += 1
        self.scale(self._factor)

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """Iterate over this rank's shard of every gradient, flat, in the same order on every rank; may be empty."""
        return ((slot, shard_at(slot.param.grad, slot.start)) for slot in self.slots)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        if factor != 1.0:
            for _, view in self.owned_views():
                view.mul_(factor)

    def gather(self) -> None:
        """Set every `main_grad` to the full gradient, after finish(). Collective over the ranks that shard it."""
        for param in self.params:
            param.main_grad = full_tensor(param.grad)


class FsdpShard(OptimizerShard):
    """Main parameters (the FSDP shards themselves), gradients and moments.

    Args:
        names_main_params: the model computes in bf16 or fp16, so checkpoints contain the fp32 shards in addition to its
            weights.
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
        self.device = device
        self._names_main_params = names_main_params
        parts: list[ParamShard] = []
        offset = 0
        for slot in grads.slots:
            if slot.stop > slot.start:
                info = get_param_info(slot.param)
                outer = ps.edp_outer if info.kind == "expert" else ps.dp_cp_outer
                group = get_param_group(slot.param, settings, ps.ep.size > 1)
                is_counted = outer.rank == 0 and is_unique_replica(info, ps)
                parts.append(ParamShard(slot, slot.start, slot.stop, offset, group, is_counted))
                offset = parts[-1].end
        self.param_shards = parts
        # shards of different parameters are not contiguous
        self.contiguous_segments = [Segment(self, part.group, part.is_counted, part.offset, part.end) for part in parts]
        self._offsets = [part.offset for part in parts]
        self.allocate_state(plan, offset, torch.float32)

    def model_at(self, start: int, stop: int) -> Tensor:
        """Return the shard's elements of a range inside a param shard; live."""
        part = self._part_at(start)
        return _local_param(part)[start - part.offset : stop - part.offset]

    def grad_at(self, start: int, stop: int) -> Tensor:
        """Return the current gradients of a range inside a param shard; empty before the first backward."""
        part = self._part_at(start)
        grad = part.slot.param.grad
        if grad is None:
            return torch.empty(0, device=self.device)
        return shard_at(grad, part.start)[start - part.offset : stop - part.offset]

    def param_states(self, part: ParamShard) -> Iterator[ParamState]:
        """Iterate over the state of a param shard. NOTE: fp32_param is the parameter's own storage."""
        if self._names_main_params:
            yield ParamState(part.slot.param, MAIN, _local_param(part), part.start, part.stop)
        yield from super().param_states(part)

    def _part_at(self, start: int) -> ParamShard:
        return self.param_shards[bisect.bisect_right(self._offsets, start) - 1]


def _local_param(part: ParamShard) -> Tensor:
    return shard_at(part.slot.param, part.start)
