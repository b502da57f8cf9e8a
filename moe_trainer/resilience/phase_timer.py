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


class PhaseTimer:
    """Time of every part. A subclass measures the time from the beginning of one part to that of the next."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._is_running, self._is_waiting = False, False
        self._part = "other"

    def start(self) -> None:
        self._is_running, self._is_waiting = True, False
        self._begin_part()

    def stop(self) -> None:
        self._begin_part()
        self._is_running = False

    def enter(self, phase: str) -> None:
        self._part = part_of(phase)
        self._begin_part()

    def wait(self) -> None:
        self._is_waiting = True
        self._begin_part()

    def end_wait(self) -> None:
        self._is_waiting = False
        self._begin_part()

    def pop_totals(self) -> dict[str, float]:
        """Return the seconds of every part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def _begin_part(self) -> None:
        if self._is_running:
            self._mark(WAITING if self._is_waiting else self._part)

    def _mark(self, part: str) -> None:
        raise NotImplementedError


class WallClockPhaseTimer(PhaseTimer):
    """Phase timer of the host's clock, which returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self._clock = clock
        self._last_mark: tuple[str, float] | None = None

    def stop(self) -> None:
        super().stop()
        self._last_mark = None

    def _mark(self, part: str) -> None:
        now = self._clock()
        if self._last_mark is not None:
            last_part, begin = self._last_mark
            self._seconds[last_part] += now - begin
        self._last_mark = part, now


class CudaEventPhaseTimer(PhaseTimer):
    """Phase timer of events on the GPU's current stream, read one iteration later, when the GPU has long passed them.

    Args:
        make_event: returns a timing event.
        is_capturing: whether the stream is being captured.
    """

    def __init__(
        self,
        make_event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ):
        super().__init__()
        self._make_event, self._is_capturing = make_event, is_capturing
        self._free_events: list[Any] = []
        self._marks: list[tuple[str, Any]] = []  # (the part that begins, its event)
        self._previous_marks: list[tuple[str, Any]] = []  # of the previous iteration

    def stop(self) -> None:
        super().stop()
        self._read(self._previous_marks)
        self._previous_marks, self._marks = self._marks, []

    def pop_totals(self) -> dict[str, float]:
        self._read(self._previous_marks)
        self._previous_marks = []
        return super().pop_totals()

    def _mark(self, part: str) -> None:
        if not self._is_capturing():
            event = self._free_events.pop() if self._free_events else self._make_event()
            event.record()
            self._marks.append((part, event))

    def _read(self, marks: list[tuple[str, Any]]) -> None:
        if marks:
            marks[-1][1].synchronize()
        for (part, begin), (_, end) in zip(marks, marks[1:]):
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        self._free_events += [event for _, event in marks]


def attach_phase_timer(trace: Trace, device: torch.device) -> PhaseTimer:
    """Make the phase timer of a device the observer of the trace."""
    trace.observer = CudaEventPhaseTimer() if device.type == "cuda" else WallClockPhaseTimer()
    return trace.observer
