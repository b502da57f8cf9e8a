"""Operations on a CUDA device that are recorded once and repeated, as a CUDA graph.

What is repeated are the operations, on the very tensors they ran on: addresses, shapes, Python numbers and branches are those of the
capture. So whoever captures keeps the inputs where they are and overwrites them, and finds the outputs where they were.

What a capture cannot do is an error of CUDA: reading a value on the host, shapes that depend on values, random numbers of a generator that
the graph does not know. (tests/emulated_cuda has a device on which all this happens without a GPU.)

Memory of graphs with one pool may be shared by their temporary tensors: they must be replayed in the order in which they were captured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graph:
    """Operations that can be repeated. Other threads (the watchdog of NCCL) may use the device meanwhile."""

    def __init__(self, pool: Any, generators: Sequence[torch.Generator] = ()):
        """pool: of memory, a handle of torch.cuda.graph_pool_handle. generators: that operators inside draw from, besides the device's own one."""
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        for generator in generators:
            self._graph.register_generator_state(generator)

    def capture(self, run: Callable[[], T]) -> T:
        """Record what `run` does, once. Returns: what it returns; its tensors hold what one run gives.

        Raises: RuntimeError when it waits for the device, or its shapes depend on values.
        """
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._graph.replay()  # nothing has been computed yet
        return result

    def replay(self) -> None:
        """Repeat the operations."""
        self._graph.replay()


@dataclass(frozen=True)
class _Place:
    """Where a tensor was."""


def take_apart(value: Any, found: list[Tensor]) -> Any:
    """Collect the tensors of a record; returns it with places instead."""
    if isinstance(value, Tensor):
        found.append(value)
        return _Place()
    if isinstance(value, list | tuple):
        return tuple(take_apart(each, found) for each in value)
    if is_dataclass(value):
        return replace(value, **{each.name: take_apart(getattr(value, each.name), found) for each in fields(value)})
    return value


def put_together(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Undo take_apart with other tensors."""
    if isinstance(value, _Place):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(put_together(each, tensors) for each in value)
    if is_dataclass(value):
        return replace(value, **{each.name: put_together(getattr(value, each.name), tensors) for each in fields(value)})
    return value
