"""Optimizer state of weights that the model keeps in 8 bits (--fp8-param-gather; ops/stored_weight.py).

The fp32 main parameters of a rank's part are the only values there are; every rank has the bytes of all parts. After a step `publish`
casts the part straight to 8 bits: largest magnitudes of the part, their maximum over the ranks that hold the others (one all-reduce of
a number per block, or per matrix), cast. Then the bytes are gathered like any parameters (distributed_optimizer.py). Scales need no
gathering: all ranks compute them from the same maxima.

Everybody else asks the parameter's `stored.home` for values, in the parameter's own format, rounded from the main parameters: so what
checkpoints and exports hold does not depend on how weights are stored. Loading lays this rank's part out in that format (`to_load`),
to be filled; the optimizer then takes the main parameters from there, unless they were loaded themselves.
"""

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.stored_weight import StoredWeight
from moe_trainer.optim.flat import Slot
from moe_trainer.optim.flat_state import FlatState
from moe_trainer.optim.grad_buffer import DataParallelGrads, GradBuffer
from moe_trainer.optim.kept import Kept, moved
from moe_trainer.optim.kept_state import Piece
from moe_trainer.optim.param_groups import ParamGroup, group_of
from moe_trainer.optim.state_plan import StatePlan, plan_state
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState


class StoredState(FlatState):
    """This rank's main parameters, main gradients and moments of one layout of stored weights."""

    stored = True

    def __init__(self, buffer: GradBuffer, plan: StatePlan, groups: dict[Parameter, ParamGroup], ps: ParallelState):
        """The parameters have their first values, which they lose."""
        layout = buffer.layout
        self._to_load: Tensor | None = None
        super().__init__(buffer, layout.flatten_params(), plan, groups, ps)
        self.model = None
        self._offsets = [piece.offset for piece in self.pieces]
        self._codes = layout.allocate(torch.uint8)
        held = {piece.slot: piece for piece in self.pieces}
        weights = [_stored(slot) for slot in layout.slots]
        self._amax = torch.zeros(sum(weight.num_blocks for weight in weights), device=self.device)
        for slot, weight, amax in zip(layout.slots, weights, self._amax.split([weight.num_blocks for weight in weights])):
            weight.bind(self._codes[slot.start:slot.stop], amax)
            weight.home = Home(self, slot, held.get(slot))
            slot.param.data = weight.carrier(layout.dtype)

    @property
    def kept_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def wire(self) -> Tensor:
        return self._codes

    @property
    def follows_scales(self) -> bool:
        """Whether scales may change without a step, so that the bytes do."""
        return any(_stored(slot).given() is not None for slot in self.layout.slots)

    def model_at(self, start: int, stop: int) -> Tensor:
        """Values in the parameters' format, at the beginning and while weights are loaded."""
        if self._to_load is not None:
            return self._to_load[start:stop]
        assert self.model is not None, "weights that are stored in 8 bits have no other values than the main parameters"
        return super().model_at(start, stop)

    def take(self, start: int, stop: int, values: Tensor) -> None:
        """The model gets all new values together, with `publish`."""

    @torch.no_grad()
    def publish(self) -> None:
        """Make this rank's part of the bytes, and all scales, of the main parameters. Collective over the layout's group."""
        self._amax.zero_()
        for weight, main, start, stop, first in self._parts():
            weight.look_at(moved(main.open(start, stop), self.device), first)
        collectives.all_reduce(self._amax, self.layout.group, "max")
        for slot in self.layout.slots:
            _stored(slot).settle()
        for weight, main, start, stop, first in self._parts():
            weight.cast(moved(main.open(start, stop), self.device), first)

    def values(self, start: int, stop: int) -> Tensor:
        """The main parameters of a range of the flat state in the parameters' format; a copy."""
        found = torch.empty(stop - start, dtype=self.layout.dtype, device=self.device)
        for store in self.stores:
            low, high = max(start, store.start), min(stop, store.stop)
            if low < high:
                found[low - start:high - start] = store.main.read(low, high)
        return found

    def to_load(self) -> Tensor:
        """The values of the whole flat state, to be overwritten in place, until `loaded`."""
        if self._to_load is None:
            self._to_load = self.values(0, sum(here.stop - here.start for _, here in self.parts))
        return self._to_load

    def loaded(self) -> None:
        """End what `to_load` began."""
        self._to_load = None

    def _parts(self) -> Iterator[tuple[StoredWeight, Kept, int, int, int]]:
        """Ranges of the flat state inside one parameter and one stretch: (weight, main, start, stop, where it begins in the parameter)."""
        for stretch in self.stretches:
            for piece in self.pieces[max(0, bisect.bisect_right(self._offsets, stretch.start) - 1):]:
                if piece.offset >= stretch.stop:
                    break
                start, stop = max(piece.offset, stretch.start), min(piece.end, stretch.stop)
                if start < stop:
                    yield _stored(piece.slot), stretch.store.main, start, stop, piece.start + start - piece.offset


@dataclass(frozen=True, eq=False)
class Home:
    """Where the values of one stored weight are; parallel/shards.py asks it. piece: what this rank has of it, if anything."""

    state: StoredState
    slot: Slot
    piece: Piece | None

    def whole(self) -> Tensor:
        """All values, on every rank, in the parameter's format. Collective over the ranks that hold parts."""
        layout = self.state.layout
        found = torch.zeros(self.slot.param.numel(), dtype=layout.dtype, device=self.state.device)
        if self.piece is not None:
            found[self.piece.start:self.piece.stop] = self.state.values(self.piece.offset, self.piece.end)
        return collectives.all_reduce(found, layout.group).view(self.slot.param.shape)

    def parts_to_save(self) -> list[tuple[Tensor, int, int, Callable[[int, int], Tensor]]]:
        """Shape and type (device "meta"), range, and what reads a part of that range, counted from its start."""
        piece = self.piece
        if piece is None:
            return []
        shape = torch.empty(piece.stop - piece.start, dtype=self.state.layout.dtype, device="meta")
        return [(shape, piece.start, piece.stop, functools.partial(_read, self.state, piece.offset))]

    def parts_to_load(self) -> list[tuple[Tensor, int, int]]:
        """Live storage to be filled, and its range."""
        piece = self.piece
        return [] if piece is None else [(self.state.to_load()[piece.offset:piece.end], piece.start, piece.stop)]


def make_states(grads: DataParallelGrads, settings: OptimizerArgs, ps: ParallelState) -> list[FlatState]:
    """Flatten the model's parameters and allocate this rank's optimizer state beside the gradient buffers."""
    states: list[FlatState] = []
    for buffer in grads.buffers:
        plan = plan_state(settings, buffer.layout.whole)
        groups = {slot.param: group_of(slot.param, settings, ps.ep.size > 1) for slot in buffer.layout.slots}
        if buffer.layout.stored:
            states.append(StoredState(buffer, plan, groups, ps))
        else:
            states.append(FlatState(buffer, buffer.layout.flatten_params(), plan, groups, ps))
    return states


def stored_states(states: Sequence[object]) -> list[StoredState]:
    """Those whose weights are kept in 8 bits."""
    return [state for state in states if isinstance(state, StoredState)]


def _stored(slot: Slot) -> StoredWeight:
    return slot.param.stored


def _read(state: StoredState, base: int, start: int, stop: int) -> Tensor:
    return state.values(base + start, base + stop)
