"""Main gradients: accumulation in flat buffers, and their reduction over data-parallel ranks.

Every parameter gets `main_grad`, a view of a flat buffer (fp32; bf16 with --grad-reduce-in-bf16 or --main-grads-dtype bf16). A hook
adds each fresh `.grad` to it and drops `.grad`, so only one gradient per parameter exists for long. The first micro-batch
overwrites instead of adding: nobody has to clear the buffer. The factor of the data-parallel mean is applied in the
same pass. With --gradient-accumulation-fusion the matmuls of linears, router, head and of experts one by one do all this themselves
(ops/main_grad.py), and their hooks find no `.grad`. A parameter of a bf16 buffer may add its micro-batches up in an fp32 tensor of its own, which is rounded once, when its
bucket is reduced (--ddp-param-name-patterns-for-fp32-local-accumulation).

Reduction works on buckets (flat.py): all-reduce, or with the distributed optimizer reduce-scatter (and, where it has several
instances, all-reduce of what a rank owns across them). A bf16 reduce-scatter may be an exchange, whose parts are added up in fp32 and
rounded once (--ddp-reduce-scatter-with-fp32-accumulation). With overlap a bucket is launched by the hook that completes it in
the last micro-batch of its model chunk: the schedule runs every other backward inside accumulate(). How often a parameter's hook
runs in that micro-batch is learned in the first iteration, which overlaps nothing: twice for a weight that two chunks share, or
whose gradient comes in parts because some of it was deferred. Buckets are launched strictly in one order, on every
rank the same: a rank on which some parameter received no gradient would otherwise issue its collectives in another
order than its peers, and they would hang or mix buckets. The order is the reverse of use, chunks included, and the chunks
of a pipeline stage finish in that order.
Cost: one pass over the gradients per micro-batch, one collective per bucket and iteration. torch's
DistributedDataParallel was rejected: it knows neither main gradients nor expert groups nor reduce-scatter.
"""

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.ops.main_grad import MainGradSum, adds_products
from moe_trainer.optim.flat import Bucket, FlatLayout, Slot, plan_layouts
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import info_of
from moe_trainer.parallel.state import Group, ParallelState


class GradBuffer:
    """The gradients of one layout."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, sharded: bool, factor: float, op: str, wide_sums: bool = False):
        """wide_sums: reduce-scatter narrower formats than fp32 with sums in fp32."""
        self.layout = layout
        self.sharded = sharded
        self.factor = factor
        self.op = op
        self.wide_sums = wide_sums and dtype != torch.float32 and layout.group.size > 1
        self.flat = layout.allocate(dtype)

    def owned(self, bucket: Bucket) -> Tensor:
        """The part of a bucket that is reduced on this rank."""
        start, stop = bucket.owned(self.layout.group, self.sharded)
        return self.flat[start:stop]

    def reduce(self, bucket: Bucket, side_stream: torch.cuda.Stream | None) -> Any:
        """Start the reduction of a bucket; returns the work object."""
        whole, group, outer = self.flat[bucket.start:bucket.stop], self.layout.group, self.layout.outer
        if not self.sharded:
            return collectives.all_reduce(whole, group, self.op, async_op=True)
        owned = self.owned(bucket)
        if self.wide_sums:
            inside = _WideSum(owned, whole, group, self.op)
        else:
            inside = collectives.reduce_scatter_flat(owned, whole, group, self.op, async_op=True)
        if outer.size == 1:
            return inside
        return _InTwoSteps(inside, lambda: collectives.all_reduce(owned, outer, self.op, async_op=True), side_stream)


class _WideSum:
    """A reduce-scatter that sends every rank its part of all others' as it is, and adds them up in fp32 when they are waited for."""

    def __init__(self, owned: Tensor, whole: Tensor, group: Group, op: str):
        self._owned, self._count, self._divisor = owned, group.size, group.size if op == "avg" else 1
        parts = [owned.numel()] * group.size
        self._flight = collectives.InFlight((whole,), parts, parts, group)

    def wait(self) -> None:
        received, = self._flight.wait()
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream(received.device))  # a side stream may add them up
        total = received.view(self._count, -1).sum(0, dtype=torch.float32)
        self._owned.copy_(total if self._divisor == 1 else total.div_(self._divisor))


class _InTwoSteps:
    """A reduction that begins when another one is complete.

    On CUDA both are queued at once, the second one behind a wait on a stream of its own. Elsewhere only the process itself can
    wait: the second begins with go_on(), after the backward pass.
    """

    def __init__(self, first: Any, second: Callable[[], Any], side_stream: torch.cuda.Stream | None):
        self._first, self._second, self._work = first, second, None
        if side_stream is not None:
            with torch.cuda.stream(side_stream):
                self.go_on()

    def go_on(self) -> None:
        if self._work is None:
            self._first.wait()
            self._work = self._second()

    def wait(self) -> None:
        self.go_on()
        self._work.wait()


