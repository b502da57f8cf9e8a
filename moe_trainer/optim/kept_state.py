"""This rank's optimizer state, cut into stretches that are updated at once; the ground of flat_state.py and fully_sharded.py.

The elements that a rank keeps stand in one flat order. Runs of equal treatment are cut into stretches of STRETCH elements: on a CPU so few
that a stretch's gradients and parameters are still in a cache when they are read again (after unscaling, for the model's copy), and so many
that calls cost nothing; on a GPU so many that launches cost nothing, and that fp32 copies of narrow formats are small beside the state. Formats with a
scale are cut at parameters as well. Where some of the state lives on the host, it is the first part of the flat order, up to a stretch's end:
gradients arrive in that order.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.optim.flat import Slot
from moe_trainer.optim.formats import FORMATS
from moe_trainer.optim.kept import Devices, Kept, Remainders, moved
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.state_plan import MAIN, SQUARES, StatePlan

STRETCH_CPU = 1 << 20
STRETCH_GPU = 1 << 24


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


class Held(NamedTuple):
    """Elements [start, stop) of the flat state, under a checkpoint name: their live fp32 storage, or what reads a range of them
    (counted from `start`) where there is none."""

    name: str
    start: int
    stop: int
    live: Tensor | None
    read: Callable[[int, int], Tensor] | None


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of the flat state that are treated alike and contiguous in the model and in the gradients, too."""

    group: ParamGroup
    counted: bool
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Store:
    """The state of elements [start, stop): main parameters (None: the model's are) and moments, stored on one device.

    by_host: the host updates them although the model may be elsewhere.
    """

    start: int
    stop: int
    devices: Devices
    main: Kept | None
    moments: dict[str, Kept]
    by_host: bool

    def kept(self) -> Iterator[tuple[str, Kept]]:
        """All of it, by its checkpoint name."""
        if self.main is not None:
            yield MAIN, self.main
        yield from self.moments.items()


@dataclass(frozen=True, eq=False)
class Stretch:
    """Elements [start, stop) that are updated at once."""

    state: "KeptState"
    store: Store
    group: ParamGroup
    counted: bool
    start: int
    stop: int

    @property
    def grad(self) -> Tensor:
        """Their main gradients, where and as they are."""
        return self.state.grad_at(self.start, self.stop)

    @property
    def model(self) -> Tensor:
        """The model's own elements."""
        return self.state.model_at(self.start, self.stop)

    def open(self) -> tuple[Tensor, dict[str, Tensor]]:
        """fp32 main parameters and moments where the update runs, to be changed in place."""
        devices, main = self.store.devices, self.store.main
        param = moved(self.model, devices.update, copy=self.store.by_host) if main is None else main.open(self.start, self.stop)
        return param, {name: kept.open(self.start, self.stop) for name, kept in self.store.moments.items()}

    def close(self, param: Tensor, moments: dict[str, Tensor]) -> Tensor:
        """Keep what `open` gave. Returns: what the model must become."""
        for name, kept in self.store.moments.items():
            kept.close(self.start, self.stop, moments[name])
        main = self.store.main
        if main is None:
            return param
        return main.close_main(self.start, self.stop, param)

    def main_params(self) -> Tensor:
        """Their main parameters in fp32, to look at."""
        return self.model if self.store.main is None else self.store.main.read(self.start, self.stop)


