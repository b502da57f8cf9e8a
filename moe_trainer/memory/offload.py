"""Activations on the host between forward and backward.

What a part of a layer saves for backward is copied to host memory as it is saved, and the device's copy is let go; in backward it
comes back. What one part saves is a group; the groups of a pass (one chunk, one microbatch) form a chain in the order of forward. When
backward asks for the first tensor of a group, the group before it in the chain starts to come back too, so that it is there when its
turn comes. A chain knows nothing of other passes, so any order of passes (pipeline stages, virtual stages) is right.

On CUDA copies out and back run on a stream each, from and to pinned memory; `record_stream` keeps a tensor's memory until its copy is
done, and the computation waits for a copy back on the device only. The pinned memory is torch's cached one. On a CPU the same
code copies from host to host, at once.

What several nodes save goes once, also in other shapes, as long as it is not written to in between. Weights never go.
NOTE: autograd's own check that a saved tensor was not written to afterwards does not see what has gone.

Shapes: any; sizes in elements or bytes, as said.
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
    """Copies from host to host: done when they are started."""

    def start_out(self, x: Tensor) -> tuple[Tensor, Any]:
        """Returns: the copy on the host, and what tells when it is complete."""
        return x.clone(), None

    def start_back(self, host: Tensor, out: Any) -> tuple[Tensor, Any]:
        """out: of start_out. Returns: the copy on the device, and what `finish` takes."""
        return host.clone(), None

    def finish(self, x: Tensor, back: Any) -> None:
        """From here on the computation may read x."""

    def limit(self, out: Any) -> None:
        """The computation waits until a copy out is complete."""


class StreamedCopies(HostCopies, ABC):
    """Copies on a stream for each direction; without streams (on a CPU) they are done when they are started.

    A subclass says where a tensor goes (`room`) and how it is copied there and back. follows: a copy out waits for the copies back that
    were started before it, whose room it may be given.
    """

    follows = False

    def __init__(self, streams: "tuple[torch.cuda.Stream, torch.cuda.Stream] | None"):
        """streams: for copies out, and for copies back."""
        self._streams = streams

    @abstractmethod
    def room(self, x: Tensor) -> Any:
        """Where x can go."""

    @abstractmethod
    def copy_out(self, room: Any, x: Tensor) -> None:
        """Copy x there."""

    @abstractmethod
    def copy_back(self, room: Any) -> Tensor:
        """A new tensor with what is there."""

    def start_out(self, x: Tensor) -> tuple[Any, Any]:
        room = self.room(x)
        if self._streams is None:
            self.copy_out(room, x)
            return room, None
        out, back = self._streams
        out.wait_stream(torch.cuda.current_stream(out.device))
        if self.follows:
            out.wait_stream(back)
        with torch.cuda.stream(out):
            self.copy_out(room, x)
            x.record_stream(out)
            return room, out.record_event()

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


def streams_of(device: torch.device) -> "tuple[torch.cuda.Stream, torch.cuda.Stream] | None":
    """Streams for copies out and back; None where there is no CUDA."""
    return (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None


class CudaCopies(StreamedCopies):
    """Copies between a CUDA device and pinned memory."""

    def __init__(self, device: torch.device):
        super().__init__(streams_of(device))
        self._device = device

    def room(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu", pin_memory=True)

    def copy_out(self, room: Tensor, x: Tensor) -> None:
        room.copy_(x, non_blocking=True)

    def copy_back(self, room: Tensor) -> Tensor:
        return torch.empty_like(room, device=self._device).copy_(room, non_blocking=True)


class Group:
    """What one part saved in one pass. Holds its tensors weakly: they live as long as the graph that saved them."""

    def __init__(self, before: "Group | None"):
        self.before = before
        self._stored: list[weakref.ref[Stored]] = []

    def add(self, stored: "Stored") -> None:
        """Another tensor."""
        self._stored.append(weakref.ref(stored))

    def start_back(self) -> None:
        """Have the tensors that are still wanted come back."""
        for reference in self._stored:
            stored = reference()
            if stored is not None:
                stored.start_back()


class Stored:
    """A tensor on the host."""

    def __init__(self, x: Tensor, group: Group, copies: HostCopies):
        self._group, self._copies = group, copies
        self._host, self.out = copies.start_out(x.detach())
        self._device: tuple[Tensor, Any] | None = None
        self._finished = False

    def start_back(self) -> None:
        """Begin to copy back, unless that has begun."""
        if self._device is None:
            self._device = self._copies.start_back(self._host, self.out)

    def get(self) -> Tensor:
        """The tensor on the device."""
        self.start_back()
        if not self._finished:
            self._group.start_back()
            if self._group.before is not None:
                self._group.before.start_back()
            self._copies.finish(*self._device)
            self._finished = True
        return self._device[0]


class Offload:
    """Decides what goes to the host, for one model chunk.

    parts: names of what goes. min_numel: smaller tensors stay. fraction: of the groups of each part that go, evenly spread.
    max_in_flight: copies out that may be under way before the computation waits; None: any number. less_bytes: so many bytes of a
    pass, its last ones, stay (what the first pass would send is the measure; so it sends everything).
    """

    def __init__(self, parts: frozenset[str], device: torch.device, *, min_numel: int = 0, fraction: float = 1.0,
                 max_in_flight: int | None = None, less_bytes: int = 0, copies: HostCopies | None = None):
        self.parts, self._min_numel, self._fraction = parts, min_numel, fraction
        self._max_in_flight, self._less_bytes = max_in_flight, less_bytes
        self._copies = copies or (CudaCopies(device) if device.type == "cuda" else HostCopies())
        self._pass_bytes: int | None = None  # of the first pass
        self._under_way: deque[Any] = deque()
        self._begin()

    def _begin(self) -> None:
        self._last: Group | None = None
        self._groups: dict[str, int] = {}
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, Any, weakref.ref[Stored]]] = {}
        self._sent = self._eligible = 0

    def begin_pass(self) -> None:
        """The next forward pass begins."""
        if self._pass_bytes is None and self._eligible:
            self._pass_bytes = self._eligible
        self._begin()

    def open(self, part: str) -> "Group | None":
        """A group for what `part` is going to save, or None if it stays."""
        number = self._groups.get(part, 0)
        self._groups[part] = number + 1
        reach = (math.floor(count * self._fraction + 1e-9) for count in (number, number + 1))
        return Group(self._last) if next(reach) < next(reach) else None

    def store(self, x: Tensor, group: Group) -> Callable[[], Tensor] | None:
        """Send a tensor to the host. Returns: what brings it back, or None if it stays."""
        num_bytes = x.numel() * x.element_size()
        if x.numel() == 0 or x.numel() < self._min_numel:
            return None
        known = self._recall(x)
        if known is not None:
            return functools.partial(_shaped, known, x.size())
        self._eligible += num_bytes
        if self._pass_bytes is not None and self._sent + num_bytes > self._pass_bytes - self._less_bytes:
            return None
        self._sent += num_bytes
        stored = Stored(x, group, self._copies)
        group.add(stored)
        self._last = group
        self._remember(x, stored)
        if self._max_in_flight is not None:
            self._under_way.append(stored.out)
            while len(self._under_way) > self._max_in_flight:
                self._copies.limit(self._under_way.popleft())
        return functools.partial(_shaped, stored, x.size())

    def _recall(self, x: Tensor) -> Stored | None:
        storage, geometry, stored = self._known.get(_key(x), (None, None, None))
        return stored() if storage is not None and not storage.expired() and geometry == _geometry(x) else None

    def _remember(self, x: Tensor, stored: Stored) -> None:
        # the weak reference also keeps the address from being given to another storage
        self._known[_key(x)] = StorageWeakRef(x.untyped_storage()), _geometry(x), weakref.ref(stored)


def _key(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage()._cdata, x.storage_offset()


def _geometry(x: Tensor) -> tuple:
    return x.numel() if x.is_contiguous() else (x.size(), x.stride()), x.dtype, x._version


def _shaped(stored: Stored, size: torch.Size) -> Tensor:
    x = stored.get()
    return x if x.size() == size else x.view(size)
