"""What of an iteration a rank spends on its own work, by part, and what it spends waiting for others.

A stopwatch is the meter of a rank's trace (parallel/trace.py), which tells it when a phase of the loop begins and when the rank waits in a
collective. All time between `start` and `stop` belongs to one part: "waiting", or that of the phase that runs. On the CPU the host's clock
says how long; on a GPU, whose work the host only queues, events on the stream do, and a wait is what the stream stands still for.

What nobody can tell apart: collectives inside a CUDA graph, and those of torch's own (fully sharded parameters); they count as work.
"""

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from moe_trainer.parallel.trace import Trace

WAITING = "waiting"
PARTS = ("data", "forward", "backward", "gradients", "optimizer", "other", WAITING)
_PART_OF_PHASE = MappingProxyType({
    "batch-generator": "data",
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-backward-compute": "forward",  # two passes that take turns
    "all-grads-sync": "gradients",
    "layernorm-grads-all-reduce": "gradients",
    "embedding-grads-all-reduce": "gradients",
})


def part_of(phase: str) -> str:
    """The part that a phase, by the name of its timer, belongs to."""
    if phase.startswith(("optimizer", "params-all-gather")):
        return "optimizer"
    return _PART_OF_PHASE.get(phase, "other")


class HostStopwatch:
    """By the host's clock. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._runs, self._waits = False, False
        self._part = "other"
        self._last = 0.0

    def start(self) -> None:
        """An iteration begins."""
        self._runs, self._waits, self._last = True, False, self._clock()

    def stop(self) -> None:
        """It is over."""
        self._book()
        self._runs = False

    def enter(self, phase: str) -> None:
        self._book()
        self._part = part_of(phase)

    def wait(self) -> None:
        self._book()
        self._waits = True

    def proceed(self) -> None:
        self._book()
        self._waits = False

    def _book(self) -> None:
        if self._runs:
            now = self._clock()
            self._seconds[WAITING if self._waits else self._part] += now - self._last
            self._last = now

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


class StreamStopwatch:
    """By events on the GPU's current stream; they are read one iteration later, when the GPU has passed them long ago.

    event: makes one that can be recorded and asked for the milliseconds to another (tests).
    """

    def __init__(self, event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
                 capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing):
        self._event, self._capturing = event, capturing
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._free: list[Any] = []
        self._before: list[tuple[str, Any]] = []  # marks of the iteration before: (the part that begins, where)
        self._marks: list[tuple[str, Any]] = []
        self._runs, self._waits = False, False
        self._part = "other"

    def start(self) -> None:
        """An iteration begins."""
        self._runs, self._waits = True, False
        self._mark()

    def stop(self) -> None:
        """It is over, for the host."""
        self._mark()
        self._runs = False
        self._read(self._before)
        self._before, self._marks = self._marks, []

    def enter(self, phase: str) -> None:
        self._part = part_of(phase)
        self._mark()

    def wait(self) -> None:
        self._waits = True
        self._mark()

    def proceed(self) -> None:
        self._waits = False
        self._mark()

    def _mark(self) -> None:
        if self._runs and not self._capturing():
            event = self._free.pop() if self._free else self._event()
            event.record()
            self._marks.append((WAITING if self._waits else self._part, event))

    def _read(self, marks: list[tuple[str, Any]]) -> None:
        if marks:
            marks[-1][1].synchronize()
        for (part, begin), (_, end) in zip(marks, marks[1:]):
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        self._free += [event for _, event in marks]

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call."""
        self._read(self._before)
        self._before = []
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


def attach(trace: Trace, device: torch.device) -> HostStopwatch | StreamStopwatch:
    """A stopwatch for the device, which the trace tells what happens from now on."""
    trace.meter = StreamStopwatch() if device.type == "cuda" else HostStopwatch()
    return trace.meter
