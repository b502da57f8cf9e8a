"""Recomputation of activations in backward, in two ways.

* A region (`run_recomputed`) saves its inputs only. When backward needs the first tensor saved inside, the region
  runs again, by torch's non-reentrant checkpointing: the graph of the first pass remains and runs backward, the
  second pass only refills the saved tensors. So gradients attached inside (auxiliary losses) count once, and hooks on
  parameters run once.
* `RecomputedOutput`: output of a cheap function whose own graph saves its inputs only (a norm, an up-projection).
  Where consumers save it, a handle is saved instead, and the first handle that is read recomputes the output, once
  and without a graph.

The second pass must reproduce the first. torch restores its global random state, `ReplayCache` that of the chunk's
generator (parallel/rng.py). Decisions and counts (choices of experts, losses of routers, random biases) go through
`ReplayCache.cached`, which replays the value of the first pass. Collectives inside run again, in the order of
backward, which is the same on every rank. torch stops the second pass after the last missing tensor, on all ranks
alike.

Rejected: reentrant checkpointing (its graph inside backward makes parameter hooks and deferred gradients see other
passes), and saving the routing's tensors in a region (they would have to be distinguished from recomputed ones).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_trainer.parallel.collectives import all_gather_flat
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import Group

T = TypeVar("T")


class ReplayCache:
    """Values and random state of the first pass of a region, for its second."""

    def __init__(self, stream: ShardRNG | None = None):
        """Create an empty cache; `stream` is the random generator that the region may use."""
        self._stream = stream
        self._values: list[Any] = []
        self._position = 0
        self._has_run = self.is_replaying = False

    def cached(self, compute: Callable[[], T]) -> T:
        """Compute a value in the first pass; return the same value in the second."""
        if self.is_replaying:
            self._position += 1
            return self._values[self._position - 1]
        self._values.append(compute())
        return self._values[-1]

    @contextlib.contextmanager
    def run_pass(self, device: torch.device) -> Iterator[None]:
        """Enter one pass of the region: the first one records, later ones replay."""
        self.is_replaying, self._has_run, self._position = self._has_run, True, 0
        generator = None if self._stream is None else self._stream.generator(device)
        if generator is None:
            yield
            return
        before = generator.get_state()
        first = self.cached(lambda: before)
        if not self.is_replaying:
            yield
            return
        generator.set_state(first)
        try:
            yield
        finally:
            generator.set_state(before)


def run_recomputed(
    fn: Callable[..., Any], tensors: Sequence[Tensor], *, uses_global_rng: bool, shared_by: Group | None = None
) -> Any:
    """Return fn(*tensors) and save the tensors only; fn runs again in backward.

    Args:
        fn: the region.
        tensors: its inputs.
        uses_global_rng: fn may draw from torch's global generators.
        shared_by: ranks that hold the same tensors, each of which saves a shard (--distribute-saved-activations).
    """
    hooks = contextlib.nullcontext() if shared_by is None or shared_by.size == 1 else _save_shards(shared_by)
    with hooks:
        return checkpoint(fn, *tensors, use_reentrant=False, preserve_rng_state=uses_global_rng)


def _save_shards(group: Group) -> saved_tensors_hooks:
    def pack(x: Tensor) -> Any:
        if x.numel() == 0 or x.numel() % group.size:
            return x.detach() if x.grad_fn is not None else x
        return x.detach().reshape(group.size, -1)[group.rank].clone(), x.shape

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        shard, shape = saved
        full = shard.new_empty(shape)
        all_gather_flat(full.view(-1), shard, group)
        return full

    return saved_tensors_hooks(pack, unpack)


class RecomputedOutput:
    """Outputs of a function that are not saved. `get` recomputes them; they live until the last handle is gone."""

    def __init__(self, fn: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]):
        """Store the function; `inputs` returns its arguments."""
        self._fn, self._inputs = fn, inputs
        self._outputs: tuple[Tensor, ...] | None = None

    def get(self, index: int) -> Tensor:
        """Return output number `index`, without a graph."""
        if self._outputs is None:
            with torch.no_grad():
                self._outputs = as_tuple(self._fn(*self._inputs()))
        return self._outputs[index]


class RecomputedTensor:
    """Handle of a saved tensor: output number `index` of `source` (activations.OutputSource), or a view of one."""

    def __init__(self, source: Any, index: int, x: Tensor):
        self._source, self._index = source, index
        self._geometry = x.size(), x.stride(), x.storage_offset()

    def get(self) -> Tensor:
        return self._source.get(self._index).as_strided(*self._geometry)


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
