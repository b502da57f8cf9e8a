"""ZeRO stage 1: each data-parallel rank updates its shard of every bucket, then the parameters are all-gathered.

The gradient reduction of a bucket is a reduce-scatter, so a rank holds the reduced gradient of exactly the elements
whose main parameters and moments it owns (`Bucket.owned_range`). After the step each bucket of model parameters is
all-gathered in place. With several instances (--num-distributed-optimizer-instances) each instance does so among its
ranks.

With overlap all gathers are launched at once, in order of use, and run during the next forward: a hook before each
module waits for the buckets of that module's parameters. The fixed order keeps the collectives of all ranks aligned
whatever their forward does. A CUDA graph of the full iteration launches them itself, at its start (`defer`): a wait
inside a graph is for what is launched inside.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.optim.buckets import Bucket, FlatLayout
from moe_trainer.parallel import collectives


class GatherBuffer(NamedTuple):
    """Flat model parameters of a layout.

    Args:
        flat: one number per parameter, or one byte for several.
        finish: called with every bucket that has been gathered.
    """

    layout: FlatLayout
    flat: Tensor
    finish: Callable[[Bucket], None] | None = None

    def span(self, start: int, stop: int) -> Tensor:
        """Return what holds elements [start, stop) of the layout."""
        per_item = self.layout.size // self.flat.numel()
        return self.flat[start // per_item : stop // per_item]


class ParamGather:
    """All-gathers the model parameters of all buckets from the shards that the ranks have updated.

    Without buffers there is nothing to gather.
    """

    def __init__(self, params: Sequence[GatherBuffer], chunks: Sequence[nn.Module], overlap: bool):
        """Sort the buckets in order of use.

        Args:
            chunks: modules whose forward waits for the gathers, with overlap.
        """
        self.overlap = overlap and bool(params)
        self._buckets: list[tuple[GatherBuffer, Bucket]] = sorted(
            ((buffer, bucket) for buffer in params for bucket in buffer.layout.buckets),
            key=lambda entry: min(slot.position for slot in entry[1].slots),
        )
        self._works: list[Any] = [None] * len(self._buckets)
        self.pending = 0  # launched gathers that have not been waited for
        self._launched = 0
        indices = {slot.param: index for index, (_, bucket) in enumerate(self._buckets) for slot in bucket.slots}
        self._hooks = _ForwardHooks(chunks, indices, self) if self.overlap else None
        self._defers = self._is_due = False

    def defer(self) -> None:
        """Leave the gathers to `start_deferred` at the start of the next iteration, if they overlap it."""
        self._defers = self.overlap

    def start_deferred(self, always: bool = False) -> None:
        """Launch the gathers that `start` has left; with `always` even if there was no update since the last ones."""
        if self._is_due or (always and self._defers):
            self._launch_all()

    def mark_finished(self) -> None:
        """Set the state after a replayed CUDA graph, which has gathered and waited without Python."""
        self._is_due = False

    def leading(self, ready: Callable[[Bucket], bool]) -> list[Bucket]:
        """Return the first buckets in order of use, up to the first that is not ready."""
        return list(itertools.takewhile(ready, (bucket for _, bucket in self._buckets)))

    def start(self, count: int | None = None) -> None:
        """Launch the gathers of all buckets that are not in flight, in order of use; without overlap also wait.

        Deferred gathers (`defer`) are not launched yet.

        Args:
            count: launch only the first `count` gathers and do not wait; a second call launches the rest.
        """
        if self._defers:
            self._is_due = True
            return
        if count is None:
            self._launch_all()
        else:
            self._launch(count)

    def _launch_all(self) -> None:
        self._launch(len(self._buckets))
        self._launched, self._is_due = 0, False
        if self._hooks is None or not self._hooks.ready():
            self.wait_all()
            return
        for index in self._hooks.uncovered:
            self.wait(index)

    def _launch(self, stop_at: int) -> None:
        for index in range(self._launched, stop_at):
            buffer, bucket = self._buckets[index]
            owned, group = bucket.owned_range(buffer.layout.group, True), buffer.layout.group
            self._works[index] = collectives.all_gather_flat(
                buffer.span(bucket.start, bucket.stop), buffer.span(*owned), group, async_op=True
            )
            self.pending += 1
        self._launched = stop_at

    def wait(self, index: int) -> None:
        """Wait for one bucket."""
        work, self._works[index] = self._works[index], None
        if work is not None:
            work.wait()
            self.pending -= 1
            buffer, bucket = self._buckets[index]
            if buffer.finish is not None:
                buffer.finish(bucket)

    def wait_all(self) -> None:
        """Wait for all buckets, also those that are not launched yet."""
        self.start_deferred()
        if self.pending:
            for index in range(len(self._works)):
                self.wait(index)


class _ForwardHooks:
    """Waits, before each module's forward, for the buckets that it reads.

    Modules whose parameters are read by a parent that never calls them (stacked experts, tied heads) are found by
    observing the first forward: their nearest called ancestor waits.
    """

    def __init__(self, chunks: Sequence[nn.Module], bucket_indices: dict[Parameter, int], gather: ParamGather):
        self._gather, self._chunks, self._bucket_indices = gather, chunks, bucket_indices
        self._called: set[nn.Module] = set()
        self._reads: dict[nn.Module, tuple[int, ...]] | None = None
        self.uncovered: tuple[int, ...] = ()  # buckets read by no module that is called
        for chunk in chunks:
            for module in chunk.modules():
                module.register_forward_pre_hook(self._before_forward)

    def ready(self) -> bool:
        """Return whether a forward has been observed, so the called modules are known."""
        if self._reads is None and self._called:
            self._plan()
        return self._reads is not None

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        if self._reads is None:
            self._called.add(module)
        elif self._gather.pending:
            for index in self._reads.get(module, ()):
                self._gather.wait(index)

    def _plan(self) -> None:
        reads: dict[nn.Module | None, set[int]] = {None: set()}
        for chunk in self._chunks:
            self._visit(chunk, None, reads)
        self.uncovered = tuple(sorted(reads[None]))
        self._reads = {
            module: tuple(sorted(indices)) for module, indices in reads.items() if module is not None and indices
        }

    def _visit(self, module: nn.Module, caller: nn.Module | None, reads: dict[nn.Module | None, set[int]]) -> None:
        """Assign the parameters under `module` to the nearest called module at or above them."""
        caller = module if module in self._called else caller
        indices = (self._bucket_indices[p] for p in module.parameters(recurse=False) if p in self._bucket_indices)
        reads.setdefault(caller, set()).update(indices)
        for child in module.children():
            self._visit(child, caller, reads)
