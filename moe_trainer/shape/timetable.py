"""When every rank of a pipeline does what: actions, what they wait for, and how long it all takes. Pure, on paper.

A schedule (one_f_one_b.py, interleaved.py, zero_bubble.py; `orders` chooses) says for every rank in which order it runs its
actions: forward F, backward B, where weight gradients are computed apart W, and where passes are merged pairs of F and B.
Everything else follows. A chunk's forward needs the output of the chunk before it, its backward the gradient from the chunk
behind it. `timetable` lets all ranks run on paper, with a cost for every action: that shows whether an order can work at all,
and how long it takes. pipeline/plan.py makes programs with messages of it, planner/ predicts memory and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


Order = tuple[Action | Pair, ...]


@dataclass(frozen=True)
class Costs:
    """Time of one action of each kind, in any unit. backward: all of it, or without the weight gradients where there are W."""

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0

    def of(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Time of these actions, the same on every rank."""
        by_kind = {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT: self.weight}
        return sum(by_kind[action.kind] for action in actions)


class Clock(Protocol):
    """Whatever knows how long one rank takes for one step of its order: a `Costs`, or costs by rank and chunk (planner/step_time.py)."""

    def of(self, rank: int, actions: tuple[Action, ...]) -> float: ...


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


def timetable(orders: Sequence[Order], num_chunks: int, costs: Clock | None = None) -> list[dict[Action, float]]:
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
                clock[rank] = start + costs.of(rank, actions)
                ends[rank].update(dict.fromkeys(actions, clock[rank]))
                done[rank] += 1
            if done[rank] > before:
                moved.append(rank)
        waiting = [rank for rank in waiting if done[rank] < len(orders[rank])]
        if waiting and not moved:
            stuck = "; ".join(f"rank {rank} waits before {orders[rank][done[rank]]}" for rank in waiting)
            raise ValueError(f"this order of work cannot run: {stuck}")
    return ends
