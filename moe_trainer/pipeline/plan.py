"""From the order in which every rank works to what one rank does: computations, and messages between them. Pure.

A schedule (one_f_one_b.py, interleaved.py, zero_bubble.py) says for every rank in which order it runs its actions: forward F,
backward B, where weight gradients are computed apart W, and where passes are merged pairs of F and B. Everything else follows.
A chunk's forward needs the output of the chunk before it, its backward the gradient from the chunk behind it; both arrive as
messages.

`timetable` lets all ranks run on paper, with a cost for every kind of action: that shows whether an order can work at all, how
long it takes, and when each message exists. `program` then places the messages of one rank between its actions. All messages of
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
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


class Action(NamedTuple):
    """One computation of a rank: kind F, B or W, its local chunk, the microbatch."""

    kind: str
    chunk: int
    microbatch: int


class Pair(NamedTuple):
    """A forward and a backward that run together (overlap.py): both have what they need before either begins."""

    forward: Action
    backward: Action


class Message(NamedTuple):
    """One end of a message: the action whose result leaves, or the action that what arrives is for."""

    action: Action
    is_send: bool


class Launch(NamedTuple):
    """Messages to start, in this order or as one batch."""

    messages: tuple[Message, ...]


Order = tuple[Action | Pair, ...]


@dataclass(frozen=True)
class Costs:
    """Time of one action of each kind, in any unit. backward: all of it, or without the weight gradients where there are W."""

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0

    def of(self, actions: tuple[Action, ...]) -> float:
        """Time of these actions."""
        by_kind = {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT: self.weight}
        return sum(by_kind[action.kind] for action in actions)


def actions_of(step: Action | Pair) -> tuple[Action, ...]:
    """The one or two actions of a step of an order."""
    return tuple(step) if isinstance(step, Pair) else (step,)


def source(rank: int, action: Action, num_ranks: int, num_chunks: int) -> tuple[int, Action] | None:
    """Rank and action whose result the action needs from elsewhere; None for the ends of the pipeline and for W."""
    kind, chunk, microbatch = action
    if kind == FORWARD:
        if rank > 0:
            return rank - 1, action
        return (num_ranks - 1, Action(kind, chunk - 1, microbatch)) if chunk > 0 else None
    if kind == BACKWARD:
        if rank < num_ranks - 1:
            return rank + 1, action
        return (0, Action(kind, chunk + 1, microbatch)) if chunk < num_chunks - 1 else None
    return None


def target(rank: int, action: Action, num_ranks: int, num_chunks: int) -> tuple[int, Action] | None:
    """Rank and action that need this action's result; None for the ends of the pipeline and for W."""
    kind, chunk, microbatch = action
    if kind == FORWARD:
        if rank < num_ranks - 1:
            return rank + 1, action
        return (0, Action(kind, chunk + 1, microbatch)) if chunk < num_chunks - 1 else None
    if kind == BACKWARD:
        if rank > 0:
            return rank - 1, action
        return (num_ranks - 1, Action(kind, chunk - 1, microbatch)) if chunk > 0 else None
    return None


def timetable(orders: Sequence[Order], num_chunks: int, costs: Costs | None = None) -> list[dict[Action, float]]:
    """Run all ranks on paper. Returns: by rank, when each action ends.

    Raises: ValueError when the ranks would wait for each other for ever.
    """
    costs = costs or Costs()
    num_ranks = len(orders)
    ends: list[dict[Action, float]] = [{} for _ in orders]
    done, clock = [0] * num_ranks, [0.0] * num_ranks
    waiting = list(range(num_ranks))
    while waiting:
        moved = []
        for rank in waiting:
            before = done[rank]
            while done[rank] < len(orders[rank]):
                actions = actions_of(orders[rank][done[rank]])
                needed = [found for action in actions if (found := source(rank, action, num_ranks, num_chunks)) is not None]
                if any(action not in ends[other] for other, action in needed):
                    break
                start = max([clock[rank], *(ends[other][action] for other, action in needed)])
                clock[rank] = start + costs.of(actions)
                ends[rank].update(dict.fromkeys(actions, clock[rank]))
                done[rank] += 1
            if done[rank] > before:
                moved.append(rank)
        waiting = [rank for rank in waiting if done[rank] < len(orders[rank])]
        if waiting and not moved:
            stuck = "; ".join(f"rank {rank} waits before {orders[rank][done[rank]]}" for rank in waiting)
            raise ValueError(f"this order of work cannot run: {stuck}")
    return ends


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
