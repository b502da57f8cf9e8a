"""Packs for groups of ranks of several sizes (--dynamic-context-parallel): arithmetic on lengths.

A microbatch partitions the ranks of dp x cp into groups, each of which shares one pack, so that a long sequence gets
many ranks while others run short sequences alone. Sizes divide one another, and a group begins at a multiple of its
size: these groups exist as communicators.

For a number of microbatches, the smallest that holds the tokens, a sequence needs the smallest group that has memory
for it and in which its cost per rank does not exceed a quota, a multiple of the mean. Sequences, those with the largest
groups and then the longest ones first, open a group each while ranks are free, and then join the group with the least
cost per rank that has space. Several quotas are tried, from none to the mean: lower ones make larger groups, and are
taken where the slowest ranks compute noticeably less.

Source of the method: Megatron-Core's MoE report, section 6.4; Megatron-LM's scheduler (dev branch, commit d48bd6be0a,
next_hdp_group_packing_aware) fills one microbatch after the other instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_trainer.data.space_queue import SpaceQueue

_QUOTAS = (math.inf, 2.0, 1.5, 1.25, 1.0)
"""Largest cost per rank of a sequence, relative to the mean of all ranks."""
_LEAST_GAIN = 0.03
"""Share of the time by which a lower quota must shorten a plan."""
KEY_EXCHANGE_COST = 0.05
"""Time to send keys and values of a token to another rank, relative to the computation of a token outside attention.

