"""CUDA graph capture: operations on a CUDA device that are recorded once and replayed.

A replay repeats the operations on the tensors of the capture: addresses, shapes, Python numbers and branches are
those of the capture. The caller copies new inputs into the captured ones and reads the captured outputs. A capture
fails on reads by the host, on shapes that depend on values, and on random numbers of a generator that is not
registered (tests/emulated_cuda checks this without a GPU).

Graphs that share a memory pool may share the memory of temporary tensors, so they must be replayed in the order of
capture.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

T = TypeVar("T")
Scope = Callable[[], contextlib.AbstractContextManager]


class CapturedGraph:
    """Operations that can be replayed. Other threads (the watchdog of NCCL) may use the device during capture."""

    def __init__(self, pool: Any, generators: Sequence[torch.Generator] = (), scopes: Sequence[Scope] = ()):
        """Create an empty graph.

        Args:
            pool: memory pool, of torch.cuda.graph_pool_handle.
            generators: generators that captured operators draw from, in addition to the device's default one.
            scopes: contexts of the capture; the graph keeps alive what they yield.
        """
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        self._scopes = tuple(scopes)
        self._kept: list[Any] = []
        for generator in generators:
            self._graph.register_generator_state(generator)

    def capture(self, run: Callable[[], T]) -> T:
        """Capture `run` and replay it once; return what it returns.

        Raises:
            RuntimeError: if it waits for the device or its shapes depend on values.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"))
            self._kept = [stack.enter_context(scope()) for scope in self._scopes]
            result = run()
        self._graph.replay()  # a capture does not compute
        return result

    def replay(self) -> None:
        """Repeat the operations."""
        self._graph.replay()


@dataclass(frozen=True)
class _Placeholder:
    """Position of a tensor in a template."""


def split_tensors(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a value of nested containers and dataclasses, and the value as a template without them."""
    tensors: list[Tensor] = []

    def take(x: Tensor) -> _Placeholder:
        tensors.append(x)
        return _Placeholder()

    return tensors, _map_leaves(Tensor, take, value)


def join_tensors(template: Any, tensors: Iterable[Tensor]) -> Any:
    """Fill a template of `split_tensors` with tensors."""
    remaining = iter(tensors)
    return _map_leaves(_Placeholder, lambda _: next(remaining), template)


def _map_leaves(kind: type, fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to the leaves of a type; torch's pytree does not enter dataclasses, so this does."""

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return fn(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{f.name: _map_leaves(kind, fn, getattr(leaf, f.name)) for f in fields(leaf)})
        return leaf

    return tree_map(apply, value)
