"""A CUDA stream next to that of the computation."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class SideStream:
    """Runs work concurrently with the computation: on one separate stream of a device, in the order of the calls.

    All work first waits for the computation's stream. So the allocator may give memory of this stream that the
    computation has freed to later work. Inputs must live until the computation has waited, or be marked with
    `record_stream`. A CPU runs the work at once.
    """

    def __init__(self, priority: int = 0) -> None:
        """Create no stream yet; `priority` is CUDA's, -1 for a high one."""
        self._priority = priority
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, work: Callable[[], T], device: torch.device) -> tuple[T, "torch.cuda.Event | None"]:
        """Return what the work returns, and an event to wait for before it is read."""
        return self.run_on_device(work, device) if device.type == "cuda" else (work(), None)

    def run_on_device(self, work: Callable[[], T], device: torch.device) -> "tuple[T, torch.cuda.Event]":
        """Do what `run` does, on a CUDA device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, self._priority)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return work(), stream.record_event()


def wait_for(event: "torch.cuda.Event | None", device: torch.device) -> None:
    """Make the computation wait for an event of `SideStream.run`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
