"""Actions of a pipeline schedule, their dependencies, and a simulation of their timing. Pure, no torch.

A schedule (orders.py) gives for every rank the order of its actions: forward F, backward B, weight gradients W if they
are computed separately, and pairs of F and B. A chunk's forward needs the output of the previous chunk, its backward
the gradient from the next one. `simulate_schedule` runs all ranks with a cost for every action, which shows whether an
order can run and how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


class Action(NamedTuple):
    """One computation of a rank: kind (F, B or W), local chunk, microbatch."""

    kind: str
    chunk: int
    microbatch: int


class Pair(NamedTuple):
    """A forward and a backward that run concurrently (overlap.py), once the inputs of both are available."""

    forward: Action
    backward: Action


Order = tuple[Action | Pair, ...]


@dataclass(frozen=True)
class UniformCosts:
    """Time of one action of each kind, in any unit; `backward` excludes separate weight gradients."""

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0

    def of(self, rank: int, actions: tuple[Action, ...]) -> float:
        """Return the time of the actions."""
        by_kind = {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT: self.weight}
        return sum(by_kind[action.kind] for action in actions)


class ActionCosts(Protocol):
    """Duration of one step of a rank's order: `UniformCosts`, or costs by rank and chunk (estimate/step_time.py)."""

    def of(self, rank: int, actions: tuple[Action, ...]) -> float: ...


def step_actions(step: Action | Pair) -> tuple[Action, ...]:
    """Return the one or two actions of a step."""
    return tuple(step) if isinstance(step, Pair) else (step,)


def source(rank: int, action: Action, num_ranks: int, num_chunks: int) -> tuple[int, Action] | None:
    """Return the remote rank and action whose result an action needs; None at the ends of the pipeline and for W."""
    return _neighbor(rank, action, num_ranks, num_chunks, {FORWARD: -1, BACKWARD: 1, WEIGHT: 0}[action.kind])


def target(rank: int, action: Action, num_ranks: int, num_chunks: int) -> tuple[int, Action] | None:
    """Return the remote rank and action that need an action's result; None at the ends of the pipeline and for W."""
    return _neighbor(rank, action, num_ranks, num_chunks, {FORWARD: 1, BACKWARD: -1, WEIGHT: 0}[action.kind])


def _neighbor(rank: int, action: Action, num_ranks: int, num_chunks: int, step: int) -> tuple[int, Action] | None:
    """Return the same action `step` virtual stages later; chunk c of a rank is virtual stage c * num_ranks + rank."""
    stage = action.chunk * num_ranks + rank + step
    if step == 0 or not 0 <= stage < num_chunks * num_ranks:
        return None
    chunk, neighbor = divmod(stage, num_ranks)
    return neighbor, Action(action.kind, chunk, action.microbatch)


def simulate_schedule(
    orders: Sequence[Order], num_chunks: int, costs: ActionCosts | None = None
) -> list[dict[Action, float]]:
    """Simulate all ranks.

    Returns:
        By rank, the end time of each action.

    Raises:
        ValueError: the ranks would deadlock.
    """
    costs = costs or UniformCosts()
    num_ranks = len(orders)
    ends: list[dict[Action, float]] = [{} for _ in orders]
    num_done, clock = [0] * num_ranks, [0.0] * num_ranks
    unfinished = list(range(num_ranks))
    while unfinished:
        advanced = []
        for rank in unfinished:
            before = num_done[rank]
            while num_done[rank] < len(orders[rank]):
                actions = step_actions(orders[rank][num_done[rank]])
                needed = [
                    producer
                    for action in actions
                    if (producer := source(rank, action, num_ranks, num_chunks)) is not None
                ]
                if any(action not in ends[other] for other, action in needed):
                    break
                start = max([clock[rank], *(ends[other][action] for other, action in needed)])
                clock[rank] = start + costs.of(rank, actions)
                ends[rank].update(dict.fromkeys(actions, clock[rank]))
                num_done[rank] += 1
            if num_done[rank] > before:
                advanced.append(rank)
        unfinished = [rank for rank in unfinished if num_done[rank] < len(orders[rank])]
        if unfinished and not advanced:
            stuck = "; ".join(f"rank {rank} waits before {orders[rank][num_done[rank]]}" for rank in unfinished)
            raise ValueError(f"this pipeline order deadlocks: {stuck}")
    return ends
