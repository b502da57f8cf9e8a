"""ZeRO stage 1: each data-parallel rank steps its part of every bucket, then the parameters are gathered.

The gradient reduction of a bucket is a reduce-scatter, so a rank holds the reduced gradient of exactly the elements whose
main parameters and moments it keeps (flat.Bucket.owned). After the step each bucket of model parameters is
all-gathered in place. With several instances (--num-distributed-optimizer-instances) each of them does so among its own ranks:
they hold the same gradients by then, so they step alike.

With --overlap-param-gather-with-optimizer-step the first chunk's parameters are updated first, and their gathers are launched before the
other chunks are updated. They have buckets of their own, which are the first in the order of use: so the order of all gathers stays.

With overlap all gathers are launched at once, in order of use, and run beside the next forward: a hook before each
module waits for the buckets of that module's parameters only. Launching everything in one fixed order keeps the
collectives of all ranks in step whatever their forward does. Modules whose parameters are read by a parent that never calls
them (stacked experts, tied heads) are found by watching the first forward: their nearest called ancestor waits.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.optim.flat import Bucket, FlatLayout
from moe_trainer.parallel import collectives


class ParamGather:
    """Gathers the model parameters of all buckets from the parts that their ranks have stepped."""

    def __init__(self, params: Sequence[tuple[FlatLayout, Tensor]], chunks: Sequence[nn.Module], overlap: bool):
        """params: layouts with the flat model parameters. chunks: the modules whose forward must wait, when overlapping."""
        self.overlap = overlap
        self._buckets: list[tuple[FlatLayout, Tensor, Bucket]] = sorted(
            ((layout, flat, bucket) for layout, flat in params for bucket in layout.buckets),
            key=lambda entry: min(slot.position for slot in entry[2].slots))
        self._works: list[Any] = [None] * len(self._buckets)
        self._pending = self._launched = 0
        self._hooks = _ForwardHooks(chunks, self._bucket_of(), self) if overlap else None

    def leading(self, ready: Callable[[Bucket], bool]) -> list[Bucket]:
        """The first buckets in order of use, as far as they are ready."""
        return list(itertools.takewhile(ready, (bucket for _, _, bucket in self._buckets)))

    def start(self, count: int | None = None) -> None:
        """Launch the gathers of all buckets that are not under way, in order of use; without overlap also wait.

        count: only of the first ones, and do not wait; the rest follows with a second call.
        """
        stop_at = len(self._buckets) if count is None else count
        for index in range(self._launched, stop_at):
            layout, flat, bucket = self._buckets[index]
            start, stop = bucket.owned(layout.group, True)
            self._works[index] = collectives.all_gather_flat(flat[bucket.start:bucket.stop], flat[start:stop],
                                                             layout.group, async_op=True)
            self._pending += 1
        if count is not None:
            self._launched = stop_at
            return
        self._launched = 0
        if self._hooks is None or not self._hooks.ready():
            self.wait_all()
            return
        for index in self._hooks.uncovered:
            self.wait(index)

    def wait(self, index: int) -> None:
        """Wait for one bucket."""
        work, self._works[index] = self._works[index], None
        if work is not None:
            work.wait()
            self._pending -= 1

    def wait_all(self) -> None:
        """Wait for all buckets."""
        if self._pending:
            for index in range(len(self._works)):
                self.wait(index)

    @property
    def pending(self) -> int:
        """Buckets that nobody has waited for yet."""
        return self._pending

    def _bucket_of(self) -> dict[Parameter, int]:
        return {slot.param: index for index, (_, _, bucket) in enumerate(self._buckets) for slot in bucket.slots}


class _ForwardHooks:
    """Waits, before each module's forward, for the buckets that it reads."""

    def __init__(self, chunks: Sequence[nn.Module], bucket_of: dict[Parameter, int], gather: ParamGather):
        self._gather = gather
        self._chunks = chunks
        self._bucket_of = bucket_of
        self._called: set[nn.Module] = set()
        self._reads: dict[nn.Module, tuple[int, ...]] | None = None
        self.uncovered: tuple[int, ...] = ()  # buckets read by no module that is called
        for chunk in chunks:
            for module in chunk.modules():
                module.register_forward_pre_hook(self._before_forward)

    def ready(self) -> bool:
        """Whether a forward has been seen, so that it is known which modules are called."""
        if self._reads is None and self._called:
            self._plan()
        return self._reads is not None

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        if self._gather.pending:
            for index in self._reads.get(module, ()):
                self._gather.wait(index)
        elif self._reads is None:
            self._called.add(module)

    def _plan(self) -> None:
        reads: dict[nn.Module | None, set[int]] = {None: set()}
        for chunk in self._chunks:
            self._visit(chunk, None, reads)
        self.uncovered = tuple(sorted(reads.pop(None)))
        self._reads = {module: tuple(sorted(indices)) for module, indices in reads.items() if indices}

    def _visit(self, module: nn.Module, caller: nn.Module | None, reads: dict[nn.Module | None, set[int]]) -> None:
        """Charge the parameters under `module` to the nearest called module at or above them."""
        caller = module if module in self._called else caller
        own = (self._bucket_of[p] for p in module.parameters(recurse=False) if p in self._bucket_of)
        reads.setdefault(caller, set()).update(own)
        for child in module.children():
            self._visit(child, caller, reads)
