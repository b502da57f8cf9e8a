"""Main gradients: accumulation in flat buffers, and their reduction over data-parallel ranks.

Every parameter gets `main_grad`, a view of a flat buffer (fp32; bf16 with --grad-reduce-in-bf16 or --main-grads-dtype
bf16). A hook adds each fresh `.grad` to it and drops `.grad`. The first microbatch overwrites instead of adding, so
nothing is cleared. The factor of the data-parallel mean is applied in the same pass. With
--gradient-accumulation-fusion the weight gradient GEMMs do all this themselves (ops/main_grad.py).

Buckets (buckets.py) are all-reduced, or with the distributed optimizer reduce-scattered. With overlap a bucket is
launched by the hook that completes it in the last microbatch of its model chunk. Buckets are launched in one fixed
order, the reverse of use: a rank on which some parameter received no gradient would otherwise issue its collectives in
another order. docs/design/optimizer.md has more.
"""

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from arguments.mechanisms.shardings import get_sharding
from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.ops.main_grad import MainGradSum, can_accumulate_gemm, set_main_grad, set_main_grad_sum
from moe_trainer.optim.buckets import Bucket, FlatLayout, Slot
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import Group, ParallelState


class GradBuffer:
    """Flat gradients of one layout."""

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        is_sharded: bool,
        factor: float,
        op: str,
        sums_in_fp32: bool = False,
    ):
        """Allocate the buffer.

        Args:
            factor: multiplies every local gradient.
            op: reduction, "sum" or "avg".
            sums_in_fp32: reduce-scatter narrower dtypes than fp32 with fp32 sums.
        """
        self.layout, self.is_sharded, self.factor, self.op = layout, is_sharded, factor, op
        self.sums_in_fp32 = sums_in_fp32 and dtype != torch.float32 and layout.group.size > 1
        self.flat = layout.allocate(dtype)

    def owned(self, bucket: Bucket) -> Tensor:
        """Return the part of a bucket that is reduced on this rank."""
        start, stop = bucket.owned_range(self.layout.group, self.is_sharded)
        return self.flat[start:stop]

    def reduce(self, bucket: Bucket, side_stream: torch.cuda.Stream | None) -> Any:
        """Start the reduction of a bucket and return its work object."""
        full, group, outer = self.flat[bucket.start : bucket.stop], self.layout.group, self.layout.outer
        if not self.is_sharded:
            return collectives.all_reduce(full, group, self.op, async_op=True)
        owned = self.owned(bucket)
        if self.sums_in_fp32:
            inner = _Fp32ReduceScatter(owned, full, group, self.op)
        else:
            inner = collectives.reduce_scatter_flat(owned, full, group, self.op, async_op=True)
        if outer.size == 1:
            return inner
        return _ChainedReduction(
            inner, lambda: collectives.all_reduce(owned, outer, self.op, async_op=True), side_stream
        )


class _Fp32ReduceScatter:
    """A reduce-scatter with fp32 sums: an all-to-all whose parts are summed when waited for."""

    def __init__(self, owned: Tensor, full: Tensor, group: Group, op: str):
        self._owned, self._count, self._divisor = owned, group.size, group.size if op == "avg" else 1
        parts = [owned.numel()] * group.size
        self._exchange = collectives.PendingAllToAll((full,), parts, parts, group)

    def wait(self) -> None:
        (received,) = self._exchange.wait()
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream(received.device))  # the sum may run on a side stream
        total = received.view(self._count, -1).sum(0, dtype=torch.float32)
        self._owned.copy_(total if self._divisor == 1 else total.div_(self._divisor))


class _ChainedReduction:
    """A reduction that starts once another one is complete.

    On CUDA both are queued at once, the second after a wait on a side stream. Elsewhere only the host can wait:
    start_next(), called after the backward pass, starts the second.
    """

    def __init__(self, first: Any, second: Callable[[], Any], side_stream: torch.cuda.Stream | None):
        self._first, self._second = first, second
        self._work: Any = None
        if side_stream is not None:
            with torch.cuda.stream(side_stream):
                self.start_next()

    def start_next(self) -> None:
        if self._work is None:
            self._first.wait()
            self._work = self._second()

    def wait(self) -> None:
        self.start_next()
        self._work.wait()


class _PendingBucket:
    """State of a bucket during one iteration."""

    def __init__(self, buffer: GradBuffer, bucket: Bucket):
        self.buffer, self.bucket = buffer, bucket
        self.local: dict[Slot, Tensor] = {}  # fp32 sums of microbatches, for slots with fp32 local accumulation
        self.hook_counts = dict.fromkeys(bucket.slots, 0)  # per last microbatch, counted in the first iteration
        self.reset()

    def reset(self) -> None:
        self.stale = set(self.bucket.slots)  # slots without a gradient of this iteration
        # hook calls until complete, in the last microbatch
        self.missing = {slot: max(1, count) for slot, count in self.hook_counts.items()}
        self.work: Any = None

    def count_hook(self, slot: Slot) -> None:
        """Record a hook call of the last microbatch."""
        remaining = self.missing.pop(slot, 0) - 1
        if remaining > 0:
            self.missing[slot] = remaining


