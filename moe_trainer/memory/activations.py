"""What becomes of the activations of a model chunk between forward and backward: kept, computed again, or sent to the host.

Layers name their parts and leave the rest to the chunk's `Activations`, which the kit carries:

    activations.region("core_attn", fn, q, k, v)             run fn; if this part is recomputed, keep its inputs only
    y, inside = activations.discarding("layernorm", fn, x)   run fn; in `with inside:` its output is not kept by what saves it
    with activations.offloading("qkv_linear"):               what is saved in here goes to the host
    activations.once(compute)                                what must not happen again when a region runs for the second time

Which parts those are is decided when the model is built (model/build.py). Parts inside a region that is recomputed are left alone:
nothing of them is kept anyway.

torch applies only the innermost pair of hooks to a tensor that is saved. So all of this goes through one pair, which asks in this order:
is the tensor discarded, does it go to the host, else it stays. Regions push a pair of their own; what they keep, their inputs, passes
through ours.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from moe_trainer.memory.offload import Offload
from moe_trainer.memory.recompute import Discarded, Handle, Tape, as_tuple, run_region
from moe_trainer.memory.stash import PagedStash
from moe_trainer.parallel.rng import ShardStream
from moe_trainer.parallel.state import Group

T = TypeVar("T")
Scope = contextlib.AbstractContextManager


class Activations:
    """Recompute and offload of one chunk; without arguments everything is kept.

    recomputed: names of parts. draws: may parts take random numbers from torch's global generators? stream: the chunk's own.
    shared_by: ranks that hold the same inputs of regions; each keeps a part of them. offload: None: nothing goes to the host.
    stash: where experts' buffers go; None: they stay.
    """

    def __init__(self, recomputed: frozenset[str] = frozenset(), *, draws: bool = True, stream: ShardStream | None = None,
                 shared_by: Group | None = None, offload: Offload | None = None, stash: PagedStash | None = None):
        self.recomputed, self.offload, self.stash = recomputed, offload, stash
        self._draws, self._stream, self._shared_by = draws, stream, shared_by
        self._tape: Tape | None = None
        self._discarded: dict[int, tuple[StorageWeakRef, Discarded, int]] = {}
        self._store: Callable[[Tensor], Callable[[], Tensor] | None] | None = None
        self._resident: set[int] = set()

    @property
    def replaying(self) -> bool:
        """Is a region running for the second time?"""
        return self._tape is not None and self._tape.playing

    @property
    def keeping(self) -> bool:
        """Does what is saved now stay until backward? Not without gradients, and not in a region that runs again."""
        return self._looks()

    def begin_pass(self, *resident: Tensor) -> None:
        """A forward pass of the chunk begins. resident: tensors that live longer than it, and stay where they are."""
        self._resident = {_address(x) for x in resident}
        if self.offload is not None:
            self.offload.begin_pass()
        if self.stash is not None:
            self.stash.begin_pass()

    def once(self, compute: Callable[[], T]) -> T:
        """Compute; or, when a region runs for the second time, return what that gave the first time."""
        return compute() if self._tape is None else self._tape.once(compute)

    def region(self, part: str, fn: Callable[..., Any], *tensors: Tensor) -> Any:
        """fn(*tensors). If the part is recomputed, fn runs again in backward; tensors that it reads otherwise stay alive."""
        if part not in self.recomputed or not self._looks():
            return fn(*tensors)
        return run_region(functools.partial(self._pass_of, Tape(self._stream), fn), tensors, draws=self._draws, shared_by=self._shared_by)

    def _pass_of(self, tape: Tape, fn: Callable[..., Any], *tensors: Tensor) -> Any:
        self._tape = tape
        try:
            with tape.running(tensors[0].device):
                return fn(*tensors)
        finally:
            self._tape = None

    def discarding(self, part: str, fn: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Scope]:
        """fn(*tensors), and a scope in which to use it. If the part is recomputed, what consumers in that scope save of it is not kept.

        fn's own graph keeps its inputs; it is called again without a graph and must not draw random numbers.
        """
        outputs = fn(*tensors)
        if part not in self.recomputed or not self._looks():
            return outputs, contextlib.nullcontext()
        kept = [self._pack(x) for x in tensors]
        source = Discarded(fn, lambda: [_unpack(x) for x in kept])
        return outputs, self._without(source, as_tuple(outputs))

    @contextlib.contextmanager
    def _without(self, source: Discarded, outputs: tuple[Tensor, ...]) -> Iterator[None]:
        found = {_address(x): (StorageWeakRef(x.untyped_storage()), source, index) for index, x in enumerate(outputs)}
        del outputs
        self._discarded |= found
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            for address in found:
                self._discarded.pop(address)

    @contextlib.contextmanager
    def offloading(self, *parts: str, which: Callable[[Tensor], str] | None = None) -> Iterator[None]:
        """A scope; what is saved in it belongs to the part, or of several parts to the one that `which` tells."""
        if self.offload is None or self.offload.parts.isdisjoint(parts) or not self._looks():
            yield
            return
        groups = {part: self.offload.open(part) for part in parts if part in self.offload.parts}

        def store(x: Tensor) -> Callable[[], Tensor] | None:
            group = groups.get(parts[0] if which is None else which(x))
            return None if group is None else self.offload.store(x, group)

        with self._storing(store):
            yield

    @contextlib.contextmanager
    def stashing(self, held: int, used: int, share: int) -> Iterator[None]:
        """A scope of the experts of one layer: of buffers with `held` rows or more that are saved in it, `used` rows go into pages.

        share: rows of an even share; see memory/stash.py.
        """
        if self.stash is None or not self._looks():
            yield
            return
        with self._storing(self.stash.open(held, used, share)):
            yield

    @contextlib.contextmanager
    def _storing(self, store: Callable[[Tensor], Callable[[], Tensor] | None]) -> Iterator[None]:
        around, self._store = self._store, store
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._store = around

    def _looks(self) -> bool:
        """Is there anything to keep or not to keep here? Inside a region its own hooks take everything."""
        return self._tape is None and torch.is_grad_enabled()

    def _pack(self, x: Tensor) -> Any:
        if _is_weight(x):
            return x
        entry = self._discarded.get(_address(x))
        if entry is not None:
            return Handle(*entry[1:], x).get
        back = None if self._store is None or _address(x) in self._resident else self._store(x)
        if back is not None:
            return back
        return x.detach() if x.grad_fn is not None else x  # x itself would keep the node that saves it alive, if it is its output


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, Parameter) or isinstance(x._base, Parameter)
