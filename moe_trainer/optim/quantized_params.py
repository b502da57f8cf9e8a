"""Parameters that the model stores quantized only (arguments/stored_weights.py).

The fp32 main parameters of a rank's shard are the only values; every rank has the bytes of all shards. After a step
`quantize_to_model` casts the shard directly: maximum magnitudes of the shard, their maximum over the ranks that hold
the other shards (one all-reduce of a number per block or per matrix), cast. The bytes are then gathered like any
parameters (distributed_optimizer.py). Scales are not gathered: all ranks compute them from the same maxima
(quantization/stored_weight.py). Those that are stored twice are gathered in the model's format: mx_params.py.

Other code reads the values through the parameter's accessor, in the parameter's own dtype, rounded from the main
parameters, so checkpoints and exports do not depend on how weights are stored. Loading exposes this rank's shard in
that dtype (`loadable`); the optimizer then takes the main parameters from it, unless they were loaded themselves.
"""

import bisect
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.optim.buckets import Bucket, FlatLayout, Slot
from moe_trainer.optim.optimizer_shard import OptimizerShard, ParamShard
from moe_trainer.optim.state_storage import MainParams, copy_to
from moe_trainer.parallel import collectives
from moe_trainer.quantization.stored_weight import SingleCopyWeight


class QuantizedParams(ABC):
    """All parameters of a layout, which the model stores in fewer bits, with their values in a shard's main parameters.

    Args:
        size: elements of the shard's flat state.

    Attributes:
        gather_buffer: what data-parallel ranks gather, flat.
        finish_gather: completes the parameters of a bucket after its all-gather, if anything is left to do.
    """

    gather_buffer: Tensor
    finish_gather: Callable[[Bucket], None] | None = None

    def __init__(self, shard: OptimizerShard, layout: FlatLayout, size: int):
        self._shard, self._layout, self._size = shard, layout, size
        self._loadable: Tensor | None = None
        self._offsets = [part.offset for part in shard.param_shards]
        local = {part.slot: part for part in shard.param_shards}
        for slot in layout.slots:
            slot.stored_weight.main_param_owner = MainParamAccessor(self, slot, local.get(slot))
            slot.param.data = slot.stored_weight.placeholder_param(layout.dtype)

    @property
    def has_external_scales(self) -> bool:
        """Whether scales, and with them the bytes, may change without an update (delayed scaling)."""
        return any(slot.stored_weight.scale_fn() is not None for slot in self._layout.slots)

    @abstractmethod
    def quantize_to_model(self, buckets: Collection[Bucket]) -> None:
        """Fill this rank's part of these buckets from the main parameters. Collective over the layout's group."""

    def values(self, start: int, stop: int) -> Tensor:
        """Return a copy of the main parameters of a range of the flat state, in the parameters' dtype."""
        values = torch.empty(stop - start, dtype=self._layout.dtype, device=self._layout.device)
        for block in self._shard.blocks:
            low, high = max(start, block.start), min(stop, block.stop)
            if low < high:
                values[low - start : high - start] = block.main.read_fp32(low, high)
        return values

    def full_tensor(self, slot: Slot, part: ParamShard | None) -> Tensor:
        """Return all values of a parameter on every rank. Collective over the layout's group."""
        values = torch.zeros(slot.param.numel(), dtype=self._layout.dtype, device=self._layout.device)
        if part is not None:
            values[part.start : part.stop] = self.values(part.offset, part.end)
        return collectives.all_reduce(values, self._layout.group).view(slot.param.shape)

    def loadable(self) -> Tensor:
        """Return the values of the flat state, to be overwritten in place, until `finish_load`."""
        if self._loadable is None:
            self._loadable = self.values(0, self._size)
        return self._loadable

    def at(self, start: int, stop: int) -> Tensor:
        """Return a range of what `loadable` returns."""
        return self.loadable()[start:stop]

    def finish_load(self) -> None:
        """Drop the copy that `loadable` returned."""
        self._loadable = None

    def _ranges(self, slots: Collection[Slot]) -> Iterator[tuple[Slot, MainParams, int, int, int]]:
        """Iterate over the parts of update segments by parameter.

        Yields:
            (slot, main parameters, start and stop in the flat state, start in the parameter).
        """
        parts = self._shard.param_shards
        for segment in self._shard.update_segments:
            main = segment.state.main
            for part in parts[max(0, bisect.bisect_right(self._offsets, segment.start) - 1) :]:
                if part.offset >= segment.stop:
                    break
                start, stop = max(part.offset, segment.start), min(part.end, segment.stop)
                if start < stop and part.slot in slots:
                    yield part.slot, main, start, stop, part.start + start - part.offset


