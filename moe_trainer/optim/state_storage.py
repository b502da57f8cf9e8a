"""Storage of optimizer state between steps: a flat range of numbers, in a format (state_formats.py), on a device.

The update loads a few elements as fp32 (`load_fp32`), changes them and stores them (`store_fp32`). fp32 storage on the
update's device is passed without a copy; for everything else the fp32 copy lives as long as one segment's update.

Checkpoints contain fp32 whatever the format, as Megatron-LM's do, so any run can resume with any format. Saving decodes
only what is about to be written (`read_fp32`). Loading fills complete tensors: `stage` puts fp32 copies on the host
until `unstage`.
"""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.optim.state_formats import Format, ScaledFormat, decode, encode, join, split

Span = tuple[int, int]


@dataclass(frozen=True)
class StatePlacement:
    """Devices of a part of the optimizer state.

    Args:
        storage: device of the stored numbers.
        update: device of the update.
        always_copies: copy between the two even if they are the same device (a CPU that stands for host and device).
        is_pinned: the storage is pinned host memory.
    """

    storage: torch.device
    update: torch.device
    always_copies: bool = False
    is_pinned: bool = False

    def fetch(self, stored: Tensor) -> Tensor:
        """Copy stored numbers to the device of the update."""
        return copy_to(stored, self.update, self.always_copies)