class _PendingBucket:
    """A bucket on its way through one iteration."""

    def __init__(self, buffer: GradBuffer, bucket: Bucket):
        self.buffer = buffer
        self.bucket = bucket
        self.local: dict[Slot, Tensor] = {}  # where micro-batches are added up, if not in the buffer itself
        self.visits = dict.fromkeys(bucket.slots, 0)  # hooks that ran in the first iteration's last micro-batch
        self.reset()

    def reset(self) -> None:
        self.stale = set(self.bucket.slots)  # slots whose main_grad holds nothing of this iteration yet
        self.missing = {slot: max(1, visits) for slot, visits in self.visits.items()}  # hooks that the last one still has to run
        self.work: Any = None

    def visit(self, slot: Slot) -> None:
        """The last micro-batch's hook of a slot ran."""
        left = self.missing.pop(slot, 0) - 1
        if left > 0:
            self.missing[slot] = left


class DataParallelGrads:
    """Accumulates and reduces the gradients of a model.

    Use, per iteration: zero(); backward of all micro-batches but the last inside accumulate(); the last one outside;
    finish(); finalize.finalize_grads where a model replica has several ranks. Then `param.main_grad` (with the distributed optimizer: this rank's part of the buffers) is the mean over
    data-parallel ranks of the accumulated gradients, or their sum with `per_token_loss`. Gradients of experts are summed
    over edp but divided by the size of dp_cp: an expert sees the tokens of all ranks that send to it.
    """

    def __init__(self, params: Iterable[Parameter], ps: ParallelState, parallel: ParallelArgs, precision: PrecisionArgs, *,
                 per_token_loss: bool, main_grads: str = "fp32", whole: Callable[[Parameter], bool] = lambda param: False,
                 apart: Collection[Parameter] = (), fused: bool = False):
        """Allocate the buffers and register hooks. `params` in order of use. main_grads: --main-grads-dtype. whole, apart: see plan_layouts.
        fused: products may add to the buffers by themselves.

        Raises: ValueError when a parameter carries no ParamInfo.
        """
        self.sharded = parallel.use_distributed_optimizer
        self.overlap = parallel.overlap_grad_reduce
        self.buffers = tuple(
            GradBuffer(layout, main_grad_dtype(layout.dtype, precision, main_grads), self.sharded,
                       *_mean_factor(layout, ps, per_token_loss, parallel.ddp_average_in_collective),
                       wide_sums=parallel.ddp_reduce_scatter_with_fp32_accumulation)
            for layout in plan_layouts(params, ps, parallel, whole, apart))
        self._order = sorted((_PendingBucket(buffer, bucket) for buffer in self.buffers for bucket in buffer.layout.buckets),
                             key=lambda pending: -min(slot.position for slot in pending.bucket.slots))
        self._next = 0  # first bucket in order that is not launched
        self.finished = 0  # iterations
        self._accumulating = False
        self._added: set[Slot] = set()  # whose gradients products have added in this backward pass
        devices = {buffer.layout.device for buffer in self.buffers if buffer.layout.outer.size > 1}
        self._side_stream = next((torch.cuda.Stream(device) for device in devices if device.type == "cuda"), None)
        for pending in self._order:
            for slot in pending.bucket.slots:
                slot.param.main_grad = pending.buffer.flat[slot.start:slot.stop].view(slot.param.shape)
                if pending.buffer.flat.dtype != torch.float32 and _matches(slot, parallel.ddp_param_name_patterns_for_fp32_local_accumulation):
                    pending.local[slot] = torch.empty_like(slot.param.main_grad, dtype=torch.float32)
                hook = functools.partial(self._on_grad, pending, slot)
                slot.param.register_post_accumulate_grad_hook(hook)
                if fused:
                    slot.param.main_grad_sum = functools.partial(self._open_sum, pending, slot)

    def zero(self) -> None:
        """Begin an iteration. Costs nothing: the first micro-batch overwrites."""
        for pending in self._order:
            pending.reset()
        self._next = 0
        self._added.clear()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backward only accumulates; nothing is reduced.

        For every backward pass but the last one of each model chunk, and for the weight gradients that such a pass deferred.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Reduce what no hook has reduced yet, and wait for everything."""
        for pending in self._order[self._next:]:
            self._launch(pending)
        self._next = len(self._order)
        self.finished += 1
        for pending in self._order:
            if isinstance(pending.work, _InTwoSteps):
                pending.work.go_on()
        for pending in self._order:
            if pending.work is not None:
                pending.work.wait()
                pending.work = None

    def missing(self) -> list[set[Slot]]:
        """By bucket, the parameters that hooks have brought no gradient of this iteration for."""
        return [set(pending.stale) for pending in self._order]

    def set_missing(self, missing: list[set[Slot]]) -> None:
        """For backward passes without hooks (a replayed graph of them) that wrote the gradients of all others."""
        for pending, slots in zip(self._order, missing):
            pending.stale = set(slots)

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """The flat part of every main gradient that is reduced on this rank, in one order on every rank; may be empty."""
        for pending in self._order:
            buffer = pending.buffer
            low, high = pending.bucket.owned(buffer.layout.group, buffer.sharded)
            for slot in pending.bucket.slots:
                start = max(slot.start, low)
                yield slot, buffer.flat[start:max(start, min(slot.stop, high))]

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        for pending in self._order:
            pending.buffer.owned(pending.bucket).mul_(factor)

    def gather(self) -> None:
        """Make every `main_grad` whole on every rank after finish() (only the distributed optimizer has it in parts)."""
        if self.sharded:
            for pending in self._order:
                bucket, flat = pending.bucket, pending.buffer.flat
                collectives.all_gather_flat(flat[bucket.start:bucket.stop], pending.buffer.owned(bucket).clone(),
                                            pending.buffer.layout.group)

    @torch.no_grad()
    def _on_grad(self, pending: _PendingBucket, slot: Slot, param: Parameter) -> None:
        """Runs inside backward, once per parameter and micro-batch: .grad goes into main_grad."""
        if param.grad is not None:
            self._sum(pending, slot).add_gradient(param.grad)
            param.grad = None
        elif slot not in self._added:
            return  # this pass put its gradient off (parallel/weight_grads.py); it will come this way
        self._added.discard(slot)
        if self.overlap and not self._accumulating:
            if self.finished == 0:
                pending.visits[slot] += 1
            else:
                pending.visit(slot)
                self._launch_complete()

    def _sum(self, pending: _PendingBucket, slot: Slot) -> MainGradSum:
        """Where the next gradient of a parameter is added; the caller adds it."""
        assert pending.work is None, f"{slot.param.info.names[0]}: a gradient came after its bucket was reduced"
        beta = 0.0 if slot in pending.stale else 1.0
        pending.stale.discard(slot)
        return MainGradSum(pending.local.get(slot, slot.param.main_grad), beta, pending.buffer.factor)

    def _open_sum(self, pending: _PendingBucket, slot: Slot, operand: Tensor) -> MainGradSum | None:
        """The same for a product of tensors like `operand`; None where its gradient has to come by the hook."""
        if not adds_products(pending.local.get(slot, slot.param.main_grad), operand):
            return None
        self._added.add(slot)
        return self._sum(pending, slot)

    def _launch_complete(self) -> None:
        while self._next < len(self._order) and not self._order[self._next].missing:
            self._launch(self._order[self._next])
            self._next += 1

    @torch.no_grad()
    def _launch(self, pending: _PendingBucket) -> None:
        for slot in pending.stale:
            slot.param.main_grad.zero_()
        for slot, total in pending.local.items():
            if slot not in pending.stale:
                slot.param.main_grad.copy_(total)
        pending.stale.clear()
        pending.work = pending.buffer.reduce(pending.bucket, self._side_stream)


def main_grad_dtype(dtype: torch.dtype, precision: PrecisionArgs, main_grads: str = "fp32") -> torch.dtype:
    """fp32, but bf16 for bf16 parameters with --grad-reduce-in-bf16, and for all half-precision ones with --main-grads-dtype bf16."""
    narrow = precision.grad_reduce_in_bf16 and dtype == torch.bfloat16 or main_grads == "bf16" and dtype != torch.float32
    return torch.bfloat16 if narrow else torch.float32


def _matches(slot: Slot, patterns: Iterable[str]) -> bool:
    """Whether a parameter's global name is meant by one of the patterns; "all" means every one."""
    return any(pattern == "all" or fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in info_of(slot.param).names)


def _mean_factor(layout: FlatLayout, ps: ParallelState, per_token_loss: bool, average: bool) -> tuple[float, str]:
    """(factor on every local gradient, reduction) that together give the mean over dp_cp."""
    if per_token_loss:
        return 1.0, "sum"
    if average:
        return layout.group.size * layout.outer.size / ps.dp_cp.size, "avg"
    return 1.0 / ps.dp_cp.size, "sum"
