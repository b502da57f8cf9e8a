"""This rank's part of the flat storage: main parameters, main gradients and moments, cut into parameters and groups."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.flat import FlatLayout, Slot
from moe_trainer.optim.grad_buffer import DataParallelGrads, GradBuffer
from moe_trainer.optim.param_groups import ParamGroup, group_of
from moe_trainer.parallel.params import info_of, is_counted
from moe_trainer.parallel.state import ParallelState

# moments that each --optimizer keeps, under their checkpoint names
MOMENTS = MappingProxyType({"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)})


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a parameter at [offset, offset + stop - start) of this rank's flat state.

    counted: whether this rank counts them in norms. Exactly one rank of the world does: every rank that holds them has the same
    values, but a sum over all ranks must see them once.
    """

    slot: Slot
    start: int
    stop: int
    offset: int
    group: ParamGroup
    counted: bool

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """Consecutive pieces of equal treatment in one bucket, gaps included: views of the flat storage."""

    group: ParamGroup
    counted: bool
    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor]


def portions(segments: Sequence[Segment], elements: int = 2**26) -> Iterator[list[Segment]]:
    """Segments to update together: all whose gradients are fp32; the others, of which the update needs a copy in fp32, one by one
    and cut to so many elements. An update is element by element, so the cuts change nothing (on a CPU: if they lie at whole vectors)."""
    ready = [segment for segment in segments if segment.grad.dtype == torch.float32]
    if ready:
        yield ready
    for segment in segments:
        if segment.grad.dtype != torch.float32:
            for start in range(0, segment.grad.numel(), elements):
                here = slice(start, start + elements)
                yield [replace(segment, param=segment.param[here], grad=segment.grad[here],
                               moments={name: moment[here] for name, moment in segment.moments.items()})]


class FlatState:
    """This rank's main parameters, main gradients and moments of one layout."""

    def __init__(self, buffer: GradBuffer, model: Tensor, moments: Sequence[str], groups: dict[Parameter, ParamGroup],
                 ps: ParallelState):
        self.layout: FlatLayout = buffer.layout
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
        self.has_main = self.layout.dtype != torch.float32
        self.main = torch.empty(offset, dtype=torch.float32, device=self.layout.device) if self.has_main else None
        self.moments = {name: torch.zeros(offset, dtype=torch.float32, device=self.layout.device) for name in moments}
        self.segments = [self._segment(run) for run in _runs(self.pieces, self._ends)]
        self.copy_model_to_main()

    @torch.no_grad()
    def copy_model_to_main(self) -> None:
        if self.has_main:
            for where, here in self.parts:
                self.main[here].copy_(self.model[where])

    @torch.no_grad()
    def copy_main_to_model(self) -> None:
        if self.has_main:
            for where, here in self.parts:
                self.model[where].copy_(self.main[here])

    def grad_of(self, piece: Piece) -> Tensor:
        """The main gradient of a piece."""
        return self.buffer.flat[self._in_buffer(piece.offset, piece.end)]

    def kept_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """What is kept of a piece, by its checkpoint name."""
        here = slice(piece.offset, piece.end)
        if self.has_main:
            yield "fp32_param", self.main[here]
        for name, moment in self.moments.items():
            yield name, moment[here]

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's main gradients, unless a narrow format would round them once more: see Optimizer."""
        if self.buffer.flat.dtype == torch.float32:
            for where, _ in self.parts:
                self.buffer.flat[where].mul_(factor)

    def _segment(self, run: Sequence[Piece]) -> Segment:
        start, stop = run[0].offset, run[-1].end
        there = self._in_buffer(start, stop)
        return Segment(run[0].group, run[0].counted, self.main[start:stop] if self.has_main else self.model[there],
                       self.buffer.flat[there], {name: flat[start:stop] for name, flat in self.moments.items()})

    def _in_buffer(self, start: int, stop: int) -> slice:
        """Where [start, stop) of the flat state, which must lie in one bucket, is in the buffers."""
        where, here = self.parts[bisect.bisect_right(self._ends, start)]
        assert here.start <= start and stop <= here.stop, f"[{start}, {stop}) is in no single bucket of {self.parts}"
        return slice(where.start + start - here.start, where.start + stop - here.start)


def make_states(grads: DataParallelGrads, settings: OptimizerArgs, ps: ParallelState) -> list[FlatState]:
    """Flatten the model's parameters and allocate this rank's optimizer state beside the gradient buffers."""
    states = []
    for buffer in grads.buffers:
        groups = {slot.param: group_of(slot.param, settings, ps.ep.size > 1) for slot in buffer.layout.slots}
        states.append(FlatState(buffer, buffer.layout.flatten_params(), MOMENTS[settings.optimizer], groups, ps))
    return states


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
