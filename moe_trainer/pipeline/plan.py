"""From the order in which every rank works (shape/timetable.py) to what one rank does: computations, and messages between them. Pure.

`program` places the messages of one rank between its actions. All messages of
the pipeline stand in one total order, by the time at which they exist; every rank starts its sends and receives in that order,
each send right behind the action that made it. Therefore no schedule can deadlock, even where a send ends only when the
peer receives it: take the first message in the order that is not through; what its two ranks do before it waits only for
messages that come earlier, so both reach it. It also keeps both ends of a channel at the same message, as channels are first
in, first out. The same argument covers neighbouring messages that are started as one batch, whose members proceed independently.

Rejected: a hand-written sequence of combined sends and receives for every phase of every schedule, as Megatron-LM has it: each
new schedule would bring its own deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_trainer.shape.timetable import BACKWARD, Action, Costs, Order, Pair, actions_of, source, target, timetable


class Message(NamedTuple):
    """One end of a message: the action whose result leaves, or the action that what arrives is for."""

    action: Action
    is_send: bool


class Launch(NamedTuple):
    """Messages to start, in this order or as one batch."""

    messages: tuple[Message, ...]


def channel(rank: int, message: Message, num_ranks: int) -> int:
    """Which of two communicators carries a message; both its ends say the same.

    A communicator of NCCL works off its messages one by one, so one that is late holds up all behind it. Between two ranks each way has
    its own: what a rank receives never holds up what it sends. Among more, forward has one and backward the other.
    """
    if num_ranks == 2:
        return rank if message.is_send else 1 - rank
    return int(message.action.kind == BACKWARD)


def program(orders: Sequence[Order], num_chunks: int, rank: int, ahead: int,
            costs: Costs | None = None) -> list[Action | Pair | Launch]:
    """What one rank does, in order: its actions, and before them the messages to start.

    ahead: how many actions before its use a message's reception is started; 0 leaves no room for overlap.
    """
    ends = timetable(orders, num_chunks, costs)
    order, num_ranks = orders[rank], len(orders)
    index = {action: place for place, step in enumerate(order) for action in actions_of(step)}
    messages = []  # (when it exists, who makes it, is it a send, the action at this end)
    for action in index:
        coming = source(rank, action, num_ranks, num_chunks)
        if coming is not None:
            messages.append((ends[coming[0]][coming[1]], coming[0], coming[1], False, action))
        if target(rank, action, num_ranks, num_chunks) is not None:
            messages.append((ends[rank][action], rank, action, True, action))
    messages.sort(key=lambda message: message[:3])
    slots: dict[int, list[Message]] = {}
    upper, latest = len(order), []  # a reception must not hold up the next send
    for _, _, _, is_send, action in reversed(messages):
        upper = min(upper, index[action] + is_send)
        latest.append(upper)
    slot = 0
    for (_, _, _, is_send, action), limit in zip(messages, reversed(latest)):
        wanted = index[action] + 1 if is_send else index[action] - ahead
        slot = max(slot, min(wanted, limit))
        assert slot <= limit, f"rank {rank}: the message of {action} cannot be placed"
        slots.setdefault(slot, []).append(Message(action, is_send))
    found: list[Action | Pair | Launch] = []
    for place in range(len(order) + 1):
        if place in slots:
            found.append(Launch(tuple(slots[place])))
        found.extend(order[place:place + 1])
    return found
