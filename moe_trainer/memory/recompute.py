"""Computing activations again in backward, instead of keeping them: two ways.

* A region (`run_region`) keeps its inputs only. The first time backward asks for anything that was saved inside, the whole region
  runs again, by torch's non-reentrant checkpointing: the graph of the first pass stays and does the backward, the second pass only
  fills in what it saved. So gradients that are attached inside (auxiliary losses) enter once, and hooks on parameters run once.
* `Discarded` outputs belong to something cheap whose own graph keeps no more than its inputs (a norm, an up-projection). It runs as
  ever; but where its outputs are saved by their consumers, a handle is kept in their place, and the outputs are computed again, once
  and without a graph, when the first handle is asked for.

The second pass must give what the first gave. Random numbers: torch's global state is put back by torch, the chunk's own stream
(parallel/rng.py) by `Tape`. What must happen once, or must not be decided anew, goes through `Tape.once`: the first pass writes down
what it gave, the second reads it (choices of experts, counts and losses of routers, random biases). Collectives inside run again, in
the order of backward, which is that of every rank.

Only the part of a second pass up to the last tensor that is missing runs, on all ranks alike (torch's early stop).

Rejected: the reentrant form (a graph inside backward: parameter hooks and deferred gradients would see other passes), and keeping
the routing of a region by keeping its tensors (they would have to be told from those that are recomputed).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_trainer.parallel.collectives import all_gather_flat
from moe_trainer.parallel.rng import ShardStream
from moe_trainer.parallel.state import Group

T = TypeVar("T")


class Tape:
    """What happened once in the first pass of a region, for its second."""

    def __init__(self, stream: ShardStream | None = None):
        """stream: random numbers that the region may draw."""
        self._stream = stream
        self._values: list[Any] = []
        self._started: Tensor | None = None
        self._place: int | None = None
        self.playing = False

    def once(self, compute: Callable[[], T]) -> T:
        """In the first pass compute, in the second return what that gave."""
        if self.playing:
            self._place += 1
            return self._values[self._place - 1]
        self._values.append(compute())
        return self._values[-1]

    @contextlib.contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """One pass of the region: the first one records, later ones play."""
        self.playing, self._place = self._place is not None, 0
        generator = None if self._stream is None else self._stream.generator(device)
        if generator is None:
            yield
            return
        before = generator.get_state()
        if not self.playing:
            self._started = before
            yield
            return
        generator.set_state(self._started)
        try:
            yield
        finally:
            generator.set_state(before)


def run_region(fn: Callable[..., Any], tensors: Sequence[Tensor], *, draws: bool, shared_by: Group | None = None) -> Any:
    """Return fn(*tensors) and keep the tensors alone; fn is called again in backward.

    draws: fn may take random numbers from torch's global generators. shared_by: ranks that hold the same tensors, each of which
    keeps a part of them (--distribute-saved-activations); they are gathered again in backward.
    """
    spread = contextlib.nullcontext() if shared_by is None or shared_by.size == 1 else _own_parts(shared_by)
    with spread:
        return checkpoint(fn, *tensors, use_reentrant=False, preserve_rng_state=draws)


def _own_parts(group: Group) -> saved_tensors_hooks:
    def pack(x: Tensor) -> Any:
        if x.numel() == 0 or x.numel() % group.size:
            return x.detach() if x.grad_fn is not None else x
        return x.detach().reshape(group.size, -1)[group.rank].clone(), x.shape

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        part, shape = kept
        whole = part.new_empty(shape)
        all_gather_flat(whole.view(-1), part, group)
        return whole

    return saved_tensors_hooks(pack, unpack)


class Discarded:
    """Outputs of `fn` that are not kept; `get` computes them again. They live from then on until the last handle is gone."""

    def __init__(self, fn: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]):
        """inputs: brings the arguments of fn."""
        self._fn, self._inputs = fn, inputs
        self._outputs: tuple[Tensor, ...] | None = None

    def get(self, index: int) -> Tensor:
        """Output number `index`, without a graph."""
        if self._outputs is None:
            with torch.no_grad():
                self._outputs = as_tuple(self._fn(*self._inputs()))
        return self._outputs[index]


class Handle:
    """Stands for a saved tensor that is an output of `source`, or a view of one."""

    def __init__(self, source: Discarded, index: int, x: Tensor):
        self._source, self._index = source, index
        self._geometry = x.size(), x.stride(), x.storage_offset()

    def get(self) -> Tensor:
        """The tensor."""
        return self._source.get(self._index).as_strided(*self._geometry)


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One output or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
