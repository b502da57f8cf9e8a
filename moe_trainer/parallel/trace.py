"""Tracing of communication calls, for reports about hangs and lost ranks.

All groups of a rank share one `Trace`. Every collective and message is a `Call` in it from its start to its end; if it
fails, a `CommunicationError` names the operation, the group, the place in the program and the time. The watchdog
thread (resilience/watchdog.py) reads the trace, publishes it and terminates a process that hangs.

The place is iteration and phase (set by the loop), the layer and direction (set by hooks, resilience/layer_trace.py)
and the innermost frame outside parallel/ and torch, which is stored as a code object and formatted on demand.

Cost: about 2 microseconds per call (tests/parallel/test_trace.py), on CUDA also an event, because the host returns
first.
"""

import re
import sys
import threading
import time
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_SKIPPED_MODULES = ("moe_trainer.parallel.", "torch.")  # whose frames are not the place of a call
# in the messages of gloo, which raises a plain RuntimeError
_GLOO_ERRORS = ("gloo/transport/", "gloo/rendezvous/", "Application timeout caused pair closure")
_MAX_SHOWN_RANKS = 8
_PRUNE_THRESHOLD = 512  # open calls


class CommunicationError(RuntimeError):
    """A collective failed or timed out because of another rank.

    Attributes:
        peers: what the other ranks were doing, set by resilience/watchdog.py.
        was_reported: the watchdog has printed it.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.peers = ""
        self.was_reported = False

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.peers}" if self.peers else self.args[0]


class Call:
    """One communication call of this rank."""

    __slots__ = ("began", "code", "event", "group", "instruction", "number", "operation", "place", "ranks", "trace")

    code: CodeType | None
    instruction: int

    def __init__(self, trace: "Trace", operation: str, group: str, ranks: tuple[int, ...], number: int):
        self.trace, self.operation, self.group, self.ranks, self.number = trace, operation, group, ranks, number
        self.place = (trace.layer, trace.phase, trace.microbatch, trace.iteration)
        self.began = time.monotonic()
        self.event: Any = None
        frame = _caller(sys._getframe(2))
        self.code, self.instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)

    def end(self, x: Tensor | None = None) -> None:
        """Close the call, or on CUDA record the event after which it is closed."""
        if x is not None and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.event = torch.cuda.Event()
            self.event.record()
            return
        self.trace.close(self)

    def elapsed_s(self) -> float:
        """Return the seconds since the start, or since the host began to wait.

        A GPU may run far behind the host: there it is at most the time since any call was last completed.
        """
        return time.monotonic() - (self.began if self.event is None else max(self.began, self.trace.completed))

    def failure(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one of torch.distributed: a CommunicationError if other ranks are the cause."""
        if not is_communication_failure(error):
            self.trace.close(self)
            return error
        self.trace.failed = self
        return CommunicationError(f"{self.describe()}: failed after {self.elapsed_s():.1f} s ({backend_reason(error)})")

    def describe(self) -> str:
        """Return "all_to_all number 3 of group ep (ranks 0 1) in dispatch (moe/...py:88), layer 3, ..."."""
        layer, phase, microbatch, iteration = self.place
        parts = [f"in {self.code.co_name} ({_location(self.code, self.instruction)})"] if self.code is not None else []
        parts += [name for name in (layer, phase) if name]
        parts += [f"microbatch {microbatch}"] if microbatch is not None else []
        parts += [f"iteration {iteration}"] if iteration is not None else []
        return (
            f"{self.operation} number {self.number} of group {self.group} (ranks {format_ranks(self.ranks)}) "
            + ", ".join(parts)
        )


class PhaseObserver(Protocol):
    """Measures computation and waiting of a rank (resilience/straggler.py)."""

    def enter(self, phase: str) -> None:
        """Start a phase of the loop, or return to the enclosing one."""

    def wait(self) -> None:
        """Start waiting for other ranks, on the host or on the stream."""

    def end_wait(self) -> None: ...


