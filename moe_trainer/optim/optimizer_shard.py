"""This rank's shard of the optimizer state, divided into segments that are updated at once.

A shard is one flat range of elements. Contiguous segments of equal treatment are split further into update segments: on
a CPU short enough that gradients and parameters are still cached when they are read again, on a GPU long enough to
amortize kernel launches and short enough that fp32 copies of narrow formats are small. Formats with a scale are split
at parameters as well. State that is on the host is the first part of the flat range, because gradients arrive in that
order.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.optim.buckets import Slot
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.state_formats import FORMATS
from moe_trainer.optim.state_plan import MAIN, SQUARES, StatePlan
from moe_trainer.optim.state_storage import (
    MainParams,
    MasterRemainderStorage,
    ModelParams,
    StatePlacement,
    StateStorage,
    make_storage,
)

MAX_SEGMENT_NUMEL_CPU = 1 << 20
MAX_SEGMENT_NUMEL_GPU = 1 << 24


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of a parameter, at [offset, end) of this rank's flat state.

    Args:
        is_counted: this rank counts the elements in norms. Exactly one rank of the world does, because all ranks that
            hold them have equal values.
    """

    slot: Slot
    start: int
    stop: int
    offset: int
    group: ParamGroup
    is_counted: bool

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


@dataclass(frozen=True)
class ParamState:
    """State of a parameter on this rank: elements [start, stop) of the flattened parameter.

    Args:
        tensor: live fp32 storage. For state in another format it has only shape and dtype (device "meta"), and
            `read(first, last)` returns the fp32 values of a range counted from `start`.
    """

    param: Parameter
    state_name: str
    tensor: Tensor
    start: int
    stop: int
    read: Callable[[int, int], Tensor] | None = None

    def values(self) -> Tensor:
        """Return the fp32 values, not to be changed."""
        return self.tensor if self.read is None else self.read(0, self.stop - self.start)


@dataclass(frozen=True, eq=False)
class StateBlock:
    """State of elements [start, stop) of a shard: main parameters and moments on one device.

    Args:
        is_updated_on_host: the host updates the elements although the model may be elsewhere.
    """

    start: int
    stop: int
    placement: StatePlacement
    main: MainParams
    moments: dict[str, StateStorage]
    is_updated_on_host: bool

    def storages(self) -> Iterator[tuple[str, StateStorage]]:
        """Iterate over (checkpoint name, storage), without main parameters that the model stores."""
        if isinstance(self.main, StateStorage):
            yield MAIN, self.main
        yield from self.moments.items()


