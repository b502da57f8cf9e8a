"""Copies of gradients to the host and of parameters back, segment by segment, during the update that the host runs.

Each direction has two buffers: while the host updates one segment, the gradients of the next one and the parameters of
the previous one are copied. A buffer is reused once its copy is complete. Without overlap every copy is waited for at
once. On a CPU the same copies go from host memory to host memory.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_trainer.optim.optimizer_shard import UpdateSegment

_BUFFERS_PER_DIRECTION = 2


class CopyStream:
    """Asynchronous copies between device and host memory; on CUDA on a separate stream."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Order the copies after everything queued on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Queue a copy.

        Returns:
            The event to pass to `wait`.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Block the host until a copy is complete."""
        if event is not None:
            event.synchronize()

    def end(self) -> None:
        """Order everything that the device does from now on after the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _BufferRing:
    """Host buffers that are used in turn, each with the event of its last copy."""

    def __init__(self, numel: int, dtype: torch.dtype, pinned: bool):
        self._buffers = [torch.empty(numel, dtype=dtype, pin_memory=pinned) for _ in range(_BUFFERS_PER_DIRECTION)]
        self._events: list[torch.cuda.Event | None] = [None] * _BUFFERS_PER_DIRECTION
        self._next = 0

    def take(self, copies: CopyStream, numel: int) -> tuple[int, Tensor]:
        """Return index and view of the next buffer, once its last copy is complete."""
        index, self._next = self._next, (self._next + 1) % _BUFFERS_PER_DIRECTION
        copies.wait(self._events[index])
        self._events[index] = None
        return index, self._buffers[index][:numel]

    def mark_busy(self, index: int, event: torch.cuda.Event | None) -> None:
        self._events[index] = event


class HostUpdatePipeline:
    """Double-buffered transfers of the segments that the host updates."""

    def __init__(
        self,
        device: torch.device,
        *,
        pinned_grads: bool,
        pinned_params: bool,
        overlap: bool,
        copies: CopyStream | None = None,
    ):
        self._copies = copies or CopyStream(device)
        is_cuda = device.type == "cuda"
        self._is_pinned = {"grads": pinned_grads and is_cuda, "params": pinned_params and is_cuda}
        self._overlap = overlap
        self._rings: dict[tuple[str, torch.dtype], _BufferRing] = {}
        self._max_numel = 0

    def gradients(self, segments: Sequence[UpdateSegment]) -> Iterator[tuple[UpdateSegment, Tensor]]:
        """Yield every segment with its gradients on the host, in their own dtype; valid until the next one."""
        self._max_numel = max((segment.stop - segment.start for segment in segments), default=0)
        self._copies.begin()
        previous: tuple[UpdateSegment, Tensor, torch.cuda.Event | None] | None = None
        for segment in segments:
            current = (segment, *self._fetch(segment))
            if not self._overlap:
                self._copies.wait(current[2])
            if previous is not None:
                self._copies.wait(previous[2])
                yield previous[:2]
            previous = current
        if previous is not None:
            self._copies.wait(previous[2])
            yield previous[:2]

    def send(self, model: Tensor, values: Tensor) -> None:
        """Copy updated parameters to the model, in its dtype."""
        index, buffer = self._take("params", model.dtype, values.numel())
        buffer.copy_(values)
        event = self._copies.start(model, buffer)
        self._rings["params", model.dtype].mark_busy(index, event)
        if not self._overlap:
            self._copies.wait(event)

    def finish(self) -> None:
        """Let the device continue after all copies."""
        self._copies.end()

    def _fetch(self, segment: UpdateSegment) -> tuple[Tensor, torch.cuda.Event | None]:
        grad = segment.grad
        _, buffer = self._take("grads", grad.dtype, grad.numel())
        return buffer, self._copies.start(buffer, grad)

    def _take(self, kind: str, dtype: torch.dtype, numel: int) -> tuple[int, Tensor]:
        if (kind, dtype) not in self._rings:
            self._rings[kind, dtype] = _BufferRing(self._max_numel, dtype, self._is_pinned[kind])
        return self._rings[kind, dtype].take(self._copies, numel)