class DataParallelGrads:
    """Accumulates and reduces the gradients of a model.

    Per iteration: zero(); backward of all microbatches but the last inside accumulate(); the last one outside;
    finish(); finalize.finalize_grads. Then `param.main_grad` (with the distributed optimizer: this rank's shard of it)
    is the mean over data-parallel ranks of the accumulated gradients, or their sum with `per_token_loss`. Gradients of
    experts are summed over edp but divided by the size of dp_cp: an expert processes the tokens of all ranks that send
    to it.
    """

    def __init__(
        self,
        layouts: Iterable[FlatLayout],
        ps: ParallelState,
        parallel: ParallelArgs,
        precision: PrecisionArgs,
        *,
        per_token_loss: bool,
        main_grads: str = "fp32",
        fused: bool = False,
        library: FusedLibrary | None = None,
    ):
        """Allocate the buffers and register hooks.

        Args:
            layouts: of the parameters (`plan_layouts`).
            main_grads: --main-grads-dtype.
            fused: GEMMs may add to the buffers (--gradient-accumulation-fusion).
            library: see MainGradSum.
        """
        self._library = library
        self.is_sharded = get_sharding(parallel).shards_flat_state
        self.overlap = parallel.overlap_grad_reduce
        self.buffers = tuple(
            GradBuffer(
                layout,
                main_grad_dtype(layout.dtype, precision, main_grads),
                self.is_sharded,
                *_mean_factor(layout, ps, per_token_loss, parallel.ddp_average_in_collective),
                sums_in_fp32=parallel.ddp_reduce_scatter_with_fp32_accumulation,
            )
            for layout in layouts
        )
        self._order = sorted(
            (_PendingBucket(buffer, bucket) for buffer in self.buffers for bucket in buffer.layout.buckets),
            key=lambda pending: -min(slot.position for slot in pending.bucket.slots),
        )
        self._next = 0  # first bucket that is not launched
        self.num_finished = 0  # iterations
        self._accumulating = False
        # called once before the first gradient of an iteration: the buffers may hold parameters until then
        self.before_accumulation: Callable[[], None] | None = None
        self._is_fresh = True
        self._fused_slots: set[Slot] = set()  # gradients that GEMMs have added in this backward pass
        devices = {buffer.layout.device for buffer in self.buffers if buffer.layout.outer.size > 1}
        self._side_stream = next((torch.cuda.Stream(device) for device in devices if device.type == "cuda"), None)
        self._hooks: list[RemovableHandle] = []
        for pending in self._order:
            for slot in pending.bucket.slots:
                main_grad = pending.buffer.flat[slot.start : slot.stop].view(slot.param.shape)
                set_main_grad(slot.param, main_grad)
                if pending.buffer.flat.dtype != torch.float32 and _matches(
                    slot, parallel.ddp_param_name_patterns_for_fp32_local_accumulation
                ):
                    pending.local[slot] = torch.empty_like(main_grad, dtype=torch.float32)
                hook = functools.partial(self._on_grad, pending, slot)
                self._hooks.append(slot.param.register_post_accumulate_grad_hook(hook))
                if fused:
                    accumulator = pending.local.get(slot, main_grad)
                    set_main_grad_sum(slot.param, functools.partial(self._open_sum, pending, slot), accumulator.dtype)

    def close(self) -> None:
        """Remove the hooks, which keep the parameters and all process groups alive where no garbage collector looks."""
        for hook in self._hooks:
            hook.remove()

    def zero(self) -> None:
        """Start an iteration. Nothing is cleared: the first microbatch overwrites."""
        for pending in self._order:
            pending.reset()
        self._next = 0
        self._is_fresh = True
        self._fused_slots.clear()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate without reduction inside the context.

        For every backward pass but the last one of each model chunk, and for the weight gradients that such a pass
        deferred.
        """
        previous, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = previous

    def finish(self) -> None:
        """Reduce the buckets that no hook has launched, and wait for all."""
        for pending in self._order[self._next :]:
            self._launch(pending)
        self._next = len(self._order)
        self.num_finished += 1
        for pending in self._order:
            if isinstance(pending.work, _ChainedReduction):
                pending.work.start_next()
        for pending in self._order:
            if pending.work is not None:
                pending.work.wait()
                pending.work = None

    def get_finished(self) -> None:
        """Return None: a CUDA graph leaves the gradients in the buffers."""

    def mark_finished(self, finished: None = None) -> None:
        """Set the state after finish(): a replayed CUDA graph has accumulated and reduced without hooks."""
        for pending in self._order:
            pending.stale.clear()
        self._next = len(self._order)
        self.num_finished += 1

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """Iterate over this rank's part of every main gradient, flat, in the same order on every rank; may be empty."""
        for pending in self._order:
            buffer = pending.buffer
            low, high = pending.bucket.owned_range(buffer.layout.group, buffer.is_sharded)
            for slot in pending.bucket.slots:
                start = max(slot.start, low)
                yield slot, buffer.flat[start : max(start, min(slot.stop, high))]

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        for pending in self._order:
            pending.buffer.owned(pending.bucket).mul_(factor)

    def gather(self) -> None:
        """All-gather every `main_grad` after finish(); only the distributed optimizer shards it."""
        if self.is_sharded:
            for pending in self._order:
                bucket, flat = pending.bucket, pending.buffer.flat
                collectives.all_gather_flat(
                    flat[bucket.start : bucket.stop], pending.buffer.owned(bucket).clone(), pending.buffer.layout.group
                )

    @torch.no_grad()
    def _on_grad(self, pending: _PendingBucket, slot: Slot, param: Parameter) -> None:
        """Add .grad to main_grad; runs inside backward, once per parameter and microbatch."""
        if param.grad is not None:
            self._sum(pending, slot).add_gradient(param.grad)
            param.grad = None
        elif slot not in self._fused_slots:
            return  # this pass deferred its gradient (parallel/weight_grads.py), which will call the hook again
        self._fused_slots.discard(slot)
        if self.overlap and not self._accumulating:
            if self.num_finished == 0:
                pending.hook_counts[slot] += 1
            else:
                pending.count_hook(slot)
                self._launch_complete()

    def _sum(self, pending: _PendingBucket, slot: Slot) -> MainGradSum:
        """Return the accumulator of a parameter's next gradient; the caller adds to it."""
        assert pending.work is None, (
            f"{get_param_info(slot.param).names[0]}: a gradient was computed after its bucket was reduced"
        )
        self._prepare()
        beta = 0.0 if slot in pending.stale else 1.0
        pending.stale.discard(slot)
        return MainGradSum(pending.local.get(slot, slot.main_grad), beta, pending.buffer.factor, self._library)

    def _open_sum(self, pending: _PendingBucket, slot: Slot, operand: Tensor) -> MainGradSum | None:
        """Return the accumulator for a GEMM of tensors like `operand`; None if the gradient must use the hook."""
        if not can_accumulate_gemm(pending.local.get(slot, slot.main_grad), operand):
            return None
        self._fused_slots.add(slot)
        return self._sum(pending, slot)

    def _launch_complete(self) -> None:
        while self._next < len(self._order) and not self._order[self._next].missing:
            self._launch(self._order[self._next])
            self._next += 1

    def _prepare(self) -> None:
        """Wait until the buffers are free for gradients."""
        if self._is_fresh:
            self._is_fresh = False
            if self.before_accumulation is not None:
                self.before_accumulation()

    @torch.no_grad()
    def _launch(self, pending: _PendingBucket) -> None:
        self._prepare()
        for slot in pending.stale:
            slot.main_grad.zero_()
        for slot, total in pending.local.items():
            if slot not in pending.stale:
                slot.main_grad.copy_(total)
        pending.stale.clear()
        pending.work = pending.buffer.reduce(pending.bucket, self._side_stream)


def main_grad_dtype(dtype: torch.dtype, precision: PrecisionArgs, main_grads: str = "fp32") -> torch.dtype:
    """Return the dtype of main gradients: fp32 unless --grad-reduce-in-bf16 or --main-grads-dtype says bf16."""
    is_bf16 = (
        precision.grad_reduce_in_bf16 and dtype == torch.bfloat16 or main_grads == "bf16" and dtype != torch.float32
    )
    return torch.bfloat16 if is_bf16 else torch.float32


def _matches(slot: Slot, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's global name matches one of the patterns; "all" matches every name."""
    return any(
        pattern == "all" or fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
        for name in get_param_info(slot.param).names
    )


def _mean_factor(layout: FlatLayout, ps: ParallelState, per_token_loss: bool, average: bool) -> tuple[float, str]:
    """Return (factor of every local gradient, reduction) that together compute the mean over dp_cp."""
    if per_token_loss:
        return 1.0, "sum"
    if average:
        return layout.group.size * layout.outer.size / ps.dp_cp.size, "avg"
    return 1.0 / ps.dp_cp.size, "sum"
