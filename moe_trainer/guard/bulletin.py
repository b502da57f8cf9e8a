"""The notice board of a job: every rank says where it stands, so that even a stuck one's last known place can be told.

It lives in the store that brought the job's ranks together (a TCPStore; a file in tests), beside the process groups and
independent of them. A rank posts from a thread of its own, a few hundred bytes every few seconds. When the store itself has
gone with its host, reading raises StoreGoneError; nothing here waits longer than PATIENCE for an answer.
"""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_trainer.parallel.trace import backend_reason

PATIENCE = 5.0  # seconds that the store may take to answer
_TOGETHER = 128  # notes read at a time


class StoreGoneError(RuntimeError):
    """The store does not answer: the process that kept it has ended or is stopped, or its node is gone."""


@dataclass(frozen=True)
class Note:
    """Where a rank stands.

    beat: number of the posting; a rank whose beat stands still is gone or stopped. state: "runs", "waits", "failed" (waited in
    vain) or "ended". call: operation, group and number, the same on all ranks that wait in the same collective. text: the
    place, or the reason of the end. seconds: how long it has been waiting, or since its last communication.
    """

    beat: int
    state: str
    call: str
    text: str
    seconds: float


class Bulletin:
    """The notes of all ranks, by rank."""

    def __init__(self, store: dist.Store, rank: int):
        self.rank = rank
        self._stores = [store.clone(), store.clone()]  # one for the posting thread: an operation that hangs locks its client
        for each in self._stores:
            each.set_timeout(timedelta(seconds=PATIENCE))
        self._posting, self._reading = (dist.PrefixStore("bulletin", each) for each in self._stores)

    def post(self, note: Note) -> None:
        """Replace this rank's note. For the posting thread: it may hang with the store's host."""
        _guarded(lambda: self._posting.set(_place(self.rank), _text(note)))

    def read(self, ranks: Iterable[int]) -> dict[int, Note]:
        """The notes of the given ranks, as far as they have posted any."""
        return _in_time(lambda: self._read(list(ranks)))

    def announce_end(self, note: Note) -> int:
        """Say that this rank ends, and that the job has failed with it; `note` is its last. Returns: the how many-th it is."""
        return _in_time(lambda: self._announce_end(note))

    def ends(self) -> int:
        """How many ranks have said that they end. For the posting thread, too."""
        return _guarded(lambda: self._posting.add("ends", 0))

    def leave(self) -> None:
        """Say that this rank has read what it wanted to."""
        _in_time(lambda: self._reading.add("left", 1))

    def have_left(self) -> int:
        """How many ranks have left."""
        return _in_time(lambda: self._reading.add("left", 0))

    def first_to_end(self, count: int) -> list[int]:
        """The ranks that ended first, at most `count`."""
        return _in_time(lambda: self._first_to_end(count))

    def _announce_end(self, note: Note) -> int:
        self._reading.set(_place(self.rank), _text(note))
        number = self._reading.add("ends", 1)
        self._reading.set(f"end/{number}", str(self.rank))
        return number

    def _read(self, ranks: list[int]) -> dict[int, Note]:
        found = {}
        for begin in range(0, len(ranks), _TOGETHER):
            some = ranks[begin:begin + _TOGETHER]
            if not self._reading.check([_place(rank) for rank in some]):  # all of them, or none is told
                some = [rank for rank in some if self._reading.check([_place(rank)])]
            texts = self._reading.multi_get([_place(rank) for rank in some]) if some else []
            found |= {rank: Note(**json.loads(text)) for rank, text in zip(some, texts)}
        return found

    def _first_to_end(self, count: int) -> list[int]:
        keys = [f"end/{number}" for number in range(1, min(count, self._reading.add("ends", 0)) + 1)]
        return [int(self._reading.get(key)) for key in keys if self._reading.check([key])]


def _place(rank: int) -> str:
    return f"note/{rank}"


def _text(note: Note) -> str:
    return json.dumps(dataclasses.asdict(note))


def _guarded(operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except RuntimeError as error:  # torch's DistError, or a plain RuntimeError from a file
        raise StoreGoneError(backend_reason(error)) from error


def _in_time(operation: Callable[[], Any]) -> Any:
    """Run an operation that may never return (a client of a stopped host), for PATIENCE seconds at most."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((True, _guarded(operation)))
        except StoreGoneError as error:
            outcome.append((False, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not outcome:
        raise StoreGoneError(f"no answer in {PATIENCE:.0f} s")
    done, value = outcome[0]
    if not done:
        raise value
    return value
