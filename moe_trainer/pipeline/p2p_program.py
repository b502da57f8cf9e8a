"""Program of one pipeline rank: its actions, and the messages between them. Pure, no torch.

All messages of the pipeline have one total order, by the simulated time at which they exist. Every rank starts its
sends and receives in that order, each send directly after the action that produced it. Therefore no schedule deadlocks,
even if a send completes only when the peer receives it: what the two ranks of the first incomplete message do before it
waits only for earlier messages. The order also keeps both ends of a channel at the same message. The argument also
covers messages that are started as one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_trainer.pipeline.simulate import (
    BACKWARD,
    Action,
    Order,
    Pair,
    UniformCosts,
    simulate_schedule,
    source,
    step_actions,
    target,
)


class Message(NamedTuple):
    """One end of a message: the action that produces it (send) or consumes it (receive), and the rank at the other."""

    action: Action
    is_send: bool
    peer: int


class P2PBatch(NamedTuple):
    """Messages to start, one by one or as one batch."""

    messages: tuple[Message, ...]


def channel(rank: int, message: Message, num_ranks: int) -> int:
    """Return the index (0 or 1) of the communicator of a message, equal at both ends.

    An NCCL communicator processes its messages one by one, so a late one delays all later ones. Between two ranks each
    direction has its communicator, so receives never delay sends. With more ranks forward has one and backward the
    other.
    """
    if num_ranks == 2:
        return rank if message.is_send else 1 - rank
    return int(message.action.kind == BACKWARD)


def program(
    orders: Sequence[Order], num_chunks: int, rank: int, ahead: int, costs: UniformCosts | None = None
) -> list[Action | Pair | P2PBatch]:
    """Return the actions of one rank in order, with the messages to start before them.

    A receive is started `ahead` actions before its use; 0 for no overlap.
    """
    ends = simulate_schedule(orders, num_chunks, costs)
    order, num_ranks = orders[rank], len(orders)
    index = {action: place for place, step in enumerate(order) for action in step_actions(step)}
    messages: list[tuple[float, int, Action, Message]] = []  # with time of existence, producing rank and action
    for action in index:
        producer = source(rank, action, num_ranks, num_chunks)
        if producer is not None:
            message = Message(action, False, producer[0])
            messages.append((ends[producer[0]][producer[1]], *producer, message))
        consumer = target(rank, action, num_ranks, num_chunks)
        if consumer is not None:
            messages.append((ends[rank][action], rank, action, Message(action, True, consumer[0])))
    messages.sort(key=lambda entry: entry[:3])
    slots: dict[int, list[Message]] = {}
    upper, latest = len(order), []  # a receive must not delay the next send
    for *_, message in reversed(messages):
        upper = min(upper, index[message.action] + message.is_send)
        latest.append(upper)
    slot = 0
    for (*_, message), limit in zip(messages, reversed(latest)):
        wanted = index[message.action] + 1 if message.is_send else index[message.action] - ahead
        slot = max(slot, min(wanted, limit))
        assert slot <= limit, f"rank {rank}: the message of {message.action} cannot be placed"
        slots.setdefault(slot, []).append(message)
    steps: list[Action | Pair | P2PBatch] = []
    for place in range(len(order) + 1):
        if place in slots:
            steps.append(P2PBatch(tuple(slots[place])))
        steps.extend(order[place : place + 1])
    return steps
