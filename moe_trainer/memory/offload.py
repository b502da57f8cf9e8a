"""Offloading of activations to host memory between forward and backward.

Tensors that a part of a layer saves for backward are copied to the host and freed on the device; backward copies them
back. The tensors of one part form a group, and the groups of a pass (one chunk, one microbatch) a chain in the order
of forward. When backward reads the first tensor of a group, the group before it starts to come back as well. Chains
of different passes are independent, so any order of passes (pipeline stages, virtual stages) works.

On CUDA copies in each direction run on a separate stream, from and to pinned memory (torch's cached allocator);
`record_stream` keeps a tensor's memory until its copy is done, and the computation waits on the device only. On a CPU
the same code copies synchronously. A tensor that several nodes save is copied once, also in other shapes, unless it
was written to in between. Weights are never offloaded.
Inside a CUDA graph (`captured`) the copies are captured too: the streams are forked from the captured one and joined at
its end. Pinned memory belongs to the graph and is reused in it. Memory on the device must be reused too, and a capture
defers the reuse of what `record_stream` has marked: so tensors are held until the computation waits for their copy, a
few copies later, and copies back go to memory of the computation's stream.

NOTE: autograd's check that a saved tensor was not modified in place does not see offloaded tensors.
"""

import contextlib
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MAX_HELD = 4
"""Tensors that a CUDA graph holds while they are copied to the host."""


class HostCopies:
    """Synchronous copies from host to host."""

    @property
    def is_captured(self) -> bool:
        """Whether copies are captured now."""
        return False

    def captured(self) -> contextlib.AbstractContextManager:
        """Return the scope of a CUDA graph, which yields what the graph must keep alive."""
        return contextlib.nullcontext()

    def start_out(self, x: Tensor) -> tuple[Tensor, Any]:
        """Start to copy x to the host. Return the copy and its completion event."""
        return x.clone(), None

    def start_back(self, host: Tensor, out: Any) -> tuple[Tensor, Any]:
        """Start to copy back after the event `out`. Return the copy on the device and the event for `finish`."""
        return host.clone(), None

    def finish(self, x: Tensor, back: Any) -> None:
        """Make the computation wait until x has been copied back."""

    def limit(self, out: Any) -> None:
        """Make the computation wait until a copy to the host is complete."""


class CudaCopies(HostCopies):
    """Copies between a CUDA device and pinned memory, on one stream for each direction."""

    def __init__(self, device: torch.device):
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._device = device
        self._graph: GraphCopies | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    @contextlib.contextmanager
    def captured(self) -> Iterator["GraphCopies"]:
        self._graph = GraphCopies(self._out, self._back)
        with self._graph.forked():
            try:
                yield self._graph
            finally:
                self._graph = None

    def start_out(self, x: Tensor) -> tuple[Tensor, Any]:
        if self._graph is not None:
            return self._graph.start_out(x)
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._out.device))
        with torch.cuda.stream(self._out):
            host.copy_(x, non_blocking=True)
            x.record_stream(self._out)
            return host, self._out.record_event()

    def start_back(self, host: Tensor, out: Any) -> tuple[Tensor, Any]:
        if self._graph is not None:
            return self._graph.start_back(host, out)
        with torch.cuda.stream(self._back):
            self._back.wait_event(out)
            x = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
            return x, self._back.record_event()

    def finish(self, x: Tensor, back: Any) -> None:
        if self._graph is None:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(back)
            x.record_stream(stream)
        else:
            self._graph.wait(back)

    def limit(self, out: Any) -> None:
        if self._graph is not None:
            self._graph.wait(out)
        elif not isinstance(out, GraphEvent):
            torch.cuda.current_stream(self._out.device).wait_event(out)


class GraphEvent(NamedTuple):
    """End of a copy in a CUDA graph; other graphs do not wait for it, because the graph joins its copies."""

    graph: "GraphCopies"
    event: torch.cuda.Event


