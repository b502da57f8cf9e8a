"""Microbatches of packed sequences that a roofline executes for those of an iteration (estimate/roofline.py)."""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from arguments import Arguments
from moe_trainer.data.build import batch_format
from moe_trainer.data.loader import Batch, make_packed_batch
from moe_trainer.data.packing import Pack, PackFormat, PackingPlanner
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.length_histogram import LengthHistogram
from moe_trainer.estimate.memory import data_parallel_size
from moe_trainer.estimate.plan import microbatch_multiple
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.verification.synthetic_data import RandomTokenDataset, make_null_tokenizer

_EXECUTED_PACKS = 6
"""Microbatches that are executed: the first, the last, and some of those between."""


@dataclass(frozen=True)
class ExecutedPack:
    """The slowest rank's part of a microbatch.

    Attributes:
        packed: its sequences.
        num_ranks: that share them.
        weight: how many microbatches of the iteration it represents.
    """

    packed: PackedSequences
    num_ranks: int
    weight: float


@dataclass(frozen=True)
class ExecutedPacks:
    """What is executed of an iteration.

    Attributes:
        packs: in the order of the iteration's microbatches.
        num_microbatches: of the iteration.
    """

    packs: tuple[ExecutedPack, ...]
    num_microbatches: int

    @staticmethod
    def of(
        args: Arguments, fmt: PackFormat, vocab_rows: int, world_size: int, histogram: LengthHistogram
    ) -> "ExecutedPacks":
        """Plan an iteration as a run does, and choose from its microbatches.

        The ranks of a microbatch wait for the slowest one, so its pack is executed. Microbatches between the first and
        the last are divided by cost into parts of equal size; the middle one of a part represents it, with the weight
        that gives it the part's cost.

        Args:
            args: of the run.
            fmt: of its packs.
            vocab_rows: padded vocabulary size.
            world_size: number of ranks.
            histogram: lengths of the data. The global batch has its quantiles, in a random but fixed order.

        Raises:
            UserError: if the global batch has too few sequences.
        """
        size = args.training.global_batch_size
        lengths = histogram.read_by_model(args.data.seq_length)
        drawn = [lengths.quantile((number + 0.5) / size) for number in range(size)]
        random.Random(0).shuffle(drawn)
        get_flops = functools.partial(training_flops, args, 1, padded_vocab_size=vocab_rows)
        planner = PackingPlanner(
            drawn.__getitem__,
            get_flops,
            fmt,
            args.training.micro_batch_size,
            data_parallel_size(args, world_size),
            microbatch_multiple(args),
            args.parallel.pipeline_model_parallel_size > 1,
        )
        plan, get_cost = planner.plan(0, size), fmt.group_sizes(get_flops).cost

        def executed(pack: Pack) -> ExecutedPack:
            packed = fmt.pack([drawn[sample] for sample in pack], pack.cp_size)
            return ExecutedPack(packed, pack.cp_size or args.parallel.context_parallel_size, 1.0)

        def cost(pack: ExecutedPack) -> float:
            return sum(get_cost(length, pack.num_ranks) for length in pack.packed.padded_lengths) / pack.num_ranks

        slowest = [max(map(executed, packs), key=cost) for packs in plan.packs]
        inner = sorted(slowest[1:-1], key=cost, reverse=True)
        count = min(len(inner), _EXECUTED_PACKS - 2)
        parts = [inner[len(inner) * part // count : len(inner) * (part + 1) // count] for part in range(count)]
        middle = [
            replace(part[len(part) // 2], weight=sum(map(cost, part)) / cost(part[len(part) // 2])) for part in parts
        ]
        ends = slowest if len(slowest) < 2 else [slowest[0], slowest[-1]]
        return ExecutedPacks((*ends[:1], *middle, *ends[1:]), len(slowest))

    def as_json(self) -> dict[str, object]:
        """Return what RecordingCosts reads."""
        packs = [[pack.weight, pack.num_ranks, pack.packed.padded_lengths] for pack in self.packs]
        return {"packs": packs, "num_microbatches": self.num_microbatches}

    def batches(self, args: Arguments) -> Iterator[Batch]:
        """Yield microbatches of random tokens with these lengths."""
        fmt = batch_format(args.data, make_null_tokenizer(args))
        for pack in self.packs:
            data = _Sequences(pack.packed.lengths, args.data.vocab_size or 1)

            def pad(lengths: Sequence[int], packed: PackedSequences = pack.packed) -> PackedSequences:
                return packed

            yield make_packed_batch(data, data.samples, fmt, pad)


class _Sequences(RandomTokenDataset):
    """Dataset of random sequences of given lengths; a length of zero is padding and no sample."""

    def __init__(self, lengths: Sequence[int], end: int):
        super().__init__(0, max(lengths), end)
        self._lengths = [length for length in lengths if length]

    @property
    def samples(self) -> Sequence[int]:
        return range(len(self._lengths))

    def tokens(self, index: int) -> np.ndarray:
        """Return the ids of a sequence and the label of its last token, [length + 1] int64."""
        return super().tokens(index)[: self._lengths[index] + 1]
