"""Gradients to the host and parameters back, a stretch at a time, beside the update that the host runs.

Two buffers each way: while the host updates one stretch, the gradients of the next are on their way and the parameters of the last one are
leaving. A buffer is used again when its copy is complete. Without overlap every copy is waited for where it stands. On a
CPU the copies are made from host memory to host memory, in the same buffers, in the same order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_trainer.optim.kept_state import Stretch

_DEPTH = 2


class Copies:
    """Copies between the device's memory and the host's; on CUDA on a stream of their own."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """What was queued on the device so far comes before any copy."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Queue a copy. Returns: a mark to `wait` for."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            mark = torch.cuda.Event()
            mark.record()
        return mark

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Let the host wait until a copy is complete."""
        if mark is not None:
            mark.synchronize()

    def end(self) -> None:
        """Whatever the device does from here on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _Buffers:
    """Host buffers that are used in turn; each with the mark of the copy that still uses it."""

    def __init__(self, numel: int, dtype: torch.dtype, pinned: bool):
        self._buffers = [torch.empty(numel, dtype=dtype, pin_memory=pinned) for _ in range(_DEPTH)]
        self._marks: list = [None] * _DEPTH
        self._next = 0

    def take(self, copies: Copies, numel: int) -> tuple[int, Tensor]:
        """The next buffer, when its last copy is complete."""
        number, self._next = self._next, (self._next + 1) % _DEPTH
        copies.wait(self._marks[number])
        self._marks[number] = None
        return number, self._buffers[number][:numel]

    def busy(self, number: int, mark: object) -> None:
        self._marks[number] = mark


class HostLane:
    """The way of the host's stretches through one step."""

    def __init__(self, device: torch.device, *, pinned_grads: bool, pinned_params: bool, overlap: bool, copies: Copies | None = None):
        self._copies = copies or Copies(device)
        self._pinned = {"grads": pinned_grads and device.type == "cuda", "params": pinned_params and device.type == "cuda"}
        self._overlap = overlap
        self._buffers: dict[tuple[str, torch.dtype], _Buffers] = {}
        self._longest = 0

    def gradients(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, Tensor]]:
        """Every stretch with its gradients on the host, in the format they have; good until the next one."""
        self._longest = max((stretch.stop - stretch.start for stretch in stretches), default=0)
        self._copies.begin()
        under_way = None
        for stretch in stretches:
            fetched = (stretch, *self._fetch(stretch))
            if not self._overlap:
                self._copies.wait(fetched[2])
            if under_way is not None:
                yield self._arrived(*under_way)
            under_way = fetched
        if under_way is not None:
            yield self._arrived(*under_way)

    def send(self, model: Tensor, values: Tensor) -> None:
        """Take updated parameters to the model, in its format."""
        number, buffer = self._take("params", model.dtype, values.numel())
        buffer.copy_(values)
        mark = self._copies.start(model, buffer)
        self._buffers["params", model.dtype].busy(number, mark)
        if not self._overlap:
            self._copies.wait(mark)

    def finish(self) -> None:
        """The device goes on when everything has arrived."""
        self._copies.end()

    def _fetch(self, stretch: Stretch) -> tuple[Tensor, object]:
        grad = stretch.grad
        _, buffer = self._take("grads", grad.dtype, grad.numel())
        return buffer, self._copies.start(buffer, grad)

    def _arrived(self, stretch: Stretch, buffer: Tensor, mark: object) -> tuple[Stretch, Tensor]:
        self._copies.wait(mark)
        return stretch, buffer

    def _take(self, kind: str, dtype: torch.dtype, numel: int) -> tuple[int, Tensor]:
        if (kind, dtype) not in self._buffers:
            self._buffers[kind, dtype] = _Buffers(self._longest, dtype, self._pinned[kind])
        return self._buffers[kind, dtype].take(self._copies, numel)
