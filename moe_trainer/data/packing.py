"""Which sequences of a global batch share a microbatch, on which data-parallel rank: arithmetic on lengths.

A plan is a function of the lengths alone, so every rank computes the same one, without communication, and a resumed
run continues with it. All data ranks run equally many microbatches. Schedulers:

* dp_balanced, as in Megatron-LM: sequences are packed in order until the next one does not fit; where the number of
  packs does not divide, the last sequences of the last packs get packs of their own;
* cost_balanced: every sequence, the most expensive first, goes to the cheapest pack with space for it (longest
  processing time first), and packs of similar cost go to the data ranks of a microbatch, the most expensive to another
  rank every time.

Lengths are with padding (PackedSequences.padded_lengths).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from arguments import Arguments
from moe_trainer.data.group_packing import GroupSizes, pack_into_groups, padding_multiple
from moe_trainer.data.space_queue import SpaceQueue
from moe_trainer.errors import UserError
from moe_trainer.ops.packed_sequences import PackedSequences

_PLANS_KEPT = 16
"""Plans that are kept besides those for reading ahead, for the batches of workers and for logs."""

Packs = list[list[int]]
"""Positions in the global batch of the sequences of every pack."""


@dataclass(frozen=True)
class Pack:
    """Samples that share a microbatch; iterating yields them.

    Attributes:
        samples: numbers of the samples.
        cp_size: with dynamic context parallelism, the number of ranks of dp x cp that share the pack. None: one data
            rank, with its --context-parallel-size ranks.
    """

    samples: tuple[int, ...]
    cp_size: int | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_ranks(self) -> int:
        """Number of ranks among which a plan distributes packs that share this one."""
        return self.cp_size or 1


@dataclass(frozen=True)
class PackingPlan:
    """Packs of a global batch.

    Attributes:
        packs: by microbatch, in the order of ranks: the data ranks, or all of dp x cp with dynamic context parallelism.
        lengths: of every sample, without padding.
    """

    packs: tuple[tuple[Pack, ...], ...]
    lengths: Mapping[int, int]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of every rank."""
        return len(self.packs)

    def pack(self, microbatch: int, rank: int) -> Pack:
        """Return the pack of a rank."""
        packs = self.packs[microbatch]
        ends = itertools.accumulate(pack.num_ranks for pack in packs)
        return next(pack for pack, end in zip(packs, ends) if rank < end)


@dataclass(frozen=True)
class PackingSummary:
    """What the microbatches of a plan hold.

    Attributes:
        num_microbatches: of every rank.
        tokens: without padding.
        cost: in FLOPs.
        fill: tokens / capacity of all packs.
        imbalance: cost of the most expensive rank of each microbatch / mean cost, over all microbatches. The others
            wait for it where gradients or pipeline stages synchronize, so 1 - 1 / imbalance of the FLOPs is wasted.
        cp_sizes: number of packs by the size of their group, with dynamic context parallelism.
    """

    num_microbatches: int
    tokens: int
    cost: float
    fill: float
    imbalance: float
    cp_sizes: Mapping[int, int]

    @property
    def metrics(self) -> dict[str, float]:
        """Values for logs."""
        sizes = {f"groups of {size}": float(count) for size, count in self.cp_sizes.items()}
        return {"fill": self.fill, "imbalance": self.imbalance, **sizes}