class KeptState(ABC):
    """Main parameters, gradients and moments of some parameters, or of this rank's part of them.

    device: of model and gradients. pieces: they cover, in any order, what this rank keeps of every parameter. stored: the model keeps
    no values of its own of them, and what it keeps instead is made of the main parameters (stored_state.py). whole: each piece is a whole
    parameter and is updated as such (muon.py).
    A subclass calls `lay_out` when model_at and grad_at work.
    """

    stored: bool = False
    whole: bool = False

    device: torch.device
    pieces: Sequence[Piece]
    runs: Sequence[Run]
    stores: Sequence[Store] = ()
    stretches: Sequence[Stretch] = ()

    @abstractmethod
    def model_at(self, start: int, stop: int) -> Tensor:
        """The model's elements of a range inside a run, flat; live."""

    @abstractmethod
    def grad_at(self, start: int, stop: int) -> Tensor:
        """The main gradients of a range inside a run, flat; live."""

    def param_at(self, start: int) -> Parameter:
        """The parameter whose piece begins at an element of the flat state."""
        return next(piece.slot.param for piece in self.pieces if piece.offset == start)

    def grad_of(self, piece: Piece) -> Tensor:
        """The main gradient of a piece."""
        return self.grad_at(piece.offset, piece.end)

    def take(self, start: int, stop: int, values: Tensor) -> None:
        """Let the model have new values of a range inside a run."""
        model = self.model_at(start, stop)
        if values.data_ptr() != model.data_ptr():
            model.copy_(values, non_blocking=True)

    def lay_out(self, plan: StatePlan, size: int, dtype: torch.dtype) -> None:
        """Allocate the state of `size` elements of a model in `dtype`, gaps included."""
        if self.whole:
            cuts = [Run(piece.group, piece.counted, piece.offset, piece.end) for piece in self.pieces]
        else:
            cuts = list(_cuts(self.pieces if plan.needs_pieces else self.runs,
                              plan.longest or (STRETCH_CPU if self.device.type == "cpu" else STRETCH_GPU)))
        total, on_host, count = sum(run.stop - run.start for run in cuts), 0, 0
        while count < len(cuts) and on_host < plan.host_share * total:
            on_host += cuts[count].stop - cuts[count].start
            count += 1
        border = size if count == len(cuts) else cuts[count].start if count else 0
        stores, stretches = [], []
        for start, stop, mine, is_host in ((0, border, cuts[:count], True), (border, size, cuts[count:], False)):
            if start < stop:
                store = self._store(plan, start, stop, mine, is_host, dtype)
                stores.append(store)
                stretches += [Stretch(self, store, run.group, run.counted, run.start, run.stop) for run in mine]
        self.stores, self.stretches = tuple(stores), tuple(stretches)

    def _store(self, plan: StatePlan, start: int, stop: int, cuts: Sequence[Run], is_host: bool, dtype: torch.dtype) -> Store:
        devices, spans, by_host = plan.devices(self.device, is_host), [(run.start, run.stop) for run in cuts], is_host and plan.host_update
        moments = {name: Kept(start, stop, FORMATS[fmt], spans, devices, name == SQUARES) for name, fmt in plan.moments.items()}
        if dtype == torch.float32:
            main = None
        elif plan.remainders and dtype == torch.bfloat16 and not by_host:  # the host has no model to join them with
            main = Remainders(start, stop, spans, devices, self.model_at)
        else:
            main = Kept(start, stop, FORMATS[plan.main], spans, devices)
        return Store(start, stop, devices, main, moments, by_host)

    @torch.no_grad()
    def copy_model_to_main(self) -> None:
        """Take the main parameters from the model, which becomes what they can hold."""
        for stretch in self.stretches:
            if stretch.store.main is not None:
                self.take(stretch.start, stretch.stop, stretch.store.main.close_main(stretch.start, stretch.stop, stretch.model.float()))

    @torch.no_grad()
    def copy_main_to_model(self) -> None:
        """Take the model from the main parameters."""
        for stretch in self.stretches:
            main = stretch.store.main
            if main is not None:
                self.take(stretch.start, stretch.stop, main.close_main(stretch.start, stretch.stop, main.open(stretch.start, stretch.stop)))

    @torch.no_grad()
    def scale_rows(self, rows: Mapping[Parameter, Tensor]) -> None:
        """Multiply the main parameters of some parameters, and with them the model's, row by row."""
        wanted = [piece for piece in self.pieces if piece.slot.param in rows]
        for stretch in self.stretches if wanted else ():
            inside = [piece for piece in wanted if piece.offset < stretch.stop and stretch.start < piece.end]
            if not inside:
                continue
            main, moments = stretch.open()
            for piece in inside:
                first, last = max(piece.offset, stretch.start), min(piece.end, stretch.stop)
                param = piece.slot.param
                numbers = torch.arange(first - piece.offset + piece.start, last - piece.offset + piece.start, device=main.device)
                factors = rows[param].to(main.device)[numbers // (param.numel() // param.shape[0])]
                main[first - stretch.start:last - stretch.start].mul_(factors)
            self.take(stretch.start, stretch.stop, stretch.close(main, moments))

    def stage(self) -> None:
        """Make all state live fp32 storage, to be loaded in place."""
        for store in self.stores:
            for _, kept in store.kept():
                kept.stage()

    @torch.no_grad()
    def commit(self) -> None:
        """End what `stage` began; main parameters that were staged reach the model."""
        for store in self.stores:
            for name, kept in store.kept():
                for start, stop, values in kept.unstage():
                    if name == MAIN:
                        self.take(start, stop, kept.close_main(start, stop, values))
                    else:
                        kept.close(start, stop, values)

    def kept_of(self, piece: Piece) -> Iterator[Held]:
        """All that is kept of a piece; in several ranges where it lies in two places."""
        for store in self.stores:
            start, stop = max(piece.offset, store.start), min(piece.end, store.stop)
            if start < stop:
                for name, kept in store.kept():
                    live = kept.staged(start, stop)
                    yield Held(name, start, stop, live, None if live is not None else functools.partial(_read, kept, start))


def _read(kept: Kept, base: int, start: int, stop: int) -> Tensor:
    return kept.read(base + start, base + stop)


def _cuts(parts: Sequence[Piece] | Sequence[Run], longest: int) -> Iterator[Run]:
    """Cut pieces or runs to at most so many elements, in flat order."""
    for part in parts:
        first, last = (part.start, part.stop) if isinstance(part, Run) else (part.offset, part.end)
        for start in range(first, last, longest):
            yield Run(part.group, part.counted, start, min(start + longest, last))