class GraphCopies:
    """Copies of one CUDA graph, and their pinned memory, which lives as long as the graph."""

    def __init__(self, out: torch.cuda.Stream, back: torch.cuda.Stream):
        """Store the streams for copies out and for copies back."""
        self._out, self._back = out, back
        self._buffers: list[Tensor] = []
        self._free: dict[tuple, list[tuple[Tensor, GraphEvent]]] = {}
        self._held: deque[tuple[Tensor, GraphEvent]] = deque()

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._out.device)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Let the streams take part in the capture of the current stream."""
        self._out.wait_stream(self._main)
        self._back.wait_stream(self._main)
        try:
            yield
        finally:
            self._main.wait_stream(self._out)
            self._main.wait_stream(self._back)
            self._held.clear()

    def start_out(self, x: Tensor) -> tuple[Tensor, GraphEvent]:
        """Start to copy x to the host."""
        available = self._free.get(_layout(x))
        if available:
            host, last_use = available.pop()
            self._out.wait_event(last_use.event)
        else:
            # this thread may not allocate pinned memory while it captures; another one may
            with ThreadPoolExecutor(1) as thread:
                host = thread.submit(torch.empty_like, x, device="cpu", pin_memory=True, requires_grad=False).result()
            self._buffers.append(host)
        self._out.wait_stream(self._main)
        with torch.cuda.stream(self._out):
            host.copy_(x, non_blocking=True)
            event = GraphEvent(self, self._out.record_event())
        self._held.append((x, event))
        while len(self._held) > MAX_HELD:
            self.wait(self._held.popleft()[1])
        return host, event

    def start_back(self, host: Tensor, out: GraphEvent) -> tuple[Tensor, GraphEvent]:
        """Start to copy back; `out` is of this graph or of an earlier one."""
        x = torch.empty_like(host, device=self._out.device)
        self._back.wait_stream(self._main)
        if out.graph is self:
            self._back.wait_event(out.event)
        with torch.cuda.stream(self._back):
            x.copy_(host, non_blocking=True)
            return x, GraphEvent(self, self._back.record_event())

    def wait(self, event: Any) -> None:
        """Make the computation wait for a copy of this graph."""
        if isinstance(event, GraphEvent) and event.graph is self:
            self._main.wait_event(event.event)

    def release(self, host: Tensor, last_use: GraphEvent) -> None:
        """Allow other copies of this graph to use the memory after an event of this graph."""
        if last_use.graph is self:
            self._free.setdefault(_layout(host), []).append((host, last_use))


def _layout(x: Tensor) -> tuple:
    return x.size(), x.stride(), x.dtype


class OffloadGroup:
    """Tensors saved by one part in one pass, by weak references: they live as long as the graph that saved them."""

    def __init__(self, before: "OffloadGroup | None"):
        self.before = before
        self._stored: list[weakref.ref[OffloadedTensor]] = []

    def add(self, stored: "OffloadedTensor") -> None:
        self._stored.append(weakref.ref(stored))

    def start_back(self) -> None:
        """Start to copy back the tensors that are still alive; inside a CUDA graph those that are offloaded in one."""
        for reference in self._stored:
            stored = reference()
            if stored is not None and stored.is_current:
                stored.start_back()


class OffloadedTensor:
    """An offloaded tensor."""

    def __init__(self, x: Tensor, group: OffloadGroup, copies: HostCopies):
        self._group, self._copies = group, copies
        self._host, self.out = copies.start_out(x.detach())
        self._device: tuple[Tensor, Any] | None = None
        self._finished = False

    def __del__(self):
        if isinstance(self.out, GraphEvent):
            self.out.graph.release(self._host, self.out if self._device is None else self._device[1])

    @property
    def is_current(self) -> bool:
        """Whether it was offloaded inside a CUDA graph if one is captured now, else outside."""
        return isinstance(self.out, GraphEvent) == self._copies.is_captured

    def start_back(self) -> tuple[Tensor, Any]:
        """Start to copy back, unless that has started; return the tensor and what says when it is there."""
        if self._device is None:
            self._device = self._copies.start_back(self._host, self.out)
        return self._device

    def get(self) -> Tensor:
        """Return the tensor on the device."""
        device = self.start_back()
        if not self._finished:
            self._group.start_back()
            if self._group.before is not None:
                self._group.before.start_back()
            self._copies.finish(*device)
            self._finished = True
        return device[0]


class ActivationOffload:
    """Selects the tensors of one model chunk that are offloaded."""

    def __init__(
        self,
        parts: frozenset[str],
        device: torch.device,
        *,
        min_numel: int = 0,
        fraction: float = 1.0,
        max_in_flight: int | None = None,
        skip_bytes: int = 0,
        copies: HostCopies | None = None,
    ):
        """Store the settings.

        Args:
            parts: names of offloaded parts.
            device: of the model.
            min_numel: smaller tensors stay.
            fraction: share of the groups of each part that are offloaded, evenly spread.
            max_in_flight: copies to the host in flight before the computation waits; None for any number.
            skip_bytes: bytes at the end of a pass that stay. The first pass measures a pass, so it offloads everything.
            copies: how tensors are copied; by default for the device.
        """
        self.parts, self._min_numel, self._fraction = parts, min_numel, fraction
        self._max_in_flight, self._skip_bytes = max_in_flight, skip_bytes
        self._copies = copies or (CudaCopies(device) if device.type == "cuda" else HostCopies())
        self._pass_bytes: int | None = None  # of the first pass
        self._in_flight: deque[Any] = deque()
        self._reset()

    def _reset(self) -> None:
        self._last: OffloadGroup | None = None
        self._groups: dict[str, int] = {}
        self._offloaded: dict[tuple[int, int], tuple[StorageWeakRef, Any, weakref.ref[OffloadedTensor]]] = {}
        self._offloaded_bytes = self._eligible_bytes = 0

    def captured(self) -> contextlib.AbstractContextManager:
        """Return the scope of a CUDA graph, which yields what the graph must keep alive."""
        return self._copies.captured()

    def begin_pass(self) -> None:
        """Begin the next forward pass."""
        if self._pass_bytes is None and self._eligible_bytes:
            self._pass_bytes = self._eligible_bytes
        self._reset()

    def open(self, part: str) -> "OffloadGroup | None":
        """Return a group for the tensors that `part` saves, or None if they stay."""
        number = self._groups.get(part, 0)
        self._groups[part] = number + 1
        before, after = (math.floor(count * self._fraction + 1e-9) for count in (number, number + 1))
        return OffloadGroup(self._last) if before < after else None

    def store(self, x: Tensor, group: OffloadGroup) -> Callable[[], Tensor] | None:
        """Offload a tensor. Return a function that fetches it, or None if it stays."""
        num_bytes = x.numel() * x.element_size()
        if x.numel() == 0 or x.numel() < self._min_numel:
            return None
        offloaded = self._find(x)
        if offloaded is not None:
            return functools.partial(_fetch, offloaded, x.size())
        self._eligible_bytes += num_bytes
        if self._pass_bytes is not None and self._offloaded_bytes + num_bytes > self._pass_bytes - self._skip_bytes:
            return None
        self._offloaded_bytes += num_bytes
        stored = OffloadedTensor(x, group, self._copies)
        group.add(stored)
        self._last = group
        self._note(x, stored)
        if self._max_in_flight is not None:
            self._in_flight.append(stored.out)
            while len(self._in_flight) > self._max_in_flight:
                self._copies.limit(self._in_flight.popleft())
        return functools.partial(_fetch, stored, x.size())

    def _find(self, x: Tensor) -> OffloadedTensor | None:
        known = self._offloaded.get(_key(x))
        if known is None:
            return None
        storage, geometry, stored = known
        if storage.expired() or geometry != _geometry(x):
            return None
        tensor = stored()
        return tensor if tensor is not None and tensor.is_current else None

    def _note(self, x: Tensor, stored: OffloadedTensor) -> None:
        # the weak reference also prevents reuse of the address by another storage
        self._offloaded[_key(x)] = StorageWeakRef(x.untyped_storage()), _geometry(x), weakref.ref(stored)


def _key(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _geometry(x: Tensor) -> tuple:
    return x.numel() if x.is_contiguous() else (x.size(), x.stride()), x.dtype, x._version


def _fetch(stored: OffloadedTensor, size: torch.Size) -> Tensor:
    x = stored.get()
    return x if x.size() == size else x.view(size)
