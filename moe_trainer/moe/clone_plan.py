"""Plan of which hot experts are cloned where, made alike on every rank from the global counts, without torch.

Per MoE layer and microbatch: a rank that receives more tokens than the average spills the surplus, taken from its
busiest experts; a rank below the average has spare capacity up to it, and slots for the weights of clones. Spilled
tokens are assigned by bin packing, largest first: to the tightest spare capacity that takes all of them, else to the
largest, and the remainder is assigned again. So an expert is cloned more than once only if no single rank can take
its surplus.

An expert's tokens are numbered over the source ranks in order, and on a source by token. The expert's own rank takes
the first ones, every clone a range of the others. So every rank knows which of its tokens go where, without another
message.

Source: ECHO, arXiv 2603.07685, 4.3.7.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Clone:
    """Copy of an expert in a slot of an expert-parallel rank, for tokens [first, first + num_tokens) of the expert.

    The clones on a rank are in slots 0, 1, ... in ascending order of their experts.
    """

    rank: int
    expert: int
    slot: int
    first: int
    num_tokens: int


def plan_clones(counts_E: Sequence[int], num_ranks: int, slots: int) -> tuple[Clone, ...]:
    """Plan the clones of one dispatch, sorted by rank and slot; every rank gets the same plan from the same counts.

    Args:
        counts_E: tokens of every expert over all ranks. Rank r owns experts [r * E / num_ranks, (r + 1) * E /
            num_ranks).
        num_ranks: expert-parallel size.
        slots: clones that every rank can host.

    Raises:
        ValueError: if the number of ranks does not divide the number of experts.
    """
    if num_ranks < 1 or len(counts_E) % num_ranks:
        raise ValueError(f"{len(counts_E)} experts cannot be divided evenly over {num_ranks} ranks")
    moves = _assign(_spilled_tokens(counts_E, num_ranks), _spare_capacity(counts_E, num_ranks), [slots] * num_ranks)
    moved = [0] * len(counts_E)  # from the end of an expert's tokens
    used_slots = [0] * num_ranks
    clones = []
    for rank, expert, num_tokens in sorted(moves):
        moved[expert] += num_tokens
        clones.append(Clone(rank, expert, used_slots[rank], counts_E[expert] - moved[expert], num_tokens))
        used_slots[rank] += 1
    return tuple(clones)


def rank_loads(counts_E: Sequence[int], num_ranks: int, clones: Sequence[Clone] = ()) -> list[int]:
    """Return the number of tokens that every rank computes."""
    num_local = len(counts_E) // num_ranks
    loads = [sum(counts_E[rank * num_local : (rank + 1) * num_local]) for rank in range(num_ranks)]
    for clone in clones:
        loads[clone.expert // num_local] -= clone.num_tokens
        loads[clone.rank] += clone.num_tokens
    return loads


def _average(counts_E: Sequence[int], num_ranks: int) -> int:
    return -(-sum(counts_E) // num_ranks)


def _spare_capacity(counts_E: Sequence[int], num_ranks: int) -> list[int]:
    """Return how many tokens every rank is below the average."""
    average = _average(counts_E, num_ranks)
    return [max(0, average - load) for load in rank_loads(counts_E, num_ranks)]


def _spilled_tokens(counts_E: Sequence[int], num_ranks: int) -> list[tuple[int, int]]:
    """Return (tokens, expert) above the average of a rank, from its busiest experts, so that few are cloned."""
    average, num_local, spilled = _average(counts_E, num_ranks), len(counts_E) // num_ranks, []
    for rank, load in enumerate(rank_loads(counts_E, num_ranks)):
        surplus = load - average
        local = range(rank * num_local, (rank + 1) * num_local)
        for expert in sorted(local, key=lambda expert: (-counts_E[expert], expert)):
            num_tokens = min(surplus, counts_E[expert])
            if num_tokens <= 0:
                break
            spilled.append((num_tokens, expert))
            surplus -= num_tokens
    return spilled


def _assign(spilled: Sequence[tuple[int, int]], spare: list[int], slots: list[int]) -> list[tuple[int, int, int]]:
    """Assign the largest first to the tightest fit, changing `spare` and `slots`. Return (rank, expert, tokens)."""
    queue = [(-num_tokens, expert) for num_tokens, expert in spilled]
    heapq.heapify(queue)
    moves = []
    while queue:
        num_tokens, expert = heapq.heappop(queue)
        num_tokens = -num_tokens
        free = [rank for rank in range(len(spare)) if spare[rank] and slots[rank]]
        if not free:
            break
        fits = [rank for rank in free if spare[rank] >= num_tokens]
        rank = min(fits, key=lambda rank: spare[rank]) if fits else max(free, key=lambda rank: spare[rank])
        moved = min(num_tokens, spare[rank])
        moves.append((rank, expert, moved))
        spare[rank] -= moved
        slots[rank] -= 1
        if num_tokens > moved:
            heapq.heappush(queue, (moved - num_tokens, expert))
    return moves
