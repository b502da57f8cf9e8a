"""Steps that raise on every rank if they fail on any; otherwise the others would hang in the next collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from moe_trainer.errors import UserError
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import Group

T = TypeVar("T")


def run_on_rank0(fn: Callable[[], T], group: Group) -> T:
    """Return on every rank what `fn` returns on the group's first rank.

    Raises:
        ValueError: on every rank, if `fn` raises ValueError or OSError there.

    Communication: the picklable result, broadcast over the group.
    """
    result, error = None, None
    if group.rank == 0:
        try:
            result = fn()
        except (ValueError, OSError) as exc:
            error = str(exc)
    result, error = collectives.broadcast_object((result, error), group)
    if error is not None:
        raise ValueError(error)
    return result


def gather_errors(error: T | None, group: Group) -> list[T]:
    """Return on every rank the errors of all ranks that have one, in rank order."""
    return [each for each in collectives.all_gather_object(error, group) if each is not None]


@contextmanager
def raise_on_all_ranks(group: Group, source: str = "") -> Iterator[None]:
    """Raise a ValueError or OSError of the enclosed step on every rank of the group.

    The step must complete its own collectives even if it fails; see `drain_on_exit`.

    Args:
        group: ranks that enter the step together.
        source: flag that asked for the step, put before the message.

    Raises:
        UserError: on every rank, with the message of the first rank that failed.
    """
    error = None
    try:
        yield
    except (ValueError, OSError) as exc:
        error = str(exc)
    errors = gather_errors(error, group)
    if errors:
        raise UserError(f"{source}: {errors[0]}" if source else errors[0])


@contextmanager
def drain_on_exit(gathered: Iterator[object]) -> Iterator[None]:
    """Exhaust a collective iterator when the enclosed step ends, however it ends.

    Rank 0 may fail to write what it gathers; the other ranks still send everything they hold.
    """
    try:
        yield
    finally:
        for _ in gathered:
            pass
