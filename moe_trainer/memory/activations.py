"""Policy for the activations of a model chunk: saved for backward, recomputed, or offloaded to the host.

Layers name their parts and leave the rest to the chunk's `ActivationPolicy`, which the LayerFactory carries:

* `recompute_region("core_attn", fn, q, k, v)`: run fn; if this part is recomputed, save its inputs only;
* `y, scope = recompute_output("layernorm", fn, x)`: run fn; consumers inside `with scope:` do not save its output;
* `run_in_chunks("mlp", fn, x)`: the same for fn on chunks of the sequence, each a region (--mlp-chunks-for-training);
* `with offload_scope("qkv_linear"):` tensors saved inside are offloaded;
* `cached_for_recompute(compute)`: a value that the second pass of a region must not recompute.

The model build decides which parts these are (model/build.py). Parts inside a recomputed region are left alone:
nothing of them is saved.

torch applies only the innermost pair of saved-tensor hooks. So one pair serves all of this: a recomputed output is
dropped, else the tensor is offloaded or stashed if a scope asks for it, else it stays. Regions push their own hooks;
the inputs that they save pass ours.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.memory.paged_stash import PagedStash, StashGroup
from moe_trainer.memory.recompute import RecomputedOutput, RecomputedTensor, ReplayCache, as_tuple, run_recomputed
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import Group

T = TypeVar("T")
Scope = contextlib.AbstractContextManager
StoreFn = Callable[[Tensor], Callable[[], Tensor] | None]
"""Store a saved tensor elsewhere and return a function that fetches it; None if it stays."""


class OutputSource(Protocol):
    """Makes tensors again that are not saved."""

    def get(self, index: int) -> Tensor:
        """Return tensor number `index`, without a graph."""


class ActivationPolicy:
    """Recompute and offload of one chunk; without arguments everything is saved."""

    def __init__(
        self,
        recomputed: frozenset[str] = frozenset(),
        *,
        uses_global_rng: bool = True,
        stream: ShardRNG | None = None,
        shared_by: Group | None = None,
        offload: ActivationOffload | None = None,
        stash: PagedStash | None = None,
        mlp_chunks: int = 1,
    ):
        """Store the policy.

        Args:
            recomputed: names of recomputed parts.
            uses_global_rng: parts may draw from torch's global generators.
            stream: the chunk's own random generator.
            shared_by: ranks that hold the same inputs of regions; each saves a shard of them.
            offload: offloading to the host, None without it.
            stash: stash of the experts' buffers, None without it.
            mlp_chunks: number of chunks of `run_in_chunks`.
        """
        self.recomputed, self.offload, self.stash, self.mlp_chunks = recomputed, offload, stash, mlp_chunks
        self._uses_global_rng, self._stream, self._shared_by = uses_global_rng, stream, shared_by
        self._replay_cache: ReplayCache | None = None
        self._recomputed_outputs: dict[int, tuple[StorageWeakRef, OutputSource, int]] = {}
        self._store: StoreFn | None = None
        self._stash_group: StashGroup | None = None
        self._resident: set[int] = set()

    @property
    def is_recomputing(self) -> bool:
        """Whether a region runs for the second time."""
        return self._replay_cache is not None and self._replay_cache.is_replaying

    @property
    def is_saving(self) -> bool:
        """Whether saved tensors stay until backward: grad mode is on and no recomputed region is active."""
        return self._replay_cache is None and torch.is_grad_enabled()

    def begin_pass(self, *resident: Tensor) -> None:
        """Begin a forward pass of the chunk; `resident` tensors outlive it and are never offloaded."""
        self._resident = {_address(x) for x in resident}
        if self.offload is not None:
            self.offload.begin_pass()

    def captured(self) -> Scope:
        """Return the scope of a CUDA graph of parts of the chunk, which yields what the graph must keep alive."""
        return contextlib.nullcontext() if self.offload is None else self.offload.captured()

    def cached_for_recompute(self, compute: Callable[[], T]) -> T:
        """Compute a value; in the second pass of a region return that of the first."""
        return compute() if self._replay_cache is None else self._replay_cache.cached(compute)

    def recompute_region(self, part: str, fn: Callable[..., Any], *tensors: Tensor) -> Any:
        """Return fn(*tensors); fn runs again in backward if the part is recomputed. Closed-over tensors stay alive."""
        if part not in self.recomputed or not self.is_saving:
            return fn(*tensors)
        return run_recomputed(
            functools.partial(self._run_pass, ReplayCache(self._stream), fn),
            tensors,
            uses_global_rng=self._uses_global_rng,
            shared_by=self._shared_by,
        )

    def run_in_chunks(self, part: str, fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return fn(*tensors), computed on chunks of the first dimension; a recomputed part is so chunk by chunk.

        Only the tensors of one chunk then exist at a time, in forward and in backward. Inside a recomputed region every
        chunk is a nested region. `fn` maps every token alone, and draws no random numbers if there are several chunks.
        """
        if self.mlp_chunks == 1:
            return self.recompute_region(part, fn, *tensors)
        chunks = zip(*(x.chunk(self.mlp_chunks) for x in tensors), strict=True)
        return torch.cat([self._run_chunk(part, fn, *chunk) for chunk in chunks])

    def _run_chunk(self, part: str, fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        if self._replay_cache is None or not torch.is_grad_enabled():
            return self.recompute_region(part, fn, *tensors)
        # the outer region's later passes find the cache of this chunk among its values
        cache = self._replay_cache.cached(ReplayCache)
        return run_recomputed(functools.partial(self._run_pass, cache, fn), tensors, uses_global_rng=False)

    def _run_pass(self, cache: ReplayCache, fn: Callable[..., Any], *tensors: Tensor) -> Any:
        outer, self._replay_cache = self._replay_cache, cache
        try:
            with cache.run_pass(tensors[0].device):
                return fn(*tensors)
        finally:
            self._replay_cache = outer

    def recompute_output(self, part: str, fn: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Scope]:
        """Return fn(*tensors) and a scope in which consumers do not save it if the part is recomputed.

        fn's own graph keeps its inputs; it is called again without a graph and must not draw random numbers.
        """
        outputs = fn(*tensors)
        if part not in self.recomputed or not self.is_saving:
            return outputs, contextlib.nullcontext()
        saved = [self._pack(x) for x in tensors]
        source = RecomputedOutput(fn, lambda: [_unpack(x) for x in saved])
        return outputs, self.without_saving(source, as_tuple(outputs))

    @contextlib.contextmanager
    def without_saving(self, source: OutputSource, outputs: tuple[Tensor, ...]) -> Iterator[None]:
        """Enter a scope in which consumers do not save these tensors, but get them from the source in backward."""
        entries = {_address(x): (StorageWeakRef(x.untyped_storage()), source, i) for i, x in enumerate(outputs)}
        del outputs
        self._recomputed_outputs |= entries
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            for address in entries:
                self._recomputed_outputs.pop(address)

    @contextlib.contextmanager
    def offload_scope(self, *parts: str, which: Callable[[Tensor], str] | None = None) -> Iterator[None]:
        """Offload tensors saved in this scope as `parts[0]`; with several parts, `which(tensor)` selects one."""
        offload = self.offload
        if offload is None or offload.parts.isdisjoint(parts) or not self.is_saving:
            yield
            return
        groups = {part: offload.open(part) for part in parts if part in offload.parts}

        def store(x: Tensor) -> Callable[[], Tensor] | None:
            group = groups.get(parts[0] if which is None else which(x))
            return None if group is None else offload.store(x, group)

        with self._storing(store):
            yield

    @contextlib.contextmanager
    def stash_scope(self, buffer_size: int, num_used: int | Tensor, balanced_size: int) -> Iterator[StashGroup | None]:
        """Stash buffers that the experts of one layer save in this scope.

        Args:
            buffer_size: buffers of at least this many tokens are stashed.
            num_used: tokens of a buffer that are in use; on the device integer [1].
            balanced_size: tokens received under perfect balance, see memory/paged_stash.py.

        Yields:
            The group, which the caller passes to join_stash; None without a stash.
        """
        if self.stash is None or not self.is_saving:
            yield None
            return
        group = self._stash_group = self.stash.open(buffer_size, num_used, balanced_size)
        try:
            with self._storing(group.store):
                yield group
        finally:
            self._stash_group = None
        group.close()

    @contextlib.contextmanager
    def library_stash_scope(self, num_tokens: int, is_of_tokens: Callable[[Tensor], bool]) -> Iterator[None]:
        """Stash what a library saves in this scope, inside that of `stash_scope`; nothing to do without a stash.

        Args:
            num_tokens: tokens of the library's buffers.
            is_of_tokens: whether a saved tensor holds something of every token.
        """
        if self._stash_group is None:
            yield
            return
        with self._storing(self._stash_group.library_buffers(num_tokens, is_of_tokens)):
            yield

    @contextlib.contextmanager
    def _storing(self, store: StoreFn) -> Iterator[None]:
        outer, self._store = self._store, store
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._store = outer

    def _pack(self, x: Tensor) -> Any:
        if _is_weight(x):
            return x
        entry = self._recomputed_outputs.get(_address(x))
        if entry is not None:
            return RecomputedTensor(*entry[1:], x).get
        fetch = None if self._store is None or _address(x) in self._resident else self._store(x)
        if fetch is not None:
            return fetch
        # x itself would keep the node that saves it alive if it is the node's output
        return x.detach() if x.grad_fn is not None else x


def _unpack(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, Parameter) or isinstance(x._base, Parameter)
