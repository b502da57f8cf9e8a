"""A run of operations that is recorded once and repeated: on a CUDA device a CUDA graph, on a CPU its emulation.

What is repeated are the operations, on the very tensors they ran on: addresses, shapes, Python numbers and branches are those of the
capture. So whoever captures keeps the inputs where they are and overwrites them, and finds the outputs where they were.

The emulation is there to be wrong where a CUDA graph would be: Python that runs beside the operations runs once, at capture. It records
every operator below autograd (a dispatch mode; backward on a CPU runs in the calling thread, so it is seen too), and repeats each on
the same arguments, copying what it gives into the storage of what it gave. Random operators draw anew from their generator, collectives
run again on every rank (they are waited for before the next computation). What a capture on a device cannot do raises CaptureError:
reading a value on the host, shapes that depend on values, random numbers of a generator that the graph does not know. It is slow, and holds all temporary tensors.

Memory of graphs with one pool may be shared by their temporary tensors: they must be replayed in the order in which they were captured.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_WAITERS = ("torch.distributed.", "moe_trainer.parallel.trace")  # gloo copies results while these wait for it, which a replay does too


class CaptureError(RuntimeError):
    """The operations cannot be captured."""


class Graph(ABC):
    """Operations that can be repeated."""

    @abstractmethod
    def capture(self, run: Callable[[], T]) -> T:
        """Record what `run` does, once. Returns: what it returns; its tensors hold what one run gives.

        Raises: CaptureError when it waits for the device, or its shapes depend on values.
        """

    @abstractmethod
    def replay(self) -> None:
        """Repeat the operations."""


class DeviceGraph(Graph):
    """A CUDA graph. Other threads (the watchdog of NCCL) may use the device meanwhile."""

    def __init__(self, pool: Any, generators: Sequence[torch.Generator] = ()):
        """pool: of memory, a handle of new_pool. generators: that operators inside draw from, besides the device's own one."""
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        for generator in generators:
            self._graph.register_generator_state(generator)

    def capture(self, run: Callable[[], T]) -> T:
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._graph.replay()  # nothing has been computed yet
        return result

    def replay(self) -> None:
        self._graph.replay()


class EmulatedGraph(Graph):
    """The emulation on a CPU."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        """generators: as for DeviceGraph."""
        self._generators = tuple(generators)
        self._steps: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def capture(self, run: Callable[[], T]) -> T:
        with _Recorder(self._steps, self._generators):
            return run()

    @torch.no_grad()
    def replay(self) -> None:
        under_way: list[Any] = []
        for operator, args, kwargs, before in self._steps:
            communicates = operator.namespace == "c10d"
            if not communicates:
                _wait(under_way)
            now = operator(*args, **kwargs)
            if communicates:
                under_way.append(now)
                continue
            for old, new in zip(before, _tensors(now)):
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:  # else it is a view, or written in place
                    old.copy_(new)
        _wait(under_way)


class _Recorder(TorchDispatchMode):
    def __init__(self, steps: list[tuple[Any, tuple, dict, list[Tensor]]], generators: tuple[torch.Generator, ...]):
        super().__init__()
        self._steps, self._generators = steps, generators

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        _refuse(operator, args, kwargs)
        generator = kwargs.get("generator")
        # (operators see other objects of the same generator)
        if generator is not None and generator._cdata not in {known._cdata for known in self._generators}:
            raise CaptureError(f"{operator} draws from a generator that the graph does not know, so a replay could not advance it")
        kept = _views(args), _views(kwargs)
        result = operator(*args, **kwargs)
        of_a_wait = operator.namespace != "c10d" and _caller().startswith(_WAITERS)
        if torch.Tag.inplace_view not in operator.tags and not of_a_wait:
            self._steps.append((operator, *kept, [x.detach() for x in _tensors(result)]))
        return result


def _caller() -> str:
    """The module that runs the operator."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(("torch._dynamo.", "torch._compile")):
        frame = frame.f_back
    return frame.f_globals["__name__"]


def _refuse(operator: Any, args: tuple, kwargs: dict) -> None:
    tags = operator.tags
    if torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"{operator} reads a value on the host, which a graph cannot")
    if torch.Tag.dynamic_output_shape not in tags or kwargs.get("output_size") is not None:
        return
    if operator is torch.ops.aten.index.Tensor and not any(_is_mask(index) for index in args[1]):
        return
    raise CaptureError(f"{operator} has a shape that depends on values, which a graph cannot hold")


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _views(value: Any) -> Any:
    """The same with views of its tensors: in what shape a tensor is, may change in place later."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _views(each) for key, each in value.items()}
    return type(value)(map(_views, value)) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for each in value for x in _tensors(each)] if isinstance(value, list | tuple) else []


def _wait(under_way: list[Any]) -> None:
    """Wait for collectives; each has returned its work object, alone or behind its tensors."""
    for result in under_way:
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.ScriptObject):
                each.wait()
    under_way.clear()


def new_pool(device: torch.device) -> Any:
    """A pool of memory for graphs; None where there are no devices' pools."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def new_graph(device: torch.device, pool: Any, generators: Sequence[torch.Generator] = ()) -> Graph:
    """A graph for a device. generators: as for DeviceGraph."""
    return DeviceGraph(pool, generators) if device.type == "cuda" else EmulatedGraph(generators)


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