class Trace:
    """The open calls of one rank and its place in the program; written by the rank, read by its watchdog thread.

    Attributes:
        open: calls that the host waits in or that the GPU has not finished.
        last: the newest call, open or not.
        progress: number of calls so far.
        completed: time.monotonic() at which the GPU was last seen to have finished a call.
        phase: what the loop is doing, a timer's name.
        layer: the layer, forward or backward, that this thread is in.
        microbatch: that this thread works on, from 1.
    """

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.iteration: int | None = None
        self.open: dict[int, Call] = {}
        self.last: Call | None = None
        self.failed: Call | None = None
        self.progress = 0
        self.completed = 0.0
        self.observer: PhaseObserver | None = None
        self._phase = ""
        self._thread = threading.local()  # forward and backward may run in different threads
        self._num_calls: dict[str, int] = {}  # by group

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase, self.layer = name, ""
        if self.observer is not None:
            self.observer.enter(name)

    @property
    def layer(self) -> str:
        return getattr(self._thread, "layer", "")

    @layer.setter
    def layer(self, name: str) -> None:
        self._thread.layer = name

    @property
    def microbatch(self) -> int | None:
        return getattr(self._thread, "microbatch", None)

    @microbatch.setter
    def microbatch(self, number: int | None) -> None:
        self._thread.microbatch = number

    def leave_layers(self) -> None:
        """Reset the layer of every thread; only this one keeps its microbatch."""
        number, self._thread = self.microbatch, threading.local()
        self.microbatch = number

    def begin(self, operation: str, group: str, ranks: tuple[int, ...]) -> Call:
        """Open a call; its place is the caller's caller."""
        number = self._num_calls[group] = self._num_calls.get(group, 0) + 1
        self.progress += 1
        call = self.last = Call(self, operation, group, ranks, number)
        self.open[id(call)] = call
        if len(self.open) >= _PRUNE_THRESHOLD:
            self.prune()
        return call

    def close(self, call: Call) -> None:
        self.open.pop(id(call), None)

    def mark_waiting(self, call: Call) -> None:
        call.began = time.monotonic()
        self.open[id(call)] = call

    def prune(self) -> None:
        """Close the calls that the GPU has finished."""
        for call in list(self.open.values()):
            if call.event is not None and call.event.query():
                self.completed = time.monotonic()
                self.close(call)

    def oldest(self) -> Call | None:
        """Return the open call that started first."""
        self.prune()
        return min(list(self.open.values()), key=lambda call: call.began, default=None)


def is_communication_failure(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed is a lost connection or a timeout, not a wrong argument."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _GLOO_ERRORS)


def backend_reason(error: BaseException) -> str:
    """Return the message of torch.distributed without its source line and advice."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is")[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, abbreviated if there are many."""
    shown = " ".join(str(rank) for rank in ranks[:_MAX_SHOWN_RANKS])
    return shown + (f" ... {ranks[-1]}" if len(ranks) > _MAX_SHOWN_RANKS else "")


def program_frames(frame: FrameType | None) -> list[str]:
    """Return our frames of a stack, innermost first: "train_step (training/pretrain.py:230)"."""
    lines = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("moe_trainer."):
            lines.append(f"{frame.f_code.co_name} ({_location(frame.f_code, frame.f_lasti)})")
        frame = frame.f_back
    return lines


def _caller(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_SKIPPED_MODULES):
        frame = frame.f_back
    return frame


def _location(code: CodeType, instruction: int) -> str:
    """Return file (below the package) and line of an instruction."""
    line = next(
        (line for start, stop, line in code.co_lines() if start <= instruction < stop and line), code.co_firstlineno
    )
    return f"{code.co_filename.rpartition('moe_trainer/')[2]}:{line}"


class TracedWork:
    """The work object of an asynchronous call. Its `wait` raises CommunicationError on failure or timeout."""

    def __init__(self, call: Call, work: Any, x: Tensor | None):
        self._call: Call | None = call
        self._work, self._x = work, x
        call.trace.close(call)  # open again when the host waits for it

    def wait(self) -> bool:
        call, self._call = self._call, None
        if call is None:
            return True
        call.trace.mark_waiting(call)
        observer = call.trace.observer
        if observer is not None:
            observer.wait()
        try:
            self._work.wait()
        except RuntimeError as error:
            raise call.failure(error) from error
        if observer is not None:
            observer.end_wait()
        call.end(self._x)
        self._work = self._x = None
        return True