With p2p every rank receives those of all others of its group. 0.02 to 0.15: Qwen3-30B has 2 KB per layer and token, and
125 MFLOPs forward; at 400 TFLOP/s this takes as long as 16 KB at 50 GB/s, or 100 KB at 300 GB/s.
"""


def padding_multiple(multiple: int, size: int) -> int:
    """Return the multiple to which a group pads sequences, from that of a rank alone: a rank has two chunks of each."""
    return multiple * (2 * size if size > 1 else 1)


@dataclass
class RankGroup:
    """Consecutive ranks that share a pack.

    Attributes:
        size: number of ranks.
        positions: of the sequences in the global batch.
        cost: of all ranks together, with their communication.
    """

    size: int
    positions: list[int] = field(default_factory=list)
    cost: float = 0.0

    @property
    def load(self) -> float:
        """Cost per rank."""
        return self.cost / self.size


@dataclass(frozen=True)
class GroupSizes:
    """What limits the packs of groups.

    Attributes:
        sizes: of groups, in increasing order; each divides the next one, the last one is the number of ranks.
        capacity: tokens of a rank.
        pad: returns the length of a sequence with its padding in a group of a size.
        cost: returns the cost of a sequence in a group of a size, over all its ranks.
        max_sequences: of a pack; None for any number.
    """

    sizes: tuple[int, ...]
    capacity: int
    pad: Callable[[int, int], int]
    cost: Callable[[int, int], float]
    max_sequences: int | None = None

    @staticmethod
    def of(
        sizes: tuple[int, ...],
        capacity: int,
        multiple: int,
        get_cost: Callable[[int], float],
        max_sequences: int | None = None,
    ) -> GroupSizes:
        """Return the limits of a run: its padding, and its cost with the exchange of keys.

        Args:
            sizes: as the attribute, with capacity and max_sequences.
            capacity: tokens of a rank.
            multiple: to which a rank alone pads sequences.
            get_cost: of a sequence by its length, in FLOPs.
            max_sequences: of a pack.
        """
        of_token = get_cost(1)

        def pad(length: int, size: int) -> int:
            return -(-length // padding_multiple(multiple, size)) * padding_multiple(multiple, size)

        def cost(length: int, size: int) -> float:
            return get_cost(length) + (size - 1) * KEY_EXCHANGE_COST * length * of_token

        return GroupSizes(sizes, capacity, pad, cost, max_sequences)

    @property
    def num_ranks(self) -> int:
        return self.sizes[-1]

    def smallest(self, length: int, quota: float = math.inf) -> int:
        """Return the size of the smallest group for a sequence; the largest one has no quota.

        Raises:
            ValueError: if all ranks together have no memory for it.
        """
        fitting = [size for size in self.sizes if self.pad(length, size) <= size * self.capacity]
        if not fitting:
            raise ValueError(f"a sequence of {length} tokens exceeds {self.num_ranks} x {self.capacity} tokens")
        return next((size for size in fitting if self.cost(length, size) / size <= quota), fitting[-1])


def pack_into_groups(
    lengths: Sequence[int], limits: GroupSizes, multiple: int = 1, is_pipelined: bool = False
) -> list[list[RankGroup]]:
    """Pack sequences into groups of ranks; every rank has a sequence in every microbatch.

    Args:
        lengths: of the sequences, without padding.
        limits: of the packs.
        multiple: the number of microbatches is a multiple of it.
        is_pipelined: stages wait for the first and the last microbatches, so these are the cheapest: costs rise to the
            middle and fall again. Otherwise costs fall.

    Returns:
        By microbatch its groups in the order of their ranks. Every second microbatch has the reverse order, so that
        the most expensive groups are not always on the same ranks.

    Raises:
        ValueError: if there are fewer sequences than microbatches, or one is too long.
    """
    smallest = [limits.smallest(length) for length in lengths]
    tokens = sum(limits.pad(length, size) for length, size in zip(lengths, smallest))
    total = sum(limits.cost(length, size) for length, size in zip(lengths, smallest))
    least = -(-tokens // (limits.capacity * limits.num_ranks))
    for num_microbatches in itertools.count(-(-least // multiple) * multiple, multiple):
        if num_microbatches > len(lengths):
            raise ValueError(f"{len(lengths)} sequences do not fill {num_microbatches} microbatches")
        mean = total / (num_microbatches * limits.num_ranks)
        best, least_cost = None, math.inf
        for quota in _QUOTAS:
            groups = _form_groups(lengths, limits, num_microbatches, quota * mean)
            found = None if groups is None else _arrange(groups, limits.num_ranks)
            if found is not None and (cost := sum(map(slowest_load, found))) < least_cost * (1 - _LEAST_GAIN):
                best, least_cost = found, cost
        if best is not None:
            rising = sorted(best, key=slowest_load)
            ordered = [*rising[::2], *reversed(rising[1::2])] if is_pipelined else rising[::-1]
            return [each[::-1] if index % 2 else each for index, each in enumerate(ordered)]
    raise AssertionError("every sequence fits into a separate microbatch")


def slowest_load(groups: Sequence[RankGroup]) -> float:
    """Return the cost of a microbatch on its slowest rank."""
    return max(group.load for group in groups)


def _form_groups(
    lengths: Sequence[int], limits: GroupSizes, num_microbatches: int, quota: float
) -> list[RankGroup] | None:
    """Return groups that together are all ranks of all microbatches; None if a sequence has no space."""
    needed = [limits.smallest(length, quota) for length in lengths]
    groups: list[RankGroup] = []
    open_groups = {size: SpaceQueue() for size in limits.sizes}
    tokens: list[int] = []
    num_free, shortest = num_microbatches * limits.num_ranks, min(lengths)
    for position in sorted(range(len(lengths)), key=lambda position: (-needed[position], -lengths[position], position)):
        size = needed[position]
        if size <= num_free:
            number = len(groups)
            groups.append(RankGroup(size))
            tokens.append(0)
            num_free -= size
        else:
            choice = _take_least_loaded(lengths[position], size, open_groups, limits)
            if choice is None:
                return None
            number = choice
        group = groups[number]
        group.positions.append(position)
        group.cost += limits.cost(lengths[position], group.size)
        tokens[number] += limits.pad(lengths[position], group.size)
        space = group.size * limits.capacity - tokens[number]
        if space >= limits.pad(shortest, group.size) and len(group.positions) != limits.max_sequences:
            open_groups[group.size].push(group.load, number, space)
    return groups if _enlarge(groups, lengths, limits, num_free) else None


def _take_least_loaded(length: int, size: int, open_groups: Mapping[int, SpaceQueue], limits: GroupSizes) -> int | None:
    """Take the group with the least load after it received a sequence from its queue; None if none has space."""
    best = (math.inf, 0, 0)
    for of_size in limits.sizes[limits.sizes.index(size) :]:
        if (found := open_groups[of_size].find(limits.pad(length, of_size))) is not None:
            load, number = found
            best = min(best, (load + limits.cost(length, of_size) / of_size, of_size, number))
    _, of_size, number = best
    if not of_size:
        return None
    open_groups[of_size].pop()
    return number


def _enlarge(groups: list[RankGroup], lengths: Sequence[int], limits: GroupSizes, num_free: int) -> bool:
    """Give free ranks to the most expensive groups; where they are too few for the next size, merge groups.

    Returns:
        Whether no rank is left without a sequence.
    """

    def fits(positions: Sequence[int], size: int) -> bool:
        within = limits.max_sequences is None or len(positions) <= limits.max_sequences
        return within and sum(limits.pad(lengths[each], size) for each in positions) <= size * limits.capacity

    def costs(positions: Sequence[int], size: int) -> float:
        return sum(limits.cost(lengths[each], size) for each in positions)

    following = dict(zip(limits.sizes, limits.sizes[1:]))
    while num_free:
        groups.sort(key=lambda group: (-group.load, group.positions))
        for group in groups:
            size = following.get(group.size)
            if size is not None and size - group.size <= num_free and fits(group.positions, size):
                num_free -= size - group.size
                group.size, group.cost = size, costs(group.positions, size)
                break
        else:
            smallest = min(group.size for group in groups)
            size = following.get(smallest)
            if size is None or num_free >= size:
                return False
            merged = [group for group in groups if group.size == smallest][: (size - num_free) // smallest]
            positions = [position for group in merged for position in group.positions]
            if num_free + len(merged) * smallest != size or not fits(positions, size):
                return False
            groups[:] = [group for group in groups if group not in merged]
            groups.append(RankGroup(size, positions, costs(positions, size)))
            num_free = 0
    return True


def _arrange(groups: Sequence[RankGroup], num_ranks: int) -> list[list[RankGroup]]:
    """Divide groups into microbatches, those of similar cost together.

    Sorted by size they fill microbatches without gaps, because sizes divide one another.
    """
    microbatches: list[list[RankGroup]] = []
    num_filled = num_ranks
    for group in sorted(groups, key=lambda group: (-group.size, -group.load, group.positions)):
        if num_filled == num_ranks:
            microbatches.append([])
            num_filled = 0
        microbatches[-1].append(RankGroup(group.size, sorted(group.positions), group.cost))
        num_filled += group.size
    return microbatches
