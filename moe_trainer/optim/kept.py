"""What the optimizer keeps between steps: a flat range of numbers, in a format (formats.py) and in a place, host or device.

The update asks for fp32 values of a few elements (`open`), changes them, and gives them back (`close`). Plain fp32 that lies where the
update runs is handed out as it is, and nothing is copied; everything else is a passing copy, as long as one portion of the update.

A checkpoint holds fp32 whatever the format, as Megatron-LM's do, so that any run can resume with any format. Saving decodes what is
about to be written (`read`). Loading fills whole tensors: `stage` lays fp32 copies out on the host until they are closed again.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.optim.formats import Format, decode, encode, join, split

Span = tuple[int, int]


@dataclass(frozen=True)
class Devices:
    """Where numbers are stored (pinned: in host memory that a device can reach itself), and where the update runs.

    apart: that they travel between the two even if both are the same device, as on a CPU that plays both parts.
    """

    storage: torch.device
    update: torch.device
    apart: bool = False
    pinned: bool = False

    def fetch(self, stored: Tensor) -> Tensor:
        """Bring stored numbers to where the update runs."""
        return moved(stored, self.update, self.apart)


def moved(x: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """x on a device. Towards the host it is waited for: nothing else would."""
    return x.to(device, non_blocking=device.type != "cpu", copy=copy)


class Kept:
    """Elements [start, stop) of a rank's flat state.

    spans: ascending ranges that are closed whole, and share a scale where the format has one; they need not cover the gaps between
    parameters, which stay zero. keep_positive: see formats.encode.
    """

    def __init__(self, start: int, stop: int, fmt: Format, spans: Sequence[Span], devices: Devices, keep_positive: bool = False):
        self._keep_positive = keep_positive
        self.start, self.stop, self.format, self.devices = start, stop, fmt, devices
        self.flat = torch.zeros(stop - start, dtype=fmt.dtype, device=devices.storage, pin_memory=devices.pinned)
        self.scales = None
        if fmt.scaled:
            self.scales = torch.ones(len(spans), dtype=torch.float32, device=devices.storage, pin_memory=devices.pinned)
        self._spans = spans
        self._starts = [first for first, _ in spans]
        self._staged: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the storage is the fp32 numbers themselves."""
        return self.format.dtype == torch.float32

    @property
    def num_bytes(self) -> int:
        """Of the storage, scales included."""
        return sum(x.numel() * x.element_size() for x in (self.flat, self.scales) if x is not None)

    def open(self, start: int, stop: int) -> Tensor:
        """The fp32 values of a range inside one span (without scales: of any range), to be changed in place and then closed."""
        stored = self.devices.fetch(self._at(start, stop))
        return stored if self.is_plain else decode(stored, None if self.scales is None else self.devices.fetch(self._scale_at(start)))

    def close(self, start: int, stop: int, values: Tensor) -> None:
        """Keep the values of a span."""
        here = self._at(start, stop)
        if self.scales is None:
            if values.data_ptr() != here.data_ptr():
                here.copy_(values, non_blocking=True)
            return
        stored, scale = encode(values, self.format, self._keep_positive)
        here.copy_(stored, non_blocking=True)
        assert (start, stop) in self._overlapping(start, stop), f"[{start}, {stop}) is no span"
        self._scale_at(start).copy_(scale, non_blocking=True)

    def close_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        """Keep main parameters. Returns: what the model gets of them; the values as they are kept, so that a resumed run has the same."""
        self.close(start, stop, values)
        return values if self.is_plain else self.open(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """The values of any range, where they are stored, for somebody who only looks at them: storage itself where it is plain."""
        if self.is_plain:
            return self._at(start, stop)
        return self._gather(start, stop)

    def stage(self) -> None:
        """Lay the values out in fp32 on the host, where `staged` hands them out to be overwritten, until `unstage`."""
        if not self.is_plain:
            self._staged = self.read(self.start, self.stop).cpu()

    def staged(self, start: int, stop: int) -> Tensor | None:
        """Live fp32 storage of a range; None for what is encoded and not staged."""
        if self.is_plain:
            return self._at(start, stop)
        return None if self._staged is None else self._staged[start - self.start:stop - self.start]

    def unstage(self) -> list[tuple[int, int, Tensor]]:
        """End what `stage` began. Returns: the spans to close, with their values where they are stored."""
        if self._staged is None:
            return []
        staged, self._staged = self._staged, None
        return [(first, last, moved(staged[first - self.start:last - self.start], self.devices.storage)) for first, last in self._spans]

    def _at(self, start: int, stop: int) -> Tensor:
        assert self.start <= start and stop <= self.stop, f"[{start}, {stop}) is outside [{self.start}, {self.stop})"
        return self.flat[start - self.start:stop - self.start]

    def _scale_at(self, start: int) -> Tensor:
        return self.scales[bisect.bisect_right(self._starts, start) - 1]

    def _overlapping(self, start: int, stop: int) -> Sequence[Span]:
        return self._spans[max(0, bisect.bisect_right(self._starts, start) - 1):bisect.bisect_left(self._starts, stop)]

    def _gather(self, start: int, stop: int) -> Tensor:
        """Decode span by span; zeros between them."""
        found = torch.zeros(stop - start, dtype=torch.float32, device=self.devices.storage)
        for first, last in self._overlapping(start, stop):
            low, high = max(first, start), min(last, stop)
            if low < high:
                found[low - start:high - start] = moved(self.open(low, high), self.devices.storage)
        return found


class Remainders(Kept):
    """fp32 main parameters of bf16 ones, as the 16 bits that the model does not have.

    model: the model's own elements of a range of the flat state (inside one span); whoever closes a span writes there what `close_main` returns.
    """

    def __init__(self, start: int, stop: int, spans: Sequence[Span], devices: Devices, model: Callable[[int, int], Tensor]):
        super().__init__(start, stop, Format(torch.int16), spans, devices)
        self._model = model

    def open(self, start: int, stop: int) -> Tensor:
        low = self.devices.fetch(self._at(start, stop))
        return join(moved(self._model(start, stop), low.device), low)

    def close_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        high, low = split(values)
        self._at(start, stop).copy_(low, non_blocking=True)
        return high
