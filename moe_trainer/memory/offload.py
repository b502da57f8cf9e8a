"""Offloading of activations to host memory between forward and backward.

Tensors that a part of a layer saves for backward are copied to the host and freed on the device; backward copies them
back. The tensors of one part form a group, and the groups of a pass (one chunk, one microbatch) a chain in the order
of forward. When backward reads the first tensor of a group, the group before it starts to come back as well. Chains
of different passes are independent, so any order of passes (pipeline stages, virtual stages) works.

On CUDA copies in each direction run on their own stream, from and to pinned memory (torch's cached allocator);
`record_stream` keeps a tensor's memory until its copy is done, and the computation waits on the device only. On a CPU
the same code copies synchronously. A tensor that several nodes save is copied once, also in other shapes, unless it
was written to in between. Weights are never offloaded.
NOTE: autograd's check that a saved tensor was not modified in place does not see offloaded tensors.
"""

import functools
import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class HostCopies:
    """Synchronous copies from host to host."""

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


class StreamedCopies(HostCopies, ABC):
    """Copies on one stream for each direction; without streams (on a CPU) they are synchronous.

    A subclass allocates the destination and copies to it and back. With `waits_for_copies_back` a copy out waits for
    earlier copies back, whose memory it may reuse.
    """

    waits_for_copies_back = False

    def __init__(self, streams: "tuple[torch.cuda.Stream, torch.cuda.Stream] | None"):
        """Store the streams for copies out and for copies back."""
        self._streams = streams

    @abstractmethod
    def allocate(self, x: Tensor) -> Any:
        """Allocate a destination for x."""

    @abstractmethod
    def copy_out(self, destination: Any, x: Tensor) -> None:
        """Copy x to its destination."""

    @abstractmethod
    def copy_back(self, destination: Any) -> Tensor:
        """Return a new tensor with the contents of a destination."""

    def start_out(self, x: Tensor) -> tuple[Any, Any]:
        destination = self.allocate(x)
        if self._streams is None:
            self.copy_out(destination, x)
            return destination, None
        out, back = self._streams
        out.wait_stream(torch.cuda.current_stream(out.device))
        if self.waits_for_copies_back:
            out.wait_stream(back)
        with torch.cuda.stream(out):
            self.copy_out(destination, x)
            x.record_stream(out)
            return destination, out.record_event()

    def start_back(self, host: Any, out: Any) -> tuple[Tensor, Any]:
        if self._streams is None:
            return self.copy_back(host), None
        back = self._streams[1]
        with torch.cuda.stream(back):
            back.wait_event(out)
            return self.copy_back(host), back.record_event()

    def finish(self, x: Tensor, back: Any) -> None:
        if self._streams is not None:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(back)
            x.record_stream(stream)

    def limit(self, out: Any) -> None:
        if self._streams is not None:
            torch.cuda.current_stream(self._streams[0].device).wait_event(out)


def make_copy_streams(device: torch.device) -> "tuple[torch.cuda.Stream, torch.cuda.Stream] | None":
    """Create the streams for copies out and back; return None without CUDA."""
    return (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None


class CudaCopies(StreamedCopies):
    """Copies between a CUDA device and pinned memory."""

    def __init__(self, device: torch.device):
        super().__init__(make_copy_streams(device))
        self._device = device

    def allocate(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu", pin_memory=True)

    def copy_out(self, destination: Tensor, x: Tensor) -> None:
        destination.copy_(x, non_blocking=True)

    def copy_back(self, destination: Tensor) -> Tensor:
        return torch.empty_like(destination, device=self._device).copy_(destination, non_blocking=True)


class OffloadGroup:
    """Tensors saved by one part in one pass, by weak references: they live as long as the graph that saved them."""

    def __init__(self, before: "OffloadGroup | None"):
        self.before = before
        self._stored: list[weakref.ref[OffloadedTensor]] = []

    def add(self, stored: "OffloadedTensor") -> None:
        self._stored.append(weakref.ref(stored))

    def start_back(self) -> None:
        """Start to copy back the tensors that are still alive."""
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                stored.start_back()


class OffloadedTensor:
    """An offloaded tensor."""

    def __init__(self, x: Tensor, group: OffloadGroup, copies: HostCopies):
        self._group, self._copies = group, copies
        self._host, self.out = copies.start_out(x.detach())
        self._device: tuple[Tensor, Any] | None = None
        self._finished = False

    def start_back(self) -> None:
        """Start to copy back, unless that has started."""
        if self._device is None:
            self._device = self._copies.start_back(self._host, self.out)

    def get(self) -> Tensor:
        """Return the tensor on the device."""
        self.start_back()
        if not self._finished:
            self._group.start_back()
            if self._group.before is not None:
                self._group.before.start_back()
            self._copies.finish(*self._device)
            self._finished = True
        return self._device[0]


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
        storage, geometry, stored = self._offloaded.get(_key(x), (None, None, None))
        return stored() if storage is not None and not storage.expired() and geometry == _geometry(x) else None

    def _note(self, x: Tensor, stored: OffloadedTensor) -> None:
        # the weak reference also prevents reuse of the address by another storage
        self._offloaded[_key(x)] = StorageWeakRef(x.untyped_storage()), _geometry(x), weakref.ref(stored)


def _key(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, x.storage_offset()


def _geometry(x: Tensor) -> tuple:
    return x.numel() if x.is_contiguous() else (x.size(), x.stride()), x.dtype, x._version


def _fetch(stored: OffloadedTensor, size: torch.Size) -> Tensor:
    x = stored.get()
    return x if x.size() == size else x.view(size)