@dataclass(frozen=True, eq=False)
class Segment:
    """Elements [start, stop) of a shard with equal treatment, contiguous in the model and in the gradients."""

    shard: "OptimizerShard"
    group: ParamGroup
    is_counted: bool
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def grad(self) -> Tensor:
        """Main gradients; live."""
        return self.shard.grad_at(self.start, self.stop)

    @property
    def model(self) -> Tensor:
        """Model parameters; live."""
        return self.shard.model_at(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class UpdateSegment(Segment):
    """A segment that is updated at once.

    Args:
        state: the block with the state of the elements.
    """

    state: StateBlock

    def load_fp32(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return fp32 main parameters and moments on the update's device, to be changed in place."""
        start, stop = self.start, self.stop
        moments = {name: moment.load_fp32(start, stop) for name, moment in self.state.moments.items()}
        return self.state.main.load_fp32(start, stop), moments

    def store_fp32(self, param: Tensor, moments: dict[str, Tensor]) -> Tensor:
        """Store what `load_fp32` returned.

        Returns:
            The new values of the model parameters.
        """
        for name, moment in self.state.moments.items():
            moment.store_fp32(self.start, self.stop, moments[name])
        return self.state.main.store_main(self.start, self.stop, param)

    def main_params(self) -> Tensor:
        """Return the fp32 main parameters, not to be changed."""
        return self.state.main.read_fp32(self.start, self.stop)


class OptimizerShard(ABC):
    """Main parameters, gradients and moments of some parameters, or of this rank's part of them.

    A subclass calls `allocate_state` once model_at and grad_at work.

    Attributes:
        device: of the model and its gradients.
        param_shards: what this rank holds of every parameter, in any order.
        contiguous_segments: the longest segments of equal treatment.
        blocks: the state, by device.
        update_segments: the segments that are updated at once.
        has_quantized_params: the model stores the parameters in 8 or 4 bits only (quantized_params.py).
        has_whole_params: each param shard is a full parameter and is updated as such.
    """

    has_quantized_params: bool = False
    has_whole_params: bool = False

    device: torch.device
    param_shards: Sequence[ParamShard]
    contiguous_segments: Sequence[Segment]
    blocks: Sequence[StateBlock] = ()
    update_segments: Sequence[UpdateSegment] = ()

    @abstractmethod
    def model_at(self, start: int, stop: int) -> Tensor:
        """Return the model's elements of a range inside a contiguous segment, flat; live."""

    @abstractmethod
    def grad_at(self, start: int, stop: int) -> Tensor:
        """Return the main gradients of a range inside a contiguous segment, flat; live."""

    def get_grad(self, part: ParamShard) -> Tensor:
        """Return the main gradient of a param shard."""
        return self.grad_at(part.offset, part.end)

    def write_to_model(self, start: int, stop: int, values: Tensor) -> None:
        """Write new values of a range inside a contiguous segment to the model."""
        model = self.model_at(start, stop)
        if values.data_ptr() != model.data_ptr():
            model.copy_(values, non_blocking=True)

    def gather_model(self) -> None:  # noqa: B027
        """Copy updated parameters from other ranks, where not all of them are gathered later. Collective."""

    def allocate_state(self, plan: StatePlan, size: int, dtype: torch.dtype) -> None:
        """Allocate the state of `size` elements, gaps included, of a model in `dtype`."""
        segments = self._split_segments(plan)
        total, on_host, count = sum(segment.numel for segment in segments), 0, 0
        while count < len(segments) and on_host < plan.host_share * total:
            on_host += segments[count].numel
            count += 1
        border = size if count == len(segments) else segments[count].start if count else 0
        blocks: list[StateBlock] = []
        update_segments: list[UpdateSegment] = []
        for start, stop, members, is_host in (
            (0, border, segments[:count], True),
            (border, size, segments[count:], False),
        ):
            if start < stop:
                block = self._allocate_block(plan, start, stop, members, is_host, dtype)
                blocks.append(block)
                update_segments += [
                    UpdateSegment(self, each.group, each.is_counted, each.start, each.stop, block) for each in members
                ]
        self.blocks, self.update_segments = tuple(blocks), tuple(update_segments)

    def _split_segments(self, plan: StatePlan) -> list[Segment]:
        """Split the shard, in flat order, into what is updated at once."""
        by_param = [Segment(self, part.group, part.is_counted, part.offset, part.end) for part in self.param_shards]
        if self.has_whole_params:
            return by_param
        default = MAX_SEGMENT_NUMEL_CPU if self.device.type == "cpu" else MAX_SEGMENT_NUMEL_GPU
        limit = plan.max_segment_numel or default
        return [
            replace(segment, start=start, stop=min(start + limit, segment.stop))
            for segment in (by_param if plan.splits_at_params else self.contiguous_segments)
            for start in range(segment.start, segment.stop, limit)
        ]

    def _allocate_block(
        self, plan: StatePlan, start: int, stop: int, segments: Sequence[Segment], is_host: bool, dtype: torch.dtype
    ) -> StateBlock:
        placement = plan.placement(self.device, is_host)
        spans = [(segment.start, segment.stop) for segment in segments]
        is_updated_on_host = is_host and plan.updates_on_host
        moments = {
            name: make_storage(start, stop, FORMATS[fmt], spans, placement, name == SQUARES)
            for name, fmt in plan.moments.items()
        }
        main: MainParams
        if dtype == torch.float32 or plan.main == "model":
            main = ModelParams(self.model_at, placement.update, always_copies=is_updated_on_host)
        elif (
            plan.uses_remainders and dtype == torch.bfloat16 and not is_updated_on_host
        ):  # the host has no model to join
            main = MasterRemainderStorage(start, stop, spans, placement, self.model_at)
        else:
            main = make_storage(start, stop, FORMATS[plan.main], spans, placement)
        return StateBlock(start, stop, placement, main, moments, is_updated_on_host)

    @torch.no_grad()
    def sync_main_params(self, from_model: bool) -> None:
        """Set the main parameters from the model if `from_model`, and the model to what they can represent."""
        for segment in self.update_segments:
            main, start, stop = segment.state.main, segment.start, segment.stop
            if isinstance(main, StateStorage):
                values = segment.model.float() if from_model else main.load_fp32(start, stop)
                self.write_to_model(start, stop, main.store_main(start, stop, values))

    @torch.no_grad()
    def scale_rows(self, row_factors: Mapping[Parameter, Tensor], segments: Iterable[UpdateSegment]) -> None:
        """Multiply the rows of some parameters by factors, in the main parameters and in the model.

        Args:
            segments: the update segments to scale.
        """
        scaled = [part for part in self.param_shards if part.slot.param in row_factors]
        for segment in segments if scaled else ():
            parts = [part for part in scaled if part.offset < segment.stop and segment.start < part.end]
            if not parts:
                continue
            main, moments = segment.load_fp32()
            for part in parts:
                first, last = max(part.offset, segment.start), min(part.end, segment.stop)
                param = part.slot.param
                base = part.start - part.offset
                indices = torch.arange(first + base, last + base, device=main.device)
                factors = row_factors[param].to(main.device)[indices // (param.numel() // param.shape[0])]
                main[first - segment.start : last - segment.start].mul_(factors)
            self.write_to_model(segment.start, segment.stop, segment.store_fp32(main, moments))

    def stage(self) -> None:
        """Expose all state as live fp32 storage, to be loaded in place."""
        for block in self.blocks:
            for _, storage in block.storages():
                storage.stage()

    @torch.no_grad()
    def unstage(self) -> None:
        """Store what was loaded after `stage`, and write staged main parameters to the model."""
        for block in self.blocks:
            for name, storage in block.storages():
                for start, stop, values in storage.unstage():
                    if name == MAIN:
                        self.write_to_model(start, stop, storage.store_main(start, stop, values))
                    else:
                        storage.store_fp32(start, stop, values)

    def param_states(self, part: ParamShard) -> Iterator[ParamState]:
        """Iterate over the state of a param shard, in several ranges if it spans two blocks."""
        base = part.start - part.offset
        for block in self.blocks:
            start, stop = max(part.offset, block.start), min(part.end, block.stop)
            if start >= stop:
                continue
            for name, storage in block.storages():
                tensor, read = storage.staged_view(start, stop), None
                if tensor is None:
                    tensor = torch.empty(stop - start, dtype=torch.float32, device="meta")
                    read = functools.partial(_read, storage, start)
                yield ParamState(part.slot.param, name, tensor, base + start, base + stop, read)


def _read(storage: StateStorage, base: int, start: int, stop: int) -> Tensor:
    return storage.read_fp32(base + start, base + stop)
