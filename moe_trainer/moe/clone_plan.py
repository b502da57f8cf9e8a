"""Which hot experts are cloned where: a plan that every rank makes alike from the global counts. No torch, no communication.

Per MoE layer and microbatch: a rank that gets more rows than the average of all ranks spills the surplus, taken from its most used
experts; a rank that gets fewer has room up to the average, and spare slots for the weights of clones. Spillover is put into room by bin
packing, largest first: into the tightest room that takes all of it, else into the largest room, and what is left is placed again.
So an expert is cloned more than once only where no single rank has room, and a slot is used only when it takes the most it can.

The rows of an expert are counted over the source ranks in order, and on a source by token. Home keeps the first ones; every clone
takes a span of the others. That tells every rank which of its own tokens go where, without another message.

Source: ECHO, arXiv 2603.07685, 4.3.7.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Clone:
    """Rows [first, first + rows) of an expert go to a spare slot of an expert-parallel rank.

    The clones on a rank are in slots 0, 1, ... in ascending order of their experts.
    """

    rank: int
    expert: int
    slot: int
    first: int
    rows: int


def plan_clones(counts_E: Sequence[int], num_ranks: int, slots: int) -> tuple[Clone, ...]:
    """Plan for one dispatch, sorted by rank and slot; the same for the same counts, on every rank.

    counts_E: rows of every expert over all ranks; rank r is home to experts [r * E / num_ranks, (r + 1) * E / num_ranks).
    slots: experts that every rank can take in. Raises: ValueError when the ranks do not divide the experts.
    """
    if num_ranks < 1 or len(counts_E) % num_ranks:
        raise ValueError(f"{len(counts_E)} experts cannot be spread evenly over {num_ranks} ranks")
    moves = _pack(_spillover(counts_E, num_ranks), _room(counts_E, num_ranks), [slots] * num_ranks)
    taken = [0] * len(counts_E)  # from the end of an expert's rows
    used = [0] * num_ranks
    clones = []
    for rank, expert, rows in sorted(moves):
        taken[expert] += rows
        clones.append(Clone(rank, expert, used[rank], counts_E[expert] - taken[expert], rows))
        used[rank] += 1
    return tuple(clones)


def loads(counts_E: Sequence[int], num_ranks: int, clones: Sequence[Clone] = ()) -> list[int]:
    """Rows that every rank computes."""
    num_local = len(counts_E) // num_ranks
    found = [sum(counts_E[rank * num_local:(rank + 1) * num_local]) for rank in range(num_ranks)]
    for clone in clones:
        found[clone.expert // num_local] -= clone.rows
        found[clone.rank] += clone.rows
    return found


def _average(counts_E: Sequence[int], num_ranks: int) -> int:
    return -(-sum(counts_E) // num_ranks)


def _room(counts_E: Sequence[int], num_ranks: int) -> list[int]:
    """Rows every rank can take in before it has the average."""
    average = _average(counts_E, num_ranks)
    return [max(0, average - load) for load in loads(counts_E, num_ranks)]


def _spillover(counts_E: Sequence[int], num_ranks: int) -> list[tuple[int, int]]:
    """(rows, expert) of what is too much for its home; from the most used experts of a rank, so that they are few."""
    average, num_local, found = _average(counts_E, num_ranks), len(counts_E) // num_ranks, []
    for rank, load in enumerate(loads(counts_E, num_ranks)):
        surplus = load - average
        for expert in sorted(range(rank * num_local, (rank + 1) * num_local), key=lambda expert: (-counts_E[expert], expert)):
            rows = min(surplus, counts_E[expert])
            if rows <= 0:
                break
            found.append((rows, expert))
            surplus -= rows
    return found


def _pack(spillover: Sequence[tuple[int, int]], room: list[int], slots: list[int]) -> list[tuple[int, int, int]]:
    """Largest first into the tightest room. Returns: (rank, expert, rows). Changes room and slots."""
    waiting = [(-rows, expert) for rows, expert in spillover]
    heapq.heapify(waiting)
    moves = []
    while waiting:
        rows, expert = heapq.heappop(waiting)
        rows = -rows
        free = [rank for rank in range(len(room)) if room[rank] and slots[rank]]
        if not free:
            break
        fits = [rank for rank in free if room[rank] >= rows]
        rank = min(fits, key=lambda rank: room[rank]) if fits else max(free, key=lambda rank: room[rank])
        moved = min(rows, room[rank])
        moves.append((rank, expert, moved))
        room[rank] -= moved
        slots[rank] -= 1
        if rows > moved:
            heapq.heappush(waiting, (moved - rows, expert))
    return moves
