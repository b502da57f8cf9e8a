"""This rank's shard of a flat layout (buckets.py): main parameters, main gradients and moments."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.buckets import Bucket, FlatLayout
from moe_trainer.optim.grad_buffer import GradBuffer
from moe_trainer.optim.mx_params import MxParams
from moe_trainer.optim.optimizer_shard import OptimizerShard, ParamShard, Segment
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.optim.quantized_params import QuantizedParams, SingleCopyParams
from moe_trainer.optim.state_plan import plan_state
from moe_trainer.parallel.params import get_param_info, is_unique_replica
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.mx_weight import MxWeight


class FlatParams:
    """Model parameters of a layout, in one flat buffer.

    Args:
        in_buffer: returns the buffer's range of a range of the flat state.
    """

    finish_gather = None

    def __init__(self, flat: Tensor, in_buffer: Callable[[int, int], slice]):
        self.gather_buffer, self._in_buffer = flat, in_buffer

    def at(self, start: int, stop: int) -> Tensor:
        """Return the elements of a range of the flat state; live."""
        return self.gather_buffer[self._in_buffer(start, stop)]


class FlatShard(OptimizerShard):
    """This rank's main parameters, main gradients and moments of one layout.

    Attributes:
        params: all model parameters of the layout, as the model stores them.
    """

    def __init__(self, buffer: GradBuffer, settings: OptimizerArgs, ps: ParallelState, main_format: str | None = None):
        """Flatten the parameters and allocate the state. With storage in fewer bits only the state has the values."""
        self.layout: FlatLayout = buffer.layout
        self.has_whole_params, self.has_quantized_params = self.layout.has_whole_params, self.layout.is_quantized
        self.device = self.layout.device
        self.params: FlatParams | QuantizedParams = FlatParams(self.layout.flatten_params(), self._in_buffer)
        self.buffer = buffer
        ranges = [bucket.owned_range(self.layout.group, buffer.is_sharded) for bucket in self.layout.buckets]
        # per bucket, the owned range in the buffer and the same elements in the flat state
        self._ranges: list[tuple[slice, slice]] = []
        size = 0
        for start, stop in ranges:
            self._ranges.append((slice(start, stop), slice(size, size + stop - start)))
            size += stop - start
        self._ends = [in_state.stop for _, in_state in self._ranges]
        is_first_holder = (self.layout.outer if buffer.is_sharded else self.layout.group).rank == 0
        self.param_shards = _param_shards(self.layout, ranges, settings, is_first_holder, ps)
        self.contiguous_segments = [
            Segment(self, parts[0].group, parts[0].is_counted, parts[0].offset, parts[-1].end)
            for parts in self._contiguous_parts()
        ]
        plan = plan_state(settings, self.has_whole_params, main_format)
        self.allocate_state(plan, size, torch.uint8 if self.has_quantized_params else self.layout.dtype)
        self.sync_main_params(from_model=True)
        if self.has_quantized_params:
            is_mx = isinstance(next(iter(self.layout.slots)).stored_weight, MxWeight)
            self.params = (
                MxParams(self, self.layout, size, buffer.flat) if is_mx else SingleCopyParams(self, self.layout, size)
            )

    @property
    def gather_buffer(self) -> Tensor:
        """The stored model parameters of all ranks, flat: the buffer that data-parallel ranks gather."""
        return self.params.gather_buffer

    def model_at(self, start: int, stop: int) -> Tensor:
        """Return the model's elements of a range inside one bucket's owned range; live.

        Quantized parameters have such elements only while weights are loaded.
        """
        return self.params.at(start, stop)

    def grad_at(self, start: int, stop: int) -> Tensor:
        """Return the main gradients of a range inside one bucket's owned range, gaps included; live."""
        return self.buffer.flat[self._in_buffer(start, stop)]

    def write_to_model(self, start: int, stop: int, values: Tensor) -> None:
        """Write new values to the model; others are quantized later (`QuantizedParams.quantize_to_model`)."""
        if isinstance(self.params, FlatParams):
            super().write_to_model(start, stop, values)

    def bucket_at(self, start: int) -> Bucket:
        """Return the bucket of an element of the flat state."""
        return self.layout.buckets[bisect.bisect_right(self._ends, start)]

    def _in_buffer(self, start: int, stop: int) -> slice:
        """Return the buffer range of [start, stop) of the flat state, which must be in one bucket."""
        in_buffer, in_state = self._ranges[bisect.bisect_right(self._ends, start)]
        assert in_state.start <= start and stop <= in_state.stop, (
            f"[{start}, {stop}) is in no single bucket of {self._ranges}"
        )
        return slice(in_buffer.start + start - in_state.start, in_buffer.start + stop - in_state.start)

    def _contiguous_parts(self) -> Iterator[list[ParamShard]]:
        """Group consecutive param shards of equal treatment within a bucket."""
        keyed = itertools.groupby(
            self.param_shards, key=lambda p: (bisect.bisect_right(self._ends, p.offset), p.group, p.is_counted)
        )
        return (list(parts) for _, parts in keyed)


def _param_shards(
    layout: FlatLayout,
    ranges: Sequence[tuple[int, int]],
    settings: OptimizerArgs,
    is_first_holder: bool,
    ps: ParallelState,
) -> list[ParamShard]:
    """Split this rank's range of every bucket into param shards."""
    parts, base = [], 0
    for bucket, (low, high) in zip(layout.buckets, ranges):
        for slot in bucket.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                group = get_param_group(slot.param, settings, ps.ep.size > 1)
                is_counted = is_first_holder and is_unique_replica(get_param_info(slot.param), ps)
                first, last = start - slot.start, stop - slot.start
                parts.append(ParamShard(slot, first, last, base + start - low, group, is_counted))
        base += high - low
    return parts