@dataclass(frozen=True)
class PackFormat:
    """How sequences become a pack.

    With dynamic context parallelism numbers of tokens are those of a group of one rank.

    Attributes:
        capacity: largest number of tokens, over all context-parallel ranks.
        balances_cost: scheduler cost_balanced instead of dp_balanced.
        sequence_multiple: sequences are padded to multiples of it.
        tail_multiple: packs are padded to multiples of it.
        extend_last: the padding of a pack belongs to its last sequence; otherwise it is a separate sequence.
        max_sequences: of a pack, with that of padding; None for any number.
        cp_sizes: numbers of ranks that may share a pack, with dynamic context parallelism.
    """

    capacity: int
    balances_cost: bool = False
    sequence_multiple: int = 1
    tail_multiple: int = 1
    extend_last: bool = False
    max_sequences: int | None = None
    cp_sizes: tuple[int, ...] = ()

    @staticmethod
    def from_args(args: Arguments) -> PackFormat | None:
        """Return the format that the flags ask for; None without packing."""
        parallel, capacity = args.parallel, args.packed_capacity
        if capacity is None:
            return None
        return PackFormat(
            capacity,
            parallel.sequence_packing_scheduler == "cost_balanced",
            args.sequence_padding_multiple,
            args.packed_tail_multiple,
            parallel.thd_tail_padding_policy == "extend_last",
            parallel.thd_max_packed_sequences,
            args.dynamic_cp_sizes,
        )

    def pack(self, lengths: Sequence[int], cp_size: int | None = None) -> PackedSequences:
        """Pad the sequences of a pack.

        Args:
            lengths: without padding.
            cp_size: see Pack.
        """
        size = cp_size or 1
        packed = PackedSequences.of(lengths, padding_multiple(self.sequence_multiple, size))
        return replace(packed.pad_tail(self.tail_multiple * size, self.extend_last), cp_size=cp_size)

    def group_sizes(self, get_cost: Callable[[int], float]) -> GroupSizes:
        """Return what limits the packs of groups, with dynamic context parallelism.

        Args:
            get_cost: of a sequence by its length, in FLOPs.
        """
        return GroupSizes.of(self.cp_sizes, self.capacity, self.sequence_multiple, get_cost, self.max_samples)

    @property
    def max_samples(self) -> int | None:
        """Largest number of samples of a pack."""
        appends = self.tail_multiple > 1 and not self.extend_last
        return None if self.max_sequences is None else self.max_sequences - appends


def pack_in_order(lengths: Sequence[int], capacity: int, multiple: int, max_sequences: int | None = None) -> Packs:
    """Fill packs of at most `capacity` tokens in order, as many as a multiple of `multiple` (dp_balanced).

    Args:
        lengths: of the sequences, each at most `capacity`.
        capacity: tokens of a pack.
        multiple: the number of packs is a multiple of it.
        max_sequences: of a pack; None for any number.

    Raises:
        ValueError: if there are fewer sequences than packs.
    """
    packs: Packs = []
    space = 0
    for position, length in enumerate(lengths):
        if not packs or length > space or len(packs[-1]) == max_sequences:
            packs.append([])
            space = capacity
        packs[-1].append(position)
        space -= length
    missing = -len(packs) % multiple
    if len(packs) + missing > len(lengths):
        raise ValueError(f"{len(lengths)} sequences do not fill {len(packs) + missing} packs")
    donor = len(packs) - 1
    for _ in range(missing):
        while len(packs[donor]) == 1:
            donor -= 1
        packs.append([packs[donor].pop()])
    return packs


