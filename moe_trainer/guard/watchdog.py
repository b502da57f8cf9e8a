"""When a rank ends, hangs or goes another way: every other rank ends too, and says who waited where.

Three ways lead here. On gloo the host waits inside a collective, and the group's timeout or the lost connection raises there
(CommunicationError). On NCCL the host never notices: a thread watches the trace for a call that the GPU has not done in
time. And a rank that has failed says so on the notice board: whoever waits for anything then does not wait out the rest.
All of them end with one message: what this rank waited for and how long, then the others, the guilty first: those
that ended by themselves, those that give no sign of life, those that compute, those that wait elsewhere.

A second thread posts this rank's place a few times per timeout. Both sleep nearly always: no cost to the training. They are
threads of this process on purpose: they see the interpreter's stack, and end with it.
"""

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from moe_trainer.exit_codes import ExitCode
from moe_trainer.guard.bulletin import PATIENCE, Bulletin, Note, StoreGoneError
from moe_trainer.guard.flight_recorder import FlightRecorder
from moe_trainer.parallel.trace import (
    Call,
    CommunicationError,
    Trace,
    backend_reason,
    is_communication_failure,
    program_frames,
    shown_ranks,
)

_READ_ALL = 64  # world size up to which everybody's note is read; above, the store would have to send a million of them:
_FIRST_ENDS = 8  # the first to end read those of their call's group, the rest what these first ones say
_POSTS_PER_SECOND = 500  # of all ranks together
_TICK = 0.5  # seconds: how soon a changed timeout is noticed
_STANDSTILL = 2.0  # seconds without a posting that a busy machine may cost a living rank


class Watchdog:
    """Watches one rank; use as a context manager around everything that communicates.

    timeout: seconds that a collective may take; may be changed at any time. recorder: writes its last communications when a rank ends
    because of another. end: how the process ends (tests).
    """

    def __init__(self, trace: Trace, world_size: int, bulletin: Bulletin | None, timeout: float,
                 end: Callable[[int], None] = os._exit, recorder: FlightRecorder | None = None):
        self.timeout = timeout
        self._trace = trace
        self._world_size = world_size
        self._bulletin = bulletin
        self._end = end
        self._recorder = recorder
        self._beat = 0
        self._others_ended = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._final: Note | None = None
        self._place_among_ends = 1

    @property
    def period(self) -> float:
        """Seconds between two postings. One store serves all ranks, so that many of them post more seldom."""
        return max(min(5.0, max(0.2, self.timeout / 60.0)), self._world_size / _POSTS_PER_SECOND)

    @property
    def standstill(self) -> float:
        """Seconds without a new posting after which a rank is said to give no sign of life."""
        return max(self._pause, _STANDSTILL)

    @property
    def _pause(self) -> float:
        """Seconds between the first two looks at what the others post: time for two postings."""
        return 2.2 * self.period

    @property
    def grace(self) -> float:
        """Seconds that a failure may take to become known by itself before this thread acts."""
        return min(30.0, max(2.0, self.timeout / 10.0))

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=work, name=f"watchdog {work.__name__}", daemon=True)
                         for work in (self._watch, self._posting)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        told = self._as_told(error)
        if told is not None and self._bulletin is not None and self._world_size > 1:
            self._leave(told)
        self._stopped.set()
        for thread in self._threads:
            # a thread inside the store when the interpreter ends would abort the process; a store that is gone answers never
            thread.join(PATIENCE + 1.0 if error is None else 1.0)
        if told is not error:
            raise told from error

    def _as_told(self, error: BaseException | None) -> BaseException | None:
        """A lost peer that no group's own call noticed, but something of torch's, as the CommunicationError that it is."""
        if isinstance(error, CommunicationError) or not (isinstance(error, RuntimeError) and is_communication_failure(error)):
            return error
        where = ", ".join([self._trace.phase or "outside the phases of the loop", f"iteration {self._trace.iteration}"])
        return CommunicationError(f"a collective of torch's own, {where}: failed ({backend_reason(error)})")

    def _leave(self, error: BaseException) -> None:
        """Tell the others why this rank ends; a CommunicationError learns from them what they were doing, and is printed."""
        ours = isinstance(error, CommunicationError)
        text = str(error).splitlines()[0] if str(error) else ""
        self._say(Note(0, "failed" if ours else "ended", "", text if ours else f"{type(error).__name__}: {text}", 0.0))
        if ours:
            written = [] if self._recorder is None else [f"  {self._recorder.write()}"]
            error.peers = "\n".join([self._peers(), *written])
            self._tell(error)
        self._linger()

    def _tell(self, error: CommunicationError) -> None:
        """Print it before lingering: launchers kill the others half a minute after they have seen one rank die."""
        error.told = True
        print(f"pretrain_moe.py: rank {self._trace.rank}: {error}", file=sys.stderr, flush=True)

    def _say(self, final: Note) -> None:
        self._final = final  # from now on the posting thread repeats it
        try:
            self._place_among_ends = self._bulletin.announce_end(final)
        except StoreGoneError:
            pass  # nobody is left to be told; _peers finds the same and says it

    def _linger(self) -> None:
        """Rank 0 may keep the store: it stays until the others have read it, for as long as that may take them."""
        # they notice the end (two postings apart at most), wait out the grace, and look at the notes
        deadline = time.monotonic() + self.grace + 4 * self.period + self.standstill + 2 * _TICK
        try:
            self._bulletin.leave()
            while self._trace.rank == 0 and time.monotonic() < deadline and self._bulletin.have_left() < self._world_size:
                time.sleep(0.1)
        except StoreGoneError:
            pass  # nothing to wait for

    # ---- the posting thread

    def _posting(self) -> None:
        posted = -math.inf
        while not self._stopped.is_set():
            if time.monotonic() - posted >= self.period:
                posted = time.monotonic()
                try:
                    self._post()
                    self._others_ended = self._bulletin is not None and self._bulletin.ends() > 0
                except StoreGoneError:
                    return  # whoever waits for the rank that kept it finds out by itself
            self._stopped.wait(min(self.period, _TICK))

    def _post(self) -> None:
        if self._bulletin is not None:
            self._beat += 1
            note = self._final or self._note()
            self._bulletin.post(Note(self._beat, note.state, note.call, note.text, note.seconds))

    def _note(self) -> Note:
        call = self._trace.oldest()
        if call is not None:
            return Note(0, "waits", _key(call), call.site(), call.waited())
        last = self._trace.last
        stack = program_frames(_frame_of(threading.main_thread()))
        text = f"now in {' <- '.join(stack[:3])}" if stack else "now outside the program's own code"
        text += f", {self._trace.phase}" if self._trace.phase else ""
        text += f", iteration {self._trace.iteration}" if self._trace.iteration is not None else ""
        if last is None:
            return Note(0, "runs", "", f"{text}; it has not communicated yet", 0.0)
        return Note(0, "runs", "", f"{text}; its last communication: {last.site()}", last.waited())

    # ---- the watching thread

    def _watch(self) -> None:
        ended_since: float | None = None
        while not self._stopped.wait(min(self.period, _TICK)):
            if self._others_ended and ended_since is None:
                ended_since = time.monotonic()
            call = self._trace.oldest()
            if call is None or self._final is not None or self._trace.failed is not None:
                continue
            limit = self.timeout if call.event is not None else self.timeout + self.grace
            if call.waited() > limit:
                self._stop_process(call, f"not done after {call.waited():.1f} s")
            elif ended_since is not None and min(time.monotonic() - ended_since, call.waited()) > self.grace:
                self._stop_process(call, f"waited {call.waited():.1f} s, and the job has failed")

    def _stop_process(self, call: Call, why: str) -> None:
        """End this process from the watching thread: the main one is stuck."""
        self._trace.failed = call
        error = CommunicationError(f"{call.site()}: {why}")
        if self._bulletin is not None:
            self._leave(error)
        else:
            self._tell(error)
        self._end(ExitCode.COMMUNICATION_FAILED)
        self._stopped.set()

    # ---- the others

    def _peers(self) -> str:
        """What the other ranks are doing, from the first and the last of several looks at the notice board: who moves is alive."""
        me = self._trace.rank
        try:
            ranks = set(range(self._world_size))
            if self._world_size > _READ_ALL:
                ranks = set(self._bulletin.first_to_end(_FIRST_ENDS))
                if self._place_among_ends <= _FIRST_ENDS and self._trace.failed is not None:
                    ranks |= set(self._trace.failed.ranks)
            ranks.discard(me)
            first, began = self._bulletin.read(ranks), time.monotonic()
            time.sleep(self._pause)
            second = self._bulletin.read(ranks)
            while time.monotonic() - began < self.standstill and not all(_moves(first.get(rank), second.get(rank)) for rank in ranks):
                time.sleep(self.period)
                second = self._bulletin.read(ranks)
        except StoreGoneError as error:
            return f"  the others cannot be asked: the job's store (kept by rank 0, or by its launcher) is gone ({error})"
        mine = _key(self._trace.failed) if self._trace.failed is not None else ""
        return describe(mine, sorted(ranks), first, second)


