"""MXFP8 parameters, gathered through the memory of the gradients (--reuse-grad-buf-for-mxfp8-param-ag).

A block's scale belongs to one direction, so a shard of a weight does not determine the bytes of both directions. After
a step every rank writes its shard in the model's format into the gradient buffer, whose contents are used up, and
gathers there. Once a bucket has arrived, its weights are quantized by rows and by columns (quantization/mx_weight.py)
and its part of the buffer is cleared. So no weight is held in the model's format, and GEMMs quantize none.

With overlap the gathers run during the next forward; the first gradient waits for all of them
(DataParallelGrads.before_accumulation).
"""

from collections.abc import Collection

import torch
from torch import Tensor

from moe_trainer.optim.buckets import Bucket, FlatLayout
from moe_trainer.optim.optimizer_shard import OptimizerShard
from moe_trainer.optim.quantized_params import QuantizedParams


class MxParams(QuantizedParams):
    """MXFP8 copies of all parameters of a layout.

    Args:
        gradients: the flat gradients of the layout.
    """

    def __init__(self, shard: OptimizerShard, layout: FlatLayout, size: int, gradients: Tensor):
        if layout.dtype.itemsize > gradients.itemsize:  # verification in fp64 accumulates in fp32
            self.gather_buffer = layout.allocate(layout.dtype)
        else:
            self.gather_buffer = gradients.view(layout.dtype)[: layout.size]
        self.finish_gather = self._cast
        super().__init__(shard, layout, size)

    @torch.no_grad()
    def quantize_to_model(self, buckets: Collection[Bucket]) -> None:
        """Write this rank's shard of these buckets into the gather buffer."""
        slots = {slot: None for bucket in buckets for slot in bucket.slots}
        for slot, main, start, stop, first in self._ranges(slots):
            at = slot.start + first
            self.gather_buffer[at : at + stop - start].copy_(main.load_fp32(start, stop))

    @torch.no_grad()
    def _cast(self, bucket: Bucket) -> None:
        """Quantize the parameters of a bucket, and clear its part of the gradients."""
        for slot in bucket.slots:
            slot.stored_weight.cast(self.gather_buffer[slot.start : slot.stop])
        self.gather_buffer[bucket.start : bucket.stop].zero_()
