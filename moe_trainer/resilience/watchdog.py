"""Ends every rank when one exits, hangs or diverges, with a message that says which rank waited for what.

A failure is noticed in one of three ways. On gloo the host waits inside a collective, which raises when the group's
timeout passes or a connection is lost (CommunicationError). On NCCL the host never notices: a thread watches the
trace for a call that the GPU does not finish in time. And a rank that fails publishes it in the heartbeat store, so
that its peers stop waiting.

The message names the call that this rank waited in, then its peers, most likely culprits first: exited, no heartbeat,
still computing, waiting in a different collective. A second thread posts heartbeats. Both are threads of this
process, so that they see the interpreter's stack and end with it; they sleep nearly all the time.
"""

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from typing_extensions import Self  # typing.Self needs Python 3.11; torch brings this package

from arguments.program import program_name
from moe_trainer.exit_codes import ExitCode
from moe_trainer.parallel.trace import (
    Call,
    CommunicationError,
    Trace,
    backend_reason,
    format_ranks,
    is_communication_failure,
    program_frames,
)
from moe_trainer.resilience.flight_recorder import FlightRecorder
from moe_trainer.resilience.heartbeat import STORE_TIMEOUT_S, HeartbeatStore, RankStatus, StoreUnavailableError

# In a larger job the store would have to send a million statuses. There the first ranks to exit read those of their
# call's group, and all others read those of these first ranks.
_MAX_WORLD_SIZE_TO_READ_ALL = 64
_NUM_FIRST_EXITED = 8
_MAX_HEARTBEATS_PER_S = 500  # of all ranks together
_POLL_INTERVAL_S = 0.5  # how soon a changed timeout takes effect
_INTERRUPTED_WAIT_S = 5.0
_TERMINATED_WAIT_S = 2.0  # between the signals of the first and of the last rank
_MIN_HEARTBEAT_TIMEOUT_S = 2.0  # a busy machine can delay the heartbeat of a healthy rank this long


def nothing_to_record(error: BaseException, is_first: bool) -> None:
    """Do nothing: the run has not begun, or its end is recorded."""


