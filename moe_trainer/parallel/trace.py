"""What a rank waits for, and where in the program: the record behind every message about a hang.

All groups of a rank share one `Trace`. Every collective and message opens a `Call` in it and closes it when it is done; a
call that fails becomes a `CommunicationError`, which names the operation, the group, the place and how long it waited.
resilience/watchdog.py reads the trace from a thread of its own: it tells the other ranks where this one stands, and ends a
process whose call on the GPU never comes back.

Where in the program is known from three sides, none of which costs a collective anything: the loop says iteration and phase
(`Timers` passes its names on), hooks at the layers say which layer and direction (resilience/layer_trace.py), and the line of code is the
innermost frame outside parallel/ and torch, remembered as a code object and resolved only when somebody asks.

Cost: about 2 microseconds a call (a collective takes 50 and more on gloo, 20 on NCCL; measured in tests/parallel/
test_trace.py). On CUDA a call also records an event behind itself, since the host returns long before the GPU has done it.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_MACHINERY = ("moe_trainer.parallel.", "torch.")  # whose frames say nothing about the place
_GLOO = (
    "gloo/transport/",
    "gloo/rendezvous/",
    "Application timeout caused pair closure",
)  # in errors that gloo raises, as plain ones
_MOST_RANKS = 8  # of a group that a message lists
_PRUNE = 512  # open calls from which on finished ones are looked for


class CommunicationError(RuntimeError):
    """Another rank ended, is stuck or does something else: a collective of this rank failed or waited in vain.

    The first line says which, where and how long. `peers`, filled in by resilience/watchdog.py, says what the others were doing; it then
    prints all of it (`was_reported`).
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.peers = ""
        self.was_reported = False

    def __str__(self) -> str:
        return f"{self.args[0]}\n{self.peers}" if self.peers else self.args[0]


class Call:
    """One communication of this rank, from its start until it is done."""

    __slots__ = ("began", "code", "event", "group", "instruction", "number", "operation", "place", "ranks", "trace")

    def __init__(self, trace: "Trace", operation: str, group: str, ranks: tuple[int, ...], number: int):
        self.trace = trace
        self.operation = operation
        self.group = group
        self.ranks = ranks
        self.number = number
        self.place = (trace.layer, trace.phase, trace.microbatch, trace.iteration)
        self.began = time.monotonic()
        self.event: Any = None
        frame = _caller(sys._getframe(2))
        self.code, self.instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)

    def end(self, x: Tensor | None = None) -> None:
        """The host has done with it; on CUDA (x lies there) it is done when the stream has come this far."""
        if x is not None and x.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.event = torch.cuda.Event()
            self.event.record()
            return
        self.trace.close(self)

    def elapsed_s(self) -> float:
        """Seconds since it began, or since the host began to wait for it.

        A GPU may be far behind the host that queues its work: there it is at most the time since any call was last done.
        """
        return time.monotonic() - (self.began if self.event is None else max(self.began, self.trace.completed))

    def failure(self, error: RuntimeError) -> RuntimeError:
        """What to raise for an error of torch.distributed: a CommunicationError, or the error itself if it is our mistake."""
        if not is_communication_failure(error):
            self.trace.close(self)
            return error  # `raise error from error` shows it once
        self.trace.failed = self
        return CommunicationError(f"{self.describe()}: failed after {self.elapsed_s():.1f} s ({backend_reason(error)})")

    def describe(self) -> str:
        """Operation, group and place: "all_to_all number 3 of group ep (ranks 0 1) in dispatch (moe/...py:88), layer 3, ..."."""
        layer, phase, microbatch, iteration = self.place
        parts = [f"in {self.code.co_name} ({_location(self.code, self.instruction)})"] if self.code is not None else []
        parts += [layer] if layer else []
        parts += [phase] if phase else []
        parts += [f"microbatch {microbatch}"] if microbatch is not None else []
        parts += [f"iteration {iteration}"] if iteration is not None else []
        return (
            f"{self.operation} number {self.number} of group {self.group} (ranks {format_ranks(self.ranks)}) "
            + ", ".join(parts)
        )


class PhaseObserver(Protocol):
    """Somebody who measures what a rank does, and what it waits for (resilience/straggler.py)."""

    def enter(self, phase: str) -> None:
        """A phase of the loop begins, or the one around it goes on."""

    def wait(self) -> None:
        """From here on the rank, or its stream, waits for others."""

    def end_wait(self) -> None:
        """It has waited."""