def copy_to(x: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """Move a tensor; a copy to the host is synchronous."""
    return x.to(device, non_blocking=device.type != "cpu", copy=copy)


class MainParams(ABC):
    """fp32 main parameters of a range of a rank's flat state."""

    @abstractmethod
    def load_fp32(self, start: int, stop: int) -> Tensor:
        """Return fp32 values on the update's device, to be changed in place and passed to `store_main`."""

    @abstractmethod
    def store_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        """Store main parameters.

        Returns:
            The values as stored, for the model: a resumed run starts from the same ones.
        """

    @abstractmethod
    def read_fp32(self, start: int, stop: int) -> Tensor:
        """Return the values of any range on the storage device, not to be changed; may alias the storage."""


class ModelParams(MainParams):
    """Main parameters that are the model's own elements.

    Args:
        model_at: returns the model's elements of a range. The caller writes what `store_main` returns there.
        device: of the update.
        always_copies: change a copy although the model is on that device.
    """

    def __init__(self, model_at: Callable[[int, int], Tensor], device: torch.device, always_copies: bool):
        self._model_at, self._device, self._always_copies = model_at, device, always_copies

    def load_fp32(self, start: int, stop: int) -> Tensor:
        return copy_to(self._model_at(start, stop), self._device, copy=self._always_copies).float()

    def store_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        return values

    def read_fp32(self, start: int, stop: int) -> Tensor:
        return self._model_at(start, stop).float()


class StateStorage(MainParams):
    """Elements [start, stop) of a rank's flat state.

    Args:
        spans: ascending ranges that are stored at once. Gaps between spans (between parameters) remain zero.
    """

    def __init__(self, start: int, stop: int, fmt: Format, spans: Sequence[Span], placement: StatePlacement):
        self.start, self.stop, self.format, self.placement = start, stop, fmt, placement
        self.flat = torch.zeros(stop - start, dtype=fmt.dtype, device=placement.storage, pin_memory=placement.is_pinned)
        self._spans = spans
        self._span_starts = [first for first, _ in spans]
        self._staged: Tensor | None = None

    @property
    def is_fp32(self) -> bool:
        """Whether the numbers are stored without conversion."""
        return self.format.dtype == torch.float32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is stored, scales included."""
        return (self.flat,)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)

    def load_fp32(self, start: int, stop: int) -> Tensor:
        return self.placement.fetch(self._view(start, stop)).to(torch.float32)

    def store_fp32(self, start: int, stop: int, values: Tensor) -> None:
        """Store the values of a span."""
        view = self._view(start, stop)
        if values.data_ptr() != view.data_ptr():
            view.copy_(values, non_blocking=True)

    def store_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        self.store_fp32(start, stop, values)
        return values if self.is_fp32 else self.load_fp32(start, stop)

    def read_fp32(self, start: int, stop: int) -> Tensor:
        if self.is_fp32:
            return self._view(start, stop)
        values = torch.zeros(stop - start, dtype=torch.float32, device=self.placement.storage)
        for first, last in self._overlapping_spans(start, stop):
            low, high = max(first, start), min(last, stop)
            if low < high:
                values[low - start : high - start] = copy_to(self.load_fp32(low, high), self.placement.storage)
        return values

    def stage(self) -> None:
        """Decode all values to fp32 on the host, where `staged_view` exposes them until `unstage`."""
        if not self.is_fp32:
            self._staged = self.read_fp32(self.start, self.stop).cpu()

    def staged_view(self, start: int, stop: int) -> Tensor | None:
        """Return live fp32 storage of a range, or None if the storage is encoded and not staged."""
        if self.is_fp32:
            return self._view(start, stop)
        return None if self._staged is None else self._staged[start - self.start : stop - self.start]

    def unstage(self) -> list[tuple[int, int, Tensor]]:
        """Return the staged spans with their values, which the caller stores, and drop the staged copy."""
        if self._staged is None:
            return []
        staged, self._staged = self._staged, None
        return [
            (first, last, copy_to(staged[first - self.start : last - self.start], self.placement.storage))
            for first, last in self._spans
        ]

    def _view(self, start: int, stop: int) -> Tensor:
        assert self.start <= start and stop <= self.stop, f"[{start}, {stop}) is outside [{self.start}, {self.stop})"
        return self.flat[start - self.start : stop - self.start]

    def _overlapping_spans(self, start: int, stop: int) -> Sequence[Span]:
        first = max(0, bisect.bisect_right(self._span_starts, start) - 1)
        return self._spans[first : bisect.bisect_left(self._span_starts, stop)]


class ScaledStateStorage(StateStorage):
    """Elements in a format with scales: one per span, in which a range that is loaded must be.

    Args:
        keep_positive: see `state_formats.encode`.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        fmt: ScaledFormat,
        spans: Sequence[Span],
        placement: StatePlacement,
        keep_positive: bool = False,
    ):
        super().__init__(start, stop, fmt, spans, placement)
        self._scaled_format, self._keep_positive = fmt, keep_positive
        self.scales = torch.ones(
            len(spans), dtype=torch.float32, device=placement.storage, pin_memory=placement.is_pinned
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.flat, self.scales

    def load_fp32(self, start: int, stop: int) -> Tensor:
        stored = self.placement.fetch(self._view(start, stop))
        return decode(stored, self.placement.fetch(self._scale_at(start)))

    def store_fp32(self, start: int, stop: int, values: Tensor) -> None:
        stored, scale = encode(values, self._scaled_format, self._keep_positive)
        self._view(start, stop).copy_(stored, non_blocking=True)
        assert (start, stop) in self._overlapping_spans(start, stop), f"[{start}, {stop}) is no span"
        self._scale_at(start).copy_(scale, non_blocking=True)

    def _scale_at(self, start: int) -> Tensor:
        return self.scales[bisect.bisect_right(self._span_starts, start) - 1]


def make_storage(
    start: int,
    stop: int,
    fmt: Format,
    spans: Sequence[Span],
    placement: StatePlacement,
    keep_positive: bool = False,
) -> StateStorage:
    """Allocate elements in a format of any kind; see StateStorage and ScaledStateStorage."""
    if isinstance(fmt, ScaledFormat):
        return ScaledStateStorage(start, stop, fmt, spans, placement, keep_positive)
    return StateStorage(start, stop, fmt, spans, placement)


class MasterRemainderStorage(StateStorage):
    """fp32 main parameters of bf16 parameters, stored as the 16 bits that the model does not have.

    Args:
        model_at: returns the model's own elements of a range inside one span. The caller writes what `store_main`
            returns there.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        spans: Sequence[Span],
        placement: StatePlacement,
        model_at: Callable[[int, int], Tensor],
    ):
        super().__init__(start, stop, Format(torch.int16), spans, placement)
        self._model_at = model_at

    def load_fp32(self, start: int, stop: int) -> Tensor:
        low = self.placement.fetch(self._view(start, stop))
        return join(copy_to(self._model_at(start, stop), low.device), low)

    def store_main(self, start: int, stop: int, values: Tensor) -> Tensor:
        high, low = split(values)
        self._view(start, stop).copy_(low, non_blocking=True)
        return high
