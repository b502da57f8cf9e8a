"""Heartbeats: the status of every rank, in the rendezvous store, so that the state of a stuck rank can be reported.

The store is the TCPStore that the job's ranks connected through (a file store in tests); it is independent of the
process groups. A rank posts a few hundred bytes every few seconds from a background thread. If the store goes down
with its host, reading raises StoreUnavailableError; no call waits longer than STORE_TIMEOUT_S for an answer.
"""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one since Python 3.11
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from moe_trainer.parallel.trace import backend_reason

T = TypeVar("T")

STORE_TIMEOUT_S = 5.0
_READ_BATCH_SIZE = 128  # statuses read in one request


class StoreUnavailableError(RuntimeError):
    """The store does not answer: its process exited or is stopped, or its node is lost."""


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank.

    Attributes:
        seq: number of the heartbeat; a rank whose number does not change is dead or stopped.
        state: "runs", "waits", "failed" (timed out, or lost a peer) or "ended" (exited on its own error).
        call: operation, group and number of the collective it waits in, equal on all ranks in the same collective.
        text: where it is, or why it exited.
        seconds: how long it has been waiting, or since its last communication.
    """

    seq: int
    state: str
    call: str
    text: str
    seconds: float


def _translate_errors(operation: Callable[[], T]) -> T:
    try:
        return operation()
    except RuntimeError as error:  # torch's DistError, or a plain RuntimeError of a file store
        raise StoreUnavailableError(backend_reason(error)) from error


def _with_timeout(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method for at most STORE_TIMEOUT_S. A client of a stopped host ignores its own timeout."""

    @functools.wraps(method)
    def run(*args: Any) -> T:
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(_translate_errors(lambda: method(*args)))
            except StoreUnavailableError as error:
                outcome.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return outcome.result(STORE_TIMEOUT_S)
        except FutureTimeoutError:
            raise StoreUnavailableError(f"no answer in {STORE_TIMEOUT_S:.0f} s") from None

    return run


class HeartbeatStore:
    """Statuses of all ranks, by rank."""

    def __init__(self, store: dist.Store, rank: int):
        self.rank = rank
        # One client for the posting thread and one for reading: a client is locked while an operation hangs.
        clients = [store.clone(), store.clone()]  # type: ignore[attr-defined]  # not in torch's stubs
        for client in clients:
            client.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        self._posting, self._reading = (dist.PrefixStore("heartbeat", client) for client in clients)

    def post(self, status: RankStatus) -> None:
        """Replace this rank's status. For the posting thread only: the call may hang with the store's host."""
        _translate_errors(lambda: self._posting.set(_key(self.rank), _to_json(status)))

    def num_exited(self) -> int:
        """Return how many ranks have announced that they exit. For the posting thread only."""
        return _translate_errors(lambda: self._posting.add("ends", 0))

    @_with_timeout
    def publish_exit(self, status: RankStatus) -> int:
        """Publish the last status of this rank, which exits because the job has failed.

        Returns:
            How many ranks have exited, this one included.
        """
        self._reading.set(_key(self.rank), _to_json(status))
        position = self._reading.add("ends", 1)
        self._reading.set(f"end/{position}", str(self.rank))
        return position

    @_with_timeout
    def acknowledge(self) -> None:
        """Publish that this rank has read the statuses it needs."""
        self._reading.add("left", 1)

    @_with_timeout
    def num_acknowledged(self) -> int:
        """Return how many ranks have read the statuses they need."""
        return self._reading.add("left", 0)

    @_with_timeout
    def read(self, ranks: Collection[int]) -> dict[int, RankStatus]:
        """Return the statuses of those of the ranks that have posted one."""
        ordered = list(ranks)
        statuses: dict[int, RankStatus] = {}
        for begin in range(0, len(ordered), _READ_BATCH_SIZE):
            batch = ordered[begin : begin + _READ_BATCH_SIZE]
            if not self._reading.check([_key(rank) for rank in batch]):  # true only if all keys exist
                batch = [rank for rank in batch if self._reading.check([_key(rank)])]
            texts = self._reading.multi_get([_key(rank) for rank in batch]) if batch else []
            statuses |= {rank: RankStatus(**json.loads(text)) for rank, text in zip(batch, texts)}
        return statuses

    @_with_timeout
    def read_num_exited(self) -> int:
        """Return how many ranks have announced that they exit."""
        return self._reading.add("ends", 0)

    @_with_timeout
    def first_exited_ranks(self, count: int) -> list[int]:
        """Return the ranks that exited first, at most `count`."""
        keys = [f"end/{position}" for position in range(1, min(count, self._reading.add("ends", 0)) + 1)]
        return [int(self._reading.get(key)) for key in keys if self._reading.check([key])]


def _key(rank: int) -> str:
    return f"note/{rank}"


def _to_json(status: RankStatus) -> str:
    return json.dumps(dataclasses.asdict(status))