class SingleCopyParams(QuantizedParams):
    """Quantized bytes of all parameters of a layout, made from the main parameters of a shard."""

    def __init__(self, shard: OptimizerShard, layout: FlatLayout, size: int):
        weights: list[SingleCopyWeight] = [slot.stored_weight for slot in layout.slots]
        per_byte = weights[0].elements_per_byte
        self.gather_buffer = torch.zeros(layout.size // per_byte, dtype=torch.uint8, device=layout.device)
        sizes = [weight.num_blocks for weight in weights]
        self._amax = dict(zip(layout.slots, torch.zeros(sum(sizes), device=layout.device).split(sizes)))
        for slot, weight in zip(layout.slots, weights):
            codes = self.gather_buffer[slot.start // per_byte : slot.stop // per_byte]
            weight.bind(codes, self._amax[slot])
        super().__init__(shard, layout, size)

    @torch.no_grad()
    def quantize_to_model(self, buckets: Collection[Bucket]) -> None:
        """Compute this rank's bytes and all scales of these buckets. Collective over the layout's group."""
        device, slots = self._layout.device, {slot: None for bucket in buckets for slot in bucket.slots}
        if not slots:
            return
        maxima = [self._amax[slot] for slot in slots]
        torch._foreach_zero_(maxima)
        for slot, main, start, stop, first in self._ranges(slots):
            slot.stored_weight.update_amax(copy_to(main.load_fp32(start, stop), device), first)
        together = collectives.all_reduce(torch.cat(maxima), self._layout.group, "max")
        torch._foreach_copy_(maxima, together.split([amax.numel() for amax in maxima]))
        for slot in slots:
            slot.stored_weight.compute_scales()
        for slot, main, start, stop, first in self._ranges(slots):
            slot.stored_weight.cast(copy_to(main.load_fp32(start, stop), device), first)


@dataclass(frozen=True, eq=False)
class MainParamAccessor:
    """Access to the values of one quantized parameter (parallel/shards.py).

    Args:
        part: this rank's shard of it, if any.
    """

    params: QuantizedParams
    slot: Slot
    part: ParamShard | None

    def full_tensor(self) -> Tensor:
        """Return all values on every rank, in the parameter's dtype. Collective over the ranks that hold shards."""
        return self.params.full_tensor(self.slot, self.part)

    def shards_to_save(self) -> list[tuple[Tensor, int, int, Callable[[int, int], Tensor]]]:
        """Return shape and dtype (device "meta"), range, and a function that reads a range counted from its start."""
        if self.part is None:
            return []
        shape = torch.empty(self.part.stop - self.part.start, dtype=self.slot.param.dtype, device="meta")
        read = functools.partial(_read, self.params, self.part.offset)
        return [(shape, self.part.start, self.part.stop, read)]

    def shards_to_load(self) -> list[tuple[Tensor, int, int]]:
        """Return live storage to be filled, and its range."""
        if self.part is None:
            return []
        return [(self.params.loadable()[self.part.offset : self.part.end], self.part.start, self.part.stop)]


def _read(params: QuantizedParams, base: int, start: int, stop: int) -> Tensor:
    return params.values(base + start, base + stop)