def _key(call: Call) -> str:
    return f"{call.operation} {call.group} {call.ranks} {call.number}"


def _moves(first: Note | None, second: Note | None) -> bool:
    """Whether nothing more is to be learnt of a rank: it has said that it ends, or posted anew."""
    return second is not None and (second.state in ("ended", "failed") or first is not None and first.beat != second.beat)


def describe(mine: str, ranks: list[int], first: Mapping[int, Note], second: Mapping[int, Note]) -> str:
    """What the ranks were doing, the guilty first, ranks in the same place on one line.

    mine: the call that this rank waits in, as in Note.call. first, second: notes of two looks.
    """
    lines: dict[tuple[int, str], list[int]] = {}
    for rank in ranks:
        lines.setdefault(_verdict(mine, first.get(rank), second.get(rank)), []).append(rank)
    return "\n".join(f"  rank{'s' if len(those) > 1 else ''} {shown_ranks(those)}: {text}"
                     for (_, text), those in sorted(lines.items(), key=lambda item: item[0][0]))


def _verdict(mine: str, first: Note | None, second: Note | None) -> tuple[int, str]:
    """(order of guilt, what is known of a rank)."""
    if second is None:
        return 1, "nothing is known (it never got as far as its first note)"
    if second.state == "ended":
        return 0, f"ended: {second.text}"
    if second.state == "failed":
        return 4, f"also waited in vain, and ends: {second.text}"
    if first is not None and first.beat == second.beat:
        where = f"it waited in {second.text}" if second.state == "waits" else second.text
        return 1, f"gives no sign of life (killed, stopped, or its node is gone); last seen: {where}"
    if second.state == "runs":
        return 2, f"is alive and waits for nobody: {second.text}, {second.seconds:.1f} s ago"
    if second.call == mine:
        return 5, "waits in the same call"
    return 3, f"waits elsewhere, for {second.seconds:.1f} s: {second.text}"


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Return what a thread executes.

    Without garbage collection: before Python 3.12 one that begins inside _current_frames can wait for a lock that the call itself holds,
    and the whole process stands still (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident)
    finally:
        if collects:
            gc.enable()