def pack_by_cost(
    lengths: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    multiple: int,
    max_sequences: int | None = None,
) -> Packs:
    """Make packs of similar cost (cost_balanced): as few as hold the tokens and are a multiple of `multiple`.

    Args:
        lengths: as pack_in_order, with the other arguments.
        costs: of the sequences, positive.
        capacity: tokens of a pack.
        multiple: the number of packs is a multiple of it.
        max_sequences: of a pack; None for any number.

    Returns:
        Packs, the most expensive first.

    Raises:
        ValueError: if there are fewer sequences than packs.
    """
    least = max(-(-sum(lengths) // capacity), -(-len(lengths) // (max_sequences or len(lengths))))
    for num_packs in itertools.count(-(-least // multiple) * multiple, multiple):
        if num_packs > len(lengths):
            raise ValueError(f"{len(lengths)} sequences do not fill {num_packs} packs")
        packs = _assign(lengths, costs, capacity, num_packs, max_sequences)
        if packs is not None:
            return packs
    raise AssertionError("every sequence fits into a separate pack")


def _assign(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, num_packs: int, max_sequences: int | None
) -> Packs | None:
    """Return packs, the most expensive first; None if a sequence has no space."""
    packs: Packs = [[] for _ in range(num_packs)]
    totals, shortest = [0.0] * num_packs, min(lengths)
    space = [capacity] * num_packs
    open_packs = SpaceQueue()
    for number in range(num_packs):
        open_packs.push(0.0, number, capacity)
    for position in sorted(range(len(lengths)), key=lambda position: (-costs[position], position)):
        found = open_packs.find(lengths[position])
        if found is None:
            return None
        open_packs.pop()
        _, number = found
        packs[number].append(position)
        space[number] -= lengths[position]
        totals[number] += costs[position]
        if space[number] >= shortest and len(packs[number]) != max_sequences:
            open_packs.push(totals[number], number, space[number])
    return [sorted(packs[number]) for number in sorted(range(num_packs), key=lambda number: (-totals[number], number))]


def sample_order(first: int, num_samples: int, micro_batch_size: int, dp_size: int) -> list[int]:
    """Return the samples of a global batch in the order in which Megatron-LM's scheduler sees them.

    Data ranks one after the other, each with the samples that it reads without packing.
    """
    chunk = micro_batch_size * dp_size
    return [
        start + rank * micro_batch_size + index
        for rank in range(dp_size)
        for start in range(first, first + num_samples, chunk)
        for index in range(micro_batch_size)
    ]


class PackingPlanner:
    """Plans of the global batches of one dataset.

    Args:
        get_length: of a sample, in tokens without padding.
        get_cost: of a sequence by its length, in FLOPs.
        fmt: of packs.
        micro_batch_size: samples that a data rank would read at once without packing; part of the order.
        dp_size: number of data-parallel ranks; fmt.cp_sizes counts the ranks of dynamic context parallelism.
        group_size: the number of microbatches is a multiple of it (virtual pipeline stages).
        is_pipelined: see pack_into_groups.
        read_ahead: number of batches of the loader that are planned before they are used.
    """

    def __init__(
        self,
        get_length: Callable[[int], int],
        get_cost: Callable[[int], float],
        fmt: PackFormat,
        micro_batch_size: int,
        dp_size: int,
        group_size: int = 1,
        is_pipelined: bool = False,
        read_ahead: int = 0,
    ):
        self._get_length, self.format, self._micro = get_length, fmt, micro_batch_size
        self._get_cost = functools.lru_cache(maxsize=None)(get_cost)
        self._dp_size, self._group_size, self._is_pipelined = dp_size, group_size, is_pipelined
        # the loader plans ahead of training; until a plan is used, as many others are used as are made
        self._num_kept, self._plans = _PLANS_KEPT + 2 * read_ahead, dict[tuple[int, int], PackingPlan]()
        self._lock = Lock()

    def plan(self, first: int, num_samples: int) -> PackingPlan:
        """Return the plan of the global batch of `num_samples` samples from `first` on.

        It is made once, though a thread that reads ahead and training ask for it, and kept for a while. Who finds it
        does not wait for the next one, for which text may have to be read.

        Raises:
            UserError: if the batch has fewer samples than packs are needed.
        """
        key = first, num_samples
        if (plan := self._plans.get(key)) is not None:
            return plan
        with self._lock:
            if (plan := self._plans.get(key)) is None:
                plan = self._plans[key] = self._plan(first, num_samples)
                if len(self._plans) > self._num_kept:
                    del self._plans[next(iter(self._plans))]
            return plan

    def _plan(self, first: int, num_samples: int) -> PackingPlan:
        samples = sample_order(first, num_samples, self._micro, self._dp_size)
        lengths = [self._get_length(sample) for sample in samples]
        try:
            if self.format.cp_sizes:
                packs = self._pack_groups(samples, lengths)
            else:
                packs = self._pack(samples, lengths, number=first // num_samples)
        except ValueError as error:
            num_ranks = 1 if self.format.cp_sizes else self._dp_size
            raise UserError(
                f"--sequence-packing-scheduler: {error}"
                + (f", a multiple of {num_ranks} data-parallel ranks" if num_ranks > 1 else "")
                + (f" times groups of {self._group_size} microbatches" if self._group_size > 1 else "")
                + "; raise --global-batch-size"
            ) from error
        return PackingPlan(packs, dict(zip(samples, lengths)))

    def _pack(self, samples: Sequence[int], lengths: Sequence[int], number: int) -> tuple[tuple[Pack, ...], ...]:
        """Return the packs of global batch `number` by microbatch and data rank."""
        fmt, multiple = self.format, self._dp_size * self._group_size
        padded = PackedSequences.of(lengths, fmt.sequence_multiple).padded_lengths
        if fmt.balances_cost:
            costs = [self._get_cost(length) for length in padded]
            found = pack_by_cost(padded, costs, fmt.capacity, multiple, fmt.max_samples)
        else:
            found = pack_in_order(padded, fmt.capacity, multiple, fmt.max_samples)
        packs = [Pack(tuple(samples[position] for position in pack)) for pack in found]
        microbatches = [packs[start : start + self._dp_size] for start in range(0, len(packs), self._dp_size)]
        if fmt.balances_cost:  # costs fall: no rank may have the most expensive pack of all microbatches, or batches
            shift = number % self._dp_size
            turned = [each[::-1] if index % 2 else each for index, each in enumerate(microbatches)]
            microbatches = [each[-shift:] + each[:-shift] for each in turned]
        return tuple(map(tuple, microbatches))

    def _pack_groups(self, samples: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[Pack, ...], ...]:
        limits = self.format.group_sizes(self._get_cost)
        found = pack_into_groups(lengths, limits, self._group_size, self._is_pipelined)
        return tuple(
            tuple(Pack(tuple(samples[position] for position in group.positions), group.size) for group in groups)
            for groups in found
        )

    def summarize(self, plan: PackingPlan) -> PackingSummary:
        """Return what a plan computes, and how well its packs are filled and balanced."""
        tokens = longest = 0
        cost = slowest = 0.0
        for packs in plan.packs:
            lengths = [[plan.lengths[sample] for sample in pack] for pack in packs]
            costs = [sum(map(self._get_cost, each)) for each in lengths]
            num_ranks = sum(pack.num_ranks for pack in packs)
            tokens += sum(map(sum, lengths))
            cost += sum(costs)
            slowest += max(each / pack.num_ranks for each, pack in zip(costs, packs)) * num_ranks
            longest += self.format.capacity * num_ranks
        sizes = Counter(pack.cp_size for packs in plan.packs for pack in packs if pack.cp_size is not None)
        return PackingSummary(
            plan.num_microbatches, tokens, cost, tokens / longest, slowest / cost, dict(sorted(sizes.items()))
        )

    def count_microbatches(self, start: int, stop: int, batch_size: int) -> int:
        """Return the number of microbatches of the samples from `start` to `stop` in batches of `batch_size`."""
        return sum(
            self.plan(first, min(batch_size, stop - first)).num_microbatches for first in range(start, stop, batch_size)
        )

    def batches(
        self, total: int, consumed: int, batch_size: Callable[[int], int], rank: int
    ) -> Iterator[tuple[int, list[Pack]]]:
        """Yield the first sample of every global batch and this rank's packs; an incomplete last one is dropped.

        Args:
            total: samples of the dataset.
            consumed: samples that were read before, over all ranks.
            batch_size: global batch size after a number of consumed samples.
            rank: this rank, counted as in PackingPlan.
        """
        while 0 < (samples := batch_size(consumed)) <= total - consumed:
            plan = self.plan(consumed, samples)
            yield consumed, [plan.pack(microbatch, rank) for microbatch in range(plan.num_microbatches)]
            consumed += samples

    def order(self, total: int, consumed: int, batch_size: Callable[[int], int], rank: int) -> Iterator[Pack]:
        """Yield the packs of `batches`."""
        for _, packs in self.batches(total, consumed, batch_size, rank):
            yield from packs
