"""Time that a rank spends computing, by part of the iteration, and time that it spends waiting for other ranks.

A phase timer is the observer of a rank's trace (parallel/trace.py), which calls it when a phase of the loop begins
and when the rank waits in a collective. All time between `start` and `stop` counts for one part: "waiting", or the
part of the current phase. On the CPU the host's clock measures it; on a GPU events on the stream do, because the host
only queues the work.

Collectives inside a CUDA graph, and those that torch itself starts (fully sharded parameters), cannot be separated
and count as work.
"""

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from moe_trainer.parallel.trace import Trace

WAITING = "waiting"
PARTS = ("data", "forward", "backward", "gradients", "optimizer", "other", WAITING)
_PART_OF_PHASE = MappingProxyType(
    {
        "batch-generator": "data",
        "forward-compute": "forward",
        "backward-compute": "backward",
        "forward-backward-compute": "forward",  # a forward and a backward pass that alternate
        "all-grads-sync": "gradients",
        "layernorm-grads-all-reduce": "gradients",
        "embedding-grads-all-reduce": "gradients",
    }
)


def part_of(phase: str) -> str:
    """Return the part that a phase, given by the name of its timer, belongs to."""
    if phase.startswith(("optimizer", "params-all-gather")):
        return "optimizer"
    return _PART_OF_PHASE.get(phase, "other")


class WallClockPhaseTimer:
    """Phase timer of the host's clock.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._is_running, self._is_waiting = False, False
        self._part = "other"
        self._last = 0.0

    def start(self) -> None:
        """Begin an iteration."""
        self._is_running, self._is_waiting, self._last = True, False, self._clock()

    def stop(self) -> None:
        """End an iteration."""
        self._add_elapsed()
        self._is_running = False

    def enter(self, phase: str) -> None:
        self._add_elapsed()
        self._part = part_of(phase)

    def wait(self) -> None:
        self._add_elapsed()
        self._is_waiting = True

    def end_wait(self) -> None:
        self._add_elapsed()
        self._is_waiting = False

    def _add_elapsed(self) -> None:
        if self._is_running:
            now = self._clock()
            self._seconds[WAITING if self._is_waiting else self._part] += now - self._last
            self._last = now

    def pop_totals(self) -> dict[str, float]:
        """Return the seconds of every part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


class CudaEventPhaseTimer:
    """Phase timer of events on the GPU's current stream, read one iteration later, when the GPU has long passed them.

    Args:
        event: makes a timing event (replaced in tests).
        capturing: whether the stream is being captured.
    """

    def __init__(
        self,
        event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ):
        self._event, self._capturing = event, capturing
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._free: list[Any] = []
        self._previous_marks: list[
            tuple[str, Any]
        ] = []  # marks of the previous iteration: (the part that begins, its event)
        self._marks: list[tuple[str, Any]] = []
        self._is_running, self._is_waiting = False, False
        self._part = "other"

    def start(self) -> None:
        """Begin an iteration."""
        self._is_running, self._is_waiting = True, False
        self._mark()

    def stop(self) -> None:
        """End an iteration on the host."""
        self._mark()
        self._is_running = False
        self._read(self._previous_marks)
        self._previous_marks, self._marks = self._marks, []

    def enter(self, phase: str) -> None:
        self._part = part_of(phase)
        self._mark()

    def wait(self) -> None:
        self._is_waiting = True
        self._mark()

    def end_wait(self) -> None:
        self._is_waiting = False
        self._mark()

    def _mark(self) -> None:
        if self._is_running and not self._capturing():
            event = self._free.pop() if self._free else self._event()
            event.record()
            self._marks.append((WAITING if self._is_waiting else self._part, event))

    def _read(self, marks: list[tuple[str, Any]]) -> None:
        if marks:
            marks[-1][1].synchronize()
        for (part, begin), (_, end) in zip(marks, marks[1:]):
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        self._free += [event for _, event in marks]

    def pop_totals(self) -> dict[str, float]:
        """Return the seconds of every part since the last call."""
        self._read(self._previous_marks)
        self._previous_marks = []
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds


def attach_phase_timer(trace: Trace, device: torch.device) -> WallClockPhaseTimer | CudaEventPhaseTimer:
    """Make the phase timer of a device the observer of the trace."""
    trace.observer = CudaEventPhaseTimer() if device.type == "cuda" else WallClockPhaseTimer()
    return trace.observer