class Watchdog:
    """Watches one rank. Use it as a context manager around everything that communicates.

    Args:
        heartbeats: None with one rank.
        timeout: seconds that a collective may take; the attribute may be changed at any time.
        end: ends the process (replaced in tests).
        recorder: writes the last communications of a rank that exits because of another one.

    Attributes:
        on_failure: called with the error that ends this rank and whether no other rank has ended before, in any thread;
            does not raise.
    """

    def __init__(
        self,
        trace: Trace,
        world_size: int,
        heartbeats: HeartbeatStore | None,
        timeout: float,
        end: Callable[[int], None] = os._exit,
        recorder: FlightRecorder | None = None,
    ):
        self.timeout = timeout
        self.on_failure: Callable[[BaseException, bool], None] = nothing_to_record
        self._trace, self._world_size, self._heartbeats = trace, world_size, heartbeats
        self._end, self._recorder = end, recorder
        self._seq = 0
        self._has_exited_peers = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._final: RankStatus | None = None
        self._exit_position = 1
        self._num_lost = 0  # peers without heartbeat, which will not read the statuses

    @property
    def period(self) -> float:
        """Seconds between two heartbeats. One store serves all ranks, so more ranks post less often."""
        return max(min(5.0, max(0.2, self.timeout / 60.0)), self._world_size / _MAX_HEARTBEATS_PER_S)

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds without a new heartbeat after which a rank is reported as dead."""
        return max(self._first_pause, _MIN_HEARTBEAT_TIMEOUT_S)

    @property
    def _statuses(self) -> HeartbeatStore:
        """Statuses of all ranks, of a program of several."""
        assert self._heartbeats is not None
        return self._heartbeats

    @property
    def _first_pause(self) -> float:
        """Seconds between the first two reads of the peers' statuses: time for two heartbeats."""
        return 2.2 * self.period

    @property
    def grace(self) -> float:
        """Seconds that the main thread has to notice a failure before the watching thread acts."""
        return min(30.0, max(2.0, self.timeout / 10.0))

    def __enter__(self) -> Self:
        self._threads = [
            threading.Thread(target=work, name=f"watchdog {work.__name__}", daemon=True)
            for work in (self._watch, self._post_heartbeats)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        raised = self._to_communication_error(error)
        if raised is not None:
            self._report_exit(raised)
        self._stopped.set()
        for thread in self._threads:
            # A thread inside the store when the interpreter ends would abort the process. A dead store never answers.
            thread.join(STORE_TIMEOUT_S + 1.0 if error is None else 1.0)
        if raised is not None and raised is not error:
            raise raised from error

    def _to_communication_error(self, error: BaseException | None) -> BaseException | None:
        """Convert a lost peer that torch itself noticed, outside the groups' own calls, into a CommunicationError."""
        if isinstance(error, CommunicationError) or not (
            isinstance(error, RuntimeError) and is_communication_failure(error)
        ):
            return error
        where = ", ".join([self._trace.phase or "outside the phases of the loop", f"iteration {self._trace.iteration}"])
        return CommunicationError(f"a collective inside torch, {where}: failed ({backend_reason(error)})")

    def report_signal(self, error: BaseException) -> None:
        """Pass a signal that ends this rank, KeyboardInterrupt or SystemExit, to `on_failure`.

        Launchers send SIGTERM to the other ranks when one has crashed, too. Every rank says in the store that it was
        terminated. If a rank does not, the last one, which records the end, gets a CommunicationError instead.
        """
        if self._heartbeats is not None and isinstance(error, SystemExit):
            is_last = self._trace.rank == self._world_size - 1
            self._publish_exit(RankStatus(0, "ended", "", "terminated by a signal", 0.0))
            silent = self._await_terminated() if is_last or self._trace.rank == 0 else ""
            if not is_last:
                return
            if silent:
                error = CommunicationError(f"terminated by a signal, as are all ranks when one is lost: {silent}")
                self._print(error)
        self.on_failure(error, True)

    def _await_terminated(self) -> str:
        """Wait until all ranks have said that they exit; return which ones do not in time."""
        # rank 0 may host the store
        deadline = time.monotonic() + _TERMINATED_WAIT_S * (2 if self._trace.rank == 0 else 1)
        # without the store its host may have been terminated like this rank, and be gone by now
        with suppress(StoreUnavailableError):
            while (count := self._statuses.read_num_exited()) < self._world_size:
                if time.monotonic() >= deadline:
                    if self._world_size > _MAX_WORLD_SIZE_TO_READ_ALL:
                        return f"no word from {self._world_size - count} of {self._world_size} ranks"
                    exited = self._statuses.first_exited_ranks(self._world_size)
                    silent = sorted(set(range(self._world_size)).difference(exited))
                    return f"no word from rank{'s' if len(silent) > 1 else ''} {format_ranks(silent)}"
                time.sleep(0.05)
        return ""

    def _report_exit(self, error: BaseException) -> None:
        """Publish why this rank exits. For a CommunicationError, add what the peers were doing and print it."""
        if self._heartbeats is None or self._world_size == 1:
            if isinstance(error, CommunicationError):
                self._print(error)
            self.on_failure(error, True)
            return
        text = str(error).splitlines()[0] if str(error) else ""
        if isinstance(error, CommunicationError):
            self._publish_exit(RankStatus(0, "failed", "", text, 0.0))
            recorded = [] if self._recorder is None else [f"  {self._recorder.write()}"]
            error.peers = "\n".join([self._describe_peers(), *recorded])
            self._print(error)
        else:
            self._publish_exit(RankStatus(0, "ended", "", f"{type(error).__name__}: {text}", 0.0))
        self.on_failure(error, self._exit_position == 1)
        self._wait_for_peers_to_read(isinstance(error, KeyboardInterrupt))

    def _print(self, error: CommunicationError) -> None:
        """Print the message. It must be out early: torchrun kills all ranks 30 s after the first one dies."""
        error.was_reported = True
        print(f"{program_name('train')}: rank {self._trace.rank}: {error}", file=sys.stderr, flush=True)

    def _publish_exit(self, final: RankStatus) -> None:
        if self._final is not None:  # a signal and an error: counted once
            return
        self._final = final  # the posting thread repeats it from now on
        with suppress(StoreUnavailableError):  # _describe_peers runs into the same error and reports it
            self._exit_position = self._statuses.publish_exit(final)

    def _wait_for_peers_to_read(self, is_interrupted: bool) -> None:
        """Keep the store alive, which rank 0 may host, until the peers have read it or had the time to.

        After Ctrl-C, which usually reaches all ranks, only for a short time: torchrun kills after 30 s.
        """
        # They notice the exit (at most two heartbeats later), wait out the grace period, and read the statuses.
        wait = self.grace + 4 * self.period + self.heartbeat_timeout + 2 * _POLL_INTERVAL_S
        deadline = time.monotonic() + (min(wait, _INTERRUPTED_WAIT_S) if is_interrupted else wait)
        with suppress(StoreUnavailableError):  # the peers cannot read it either
            self._statuses.acknowledge()
            while (
                self._trace.rank == 0
                and time.monotonic() < deadline
                and self._statuses.num_acknowledged() < self._world_size - self._num_lost
            ):
                time.sleep(0.1)

    # ---- the posting thread

    def _post_heartbeats(self) -> None:
        last_post = -math.inf
        while not self._stopped.is_set():
            if time.monotonic() - last_post >= self.period:
                last_post = time.monotonic()
                try:
                    self._post()
                    self._has_exited_peers = self._heartbeats is not None and self._heartbeats.num_exited() > 0
                except StoreUnavailableError:
                    return  # a rank that waits for the store's host notices that by itself
            self._stopped.wait(min(self.period, _POLL_INTERVAL_S))

    def _post(self) -> None:
        if self._heartbeats is not None:
            self._seq += 1
            status = self._final or self._status()
            self._heartbeats.post(RankStatus(self._seq, status.state, status.call, status.text, status.seconds))

    def _status(self) -> RankStatus:
        call = self._trace.oldest()
        if call is not None:
            return RankStatus(0, "waits", _key(call), call.describe(), call.elapsed_s())
        last = self._trace.last
        stack = program_frames(_frame_of(threading.main_thread()))
        text = f"now in {' <- '.join(stack[:3])}" if stack else "now outside the program's own code"
        text += f", {self._trace.phase}" if self._trace.phase else ""
        text += f", iteration {self._trace.iteration}" if self._trace.iteration is not None else ""
        if last is None:
            return RankStatus(0, "runs", "", f"{text}; no communication yet", 0.0)
        return RankStatus(0, "runs", "", f"{text}; last communication: {last.describe()}", last.elapsed_s())

    # ---- the watching thread

    def _watch(self) -> None:
        noticed_exit: float | None = None
        while not self._stopped.wait(min(self.period, _POLL_INTERVAL_S)):
            if self._has_exited_peers and noticed_exit is None:
                noticed_exit = time.monotonic()
            call = self._trace.oldest()
            if call is None or self._final is not None or self._trace.failed is not None:
                continue
            limit = self.timeout if call.event is not None else self.timeout + self.grace
            if call.elapsed_s() > limit:
                self._end_process(call, f"not done after {call.elapsed_s():.1f} s")
            elif noticed_exit is not None and min(time.monotonic() - noticed_exit, call.elapsed_s()) > self.grace:
                self._end_process(call, f"not done after {call.elapsed_s():.1f} s, and another rank has failed")

    def _end_process(self, call: Call, reason: str) -> None:
        """End this process from the watching thread, because the main thread is stuck."""
        self._trace.failed = call
        self._report_exit(CommunicationError(f"{call.describe()}: {reason}"))
        self._end(ExitCode.COMMUNICATION_FAILED)
        self._stopped.set()

    # ---- the peers

    def _describe_peers(self) -> str:
        """Return what the peers are doing. A rank whose heartbeat advances between two reads is alive."""
        rank = self._trace.rank
        try:
            ranks = set(range(self._world_size))
            if self._world_size > _MAX_WORLD_SIZE_TO_READ_ALL:
                ranks = set(self._statuses.first_exited_ranks(_NUM_FIRST_EXITED))
                if self._exit_position <= _NUM_FIRST_EXITED and self._trace.failed is not None:
                    ranks |= set(self._trace.failed.ranks)
            ranks.discard(rank)
            first, began = self._statuses.read(ranks), time.monotonic()
            time.sleep(self._first_pause)
            second = self._statuses.read(ranks)
            while time.monotonic() - began < self.heartbeat_timeout and not all(
                _is_settled(first.get(peer), second.get(peer)) for peer in ranks
            ):
                time.sleep(self.period)
                second = self._statuses.read(ranks)
        except StoreUnavailableError as error:
            return (
                "  peer status unavailable: lost connection to the rendezvous store "
                f"(hosted by rank 0 or the launcher): {error}"
            )
        self._num_lost = sum(not _is_settled(first.get(peer), second.get(peer)) for peer in ranks)
        failed_call = _key(self._trace.failed) if self._trace.failed is not None else ""
        return describe_peers(failed_call, sorted(ranks), first, second)


def _key(call: Call) -> str:
    return f"{call.operation} {call.group} {call.ranks} {call.number}"


def _is_settled(first: RankStatus | None, second: RankStatus | None) -> bool:
    """Whether the state of a rank is known: it has announced its exit, or its heartbeat has advanced."""
    return second is not None and (
        second.state in ("ended", "failed") or (first is not None and first.seq != second.seq)
    )


def describe_peers(
    failed_call: str, ranks: list[int], first: Mapping[int, RankStatus], second: Mapping[int, RankStatus]
) -> str:
    """Return one line per distinct status of the ranks at their first and second read, most likely culprits first.

    `failed_call` is the call that this rank waited in, as in RankStatus.call.
    """
    lines: dict[tuple[int, str], list[int]] = {}
    for rank in ranks:
        lines.setdefault(_classify_peer(failed_call, first.get(rank), second.get(rank)), []).append(rank)
    return "\n".join(
        f"  rank{'s' if len(line_ranks) > 1 else ''} {format_ranks(line_ranks)}: {text}"
        for (_, text), line_ranks in sorted(lines.items(), key=lambda item: item[0][0])
    )


def _classify_peer(failed_call: str, first: RankStatus | None, second: RankStatus | None) -> tuple[int, str]:
    """Return a sort key, lowest for the most likely culprit, and the state of a peer in words."""
    if second is None:
        return 1, "no status (never sent a heartbeat)"
    if second.state == "ended":
        return 0, f"exited: {second.text}"
    if second.state == "failed":
        return 4, f"also failed and is exiting: {second.text}"
    if first is not None and first.seq == second.seq:
        where = f"waiting in {second.text}" if second.state == "waits" else second.text
        return 1, f"no heartbeat (killed, stopped, or node lost); last seen: {where}"
    if second.state == "runs":
        return 2, f"running, not blocked in a collective: {second.text}, {second.seconds:.1f} s ago"
    if second.call == failed_call:
        return 5, "waiting in the same call"
    return 3, f"waiting in a different call for {second.seconds:.1f} s: {second.text}"


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the frame that a thread executes.

    Garbage collection is off meanwhile. Before Python 3.12, one that starts inside _current_frames can wait for a
    lock that the call itself holds, which deadlocks the process (CPython issue 106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)
    finally:
        if was_enabled:
            gc.enable()
