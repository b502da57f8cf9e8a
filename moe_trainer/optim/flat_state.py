"""This rank's part of the flat storage: main parameters, main gradients and moments, cut into parameters and groups."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.optim.flat import Bucket, FlatLayout
from moe_trainer.optim.grad_buffer import GradBuffer
from moe_trainer.optim.kept_state import KeptState, Piece, Run
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.state_plan import StatePlan
from moe_trainer.parallel.params import info_of, is_counted
from moe_trainer.parallel.state import ParallelState


class FlatState(KeptState):
    """This rank's main parameters, main gradients and moments of one layout."""

    def __init__(self, buffer: GradBuffer, model: Tensor, plan: StatePlan, groups: dict[Parameter, ParamGroup], ps: ParallelState):
        self.layout: FlatLayout = buffer.layout
        self.whole = self.layout.whole
        self.device = self.layout.device
        self.model = model
        self.buffer = buffer
        ranges = [bucket.owned(self.layout.group, buffer.sharded) for bucket in self.layout.buckets]
        self.pieces = _pieces(self.layout, ranges, groups, _holds_alone(self.layout, buffer.sharded), ps)
        # (range in the buffer, range in the flat state), one pair a bucket
        self.parts: list[tuple[slice, slice]] = []
        offset = 0
        for start, stop in ranges:
            self.parts.append((slice(start, stop), slice(offset, offset + stop - start)))
            offset += stop - start
        self._ends = [here.stop for _, here in self.parts]
        self.runs = [Run(run[0].group, run[0].counted, run[0].offset, run[-1].end) for run in _runs(self.pieces, self._ends)]
        self.lay_out(plan, offset, self.kept_dtype)
        self.copy_model_to_main()

    @property
    def kept_dtype(self) -> torch.dtype:
        """The format in which the model keeps these parameters."""
        return self.layout.dtype

    @property
    def wire(self) -> Tensor:
        """What the model keeps of all parameters, flat, and data-parallel ranks gather."""
        return self.model

    def model_at(self, start: int, stop: int) -> Tensor:
        """The model's elements of a range inside a bucket's part, gaps included; live."""
        return self.model[self._in_buffer(start, stop)]

    def grad_at(self, start: int, stop: int) -> Tensor:
        """The main gradients of a range inside a bucket's part, gaps included; live."""
        return self.buffer.flat[self._in_buffer(start, stop)]

    def bucket_at(self, start: int) -> Bucket:
        """The bucket that an element of the flat state belongs to."""
        return self.layout.buckets[bisect.bisect_right(self._ends, start)]

    def _in_buffer(self, start: int, stop: int) -> slice:
        """Where [start, stop) of the flat state, which must lie in one bucket, is in the buffers."""
        where, here = self.parts[bisect.bisect_right(self._ends, start)]
        assert here.start <= start and stop <= here.stop, f"[{start}, {stop}) is in no single bucket of {self.parts}"
        return slice(where.start + start - here.start, where.start + stop - here.start)


def _pieces(layout: FlatLayout, ranges: Sequence[tuple[int, int]], groups: dict[Parameter, ParamGroup], alone: bool,
            ps: ParallelState) -> list[Piece]:
    """Cut this rank's range of every bucket into pieces of parameters."""
    pieces, base = [], 0
    for bucket, (low, high) in zip(layout.buckets, ranges):
        for slot in bucket.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                pieces.append(Piece(slot, start - slot.start, stop - slot.start, base + start - low,
                                    groups[slot.param], alone and is_counted(info_of(slot.param), ps)))
        base += high - low
    return pieces


def _runs(pieces: Sequence[Piece], ends: Sequence[int]) -> Iterator[list[Piece]]:
    """Consecutive pieces of equal treatment, none reaching over the end of a bucket's part."""
    keyed = itertools.groupby(pieces, key=lambda p: (bisect.bisect_right(ends, p.offset), p.group, p.counted))
    return (list(run) for _, run in keyed)


def _holds_alone(layout: FlatLayout, sharded: bool) -> bool:
    """Whether this is the first of the ranks that hold the same part of the same data-parallel state."""
    return (layout.outer if sharded else layout.group).rank == 0