class Trace:
    """The open calls of one rank, and where its program stands. Written by the rank, read by its watchdog."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.iteration: int | None = None
        self.open: dict[int, Call] = {}  # those that the host waits in, and those that the GPU has not done
        self.last: Call | None = None  # the newest call, open or not
        self.failed: Call | None = None
        self.progress = 0  # calls begun so far
        self.completed = 0.0  # when the GPU was last seen to have done a call, by time.monotonic()
        self.observer: PhaseObserver | None = None  # is told of phases and waits, where somebody measures them
        self._phase = ""
        self._here = threading.local()  # two passes may run in two threads, and backward on a GPU has one of its own
        self._counts: dict[str, int] = {}  # calls by group

    @property
    def phase(self) -> str:
        """What the loop is doing, by the timers' names."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase, self.layer = name, ""
        if self.observer is not None:
            self.observer.enter(name)

    @property
    def layer(self) -> str:
        """The layer that this thread is in, forward or backward."""
        return getattr(self._here, "layer", "")

    @layer.setter
    def layer(self, name: str) -> None:
        self._here.layer = name

    @property
    def microbatch(self) -> int | None:
        """The one that this thread works on, from 1."""
        return getattr(self._here, "microbatch", None)

    @microbatch.setter
    def microbatch(self, number: int | None) -> None:
        self._here.microbatch = number

    def begin(self, operation: str, group: str, ranks: tuple[int, ...]) -> Call:
        """Open a call; the caller's caller is the place."""
        number = self._counts[group] = self._counts.get(group, 0) + 1
        self.progress += 1
        call = self.last = Call(self, operation, group, ranks, number)
        self.open[id(call)] = call
        if len(self.open) >= _PRUNE:
            self.prune()
        return call

    def close(self, call: Call) -> None:
        """The call is done, or goes on by itself."""
        self.open.pop(id(call), None)

    def mark_waiting(self, call: Call) -> None:
        """From now on the rank waits for it."""
        call.began = time.monotonic()
        self.open[id(call)] = call

    def prune(self) -> None:
        """Close the calls that the GPU has done by now."""
        for call in list(self.open.values()):
            if call.event is not None and call.event.query():
                self.completed = time.monotonic()
                self.close(call)

    def oldest(self) -> Call | None:
        """The open call that waits longest."""
        self.prune()
        return min(list(self.open.values()), key=lambda call: call.began, default=None)


def is_communication_failure(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed tells of other ranks (a lost connection, a timeout) and not of wrong arguments."""
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _GLOO)


def backend_reason(error: BaseException) -> str:
    """What torch.distributed says, without its source line and its advice."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". This is")[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, the middle of a long list left out."""
    shown = " ".join(str(rank) for rank in ranks[:_MOST_RANKS])
    return shown + (f" ... {ranks[-1]}" if len(ranks) > _MOST_RANKS else "")


def program_frames(frame: FrameType | None) -> list[str]:
    """The frames of this program in a stack, innermost first: "train_step (training/pretrain.py:230)"."""
    found = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("moe_trainer."):
            found.append(f"{frame.f_code.co_name} ({_location(frame.f_code, frame.f_lasti)})")
        frame = frame.f_back
    return found


def _caller(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_MACHINERY):
        frame = frame.f_back
    return frame


def _location(code: CodeType, instruction: int) -> str:
    """File and line of an instruction, the file below the package."""
    line = next(
        (line for start, stop, line in code.co_lines() if start <= instruction < stop and line), code.co_firstlineno
    )
    return f"{code.co_filename.rpartition('moe_trainer/')[2]}:{line}"


class TracedWork:
    """The work object of an open call."""

    def __init__(self, call: Call, work: Any, x: Tensor | None):
        self._call, self._work, self._x = call, work, x
        call.trace.close(call)  # nobody waits for it yet

    def wait(self) -> bool:
        """Wait until it is done. Raises: CommunicationError when it fails or takes longer than the group's timeout."""
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


def communicate(
    trace: Trace,
    group: str,
    ranks: tuple[int, ...],
    operation: str,
    x: Tensor | None,
    async_op: bool,
    launch: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> TracedWork | None:
    """Run `launch(*args, **kwargs)`, a function of torch.distributed, as a call of the trace.

    x: a tensor of the call, which tells the device. async_op: what launch returns is a work object, to be waited for.
    Returns: the work object, None when it was no asynchronous call.
    Raises: CommunicationError when other ranks are the cause, and whatever else launch raises.
    """
    call = trace.begin(operation, group, ranks)
    observer = None if async_op else trace.observer
    if observer is not None:
        observer.wait()
    try:
        work = launch(*args, **kwargs)
    except RuntimeError as error:
        raise call.failure(error) from error
    if async_op:
        return TracedWork(call, work, x)
    if observer is not None:
        observer.end_wait()
    call.end(x)
    return None
