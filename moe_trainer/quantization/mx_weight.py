"""Model weights stored in MXFP8, by rows and by columns (--reuse-grad-buf-for-mxfp8-param-ag).

Blocks lie along the contracted dimension, so the output and the input gradient need different bytes. Both are made from
the weight in the model's format, once per iteration, and equal what a GEMM would make of it.

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width, B blocks of a row.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import QuantizedTensor, Scaling
from moe_trainer.quantization.stored_weight import PORTION_CPU, PORTION_GPU, ScaleFn, StoredWeight

_SCALES = torch.float8_e8m0fnu  # exponent + 127, NaN as 255: scales are powers of two, which it holds exactly


class MxCopy(NamedTuple):
    """A matrix in one direction, or a stack of them: bytes [.., R, C] and E8M0 scales [.., R, B]."""

    codes: Tensor
    scales: Tensor


class MxMatrix(NamedTuple):
    """One weight: [N, K] with blocks along K, and [K, N] with blocks along N."""

    rows: MxCopy
    columns: MxCopy

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, N and K."""
        return self.rows.codes.shape

    @property
    def amax(self) -> Tensor:
        """Not recorded: scales do not depend on the past."""
        raise NotImplementedError("MXFP8 has no delayed scaling")

    def operand(self, scaling: Scaling, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        """Return the matrix as an operand of a GEMM of values in `dtype`."""
        codes, scales = self.columns if transposed else self.rows
        values = codes.view(scaling.fmt.dtype)
        return QuantizedTensor(
            values.double() if dtype == torch.float64 else values, scales.view(_SCALES).float(), scaling
        )


class MxWeight(StoredWeight):
    """Both copies of a weight."""

    def __init__(
        self,
        shape: torch.Size,
        scaling: Scaling,
        device: torch.device,
        quantizer: Callable[[Tensor, Scaling], QuantizedTensor],
    ):
        """Allocate the copies; `quantizer` is as in QuantizedGemms."""
        super().__init__(shape, scaling, device)
        self._quantizer = quantizer
        self._rows, self._columns = self._allocate(self.height, self.width), self._allocate(self.width, self.height)

    @classmethod
    def for_param(
        cls, param: Tensor, scaling: Scaling, quantizer: Callable[[Tensor, Scaling], QuantizedTensor], scale_fn: ScaleFn
    ) -> "MxWeight":
        return cls(param.shape, scaling, param.device, quantizer)

    def _allocate(self, rows: int, cols: int) -> MxCopy:
        sizes = (cols, -(-cols // self.scaling.cols))
        return MxCopy(
            *(torch.zeros(self.num_matrices, rows, size, dtype=torch.uint8, device=self.device) for size in sizes)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            f" ({side} {name})": x
            for side, copy in (("row", self._rows), ("column", self._columns))
            for name, x in copy._asdict().items()
        }

    def __getitem__(self, index: int) -> MxMatrix:
        return MxMatrix(*(MxCopy(*(x[index] for x in copy)) for copy in (self._rows, self._columns)))

    @torch.no_grad()
    def cast(self, values: Tensor) -> None:
        """Quantize all values of the parameter, flat, in the model's format."""
        matrices = values.view(self._rows.codes.shape)
        for copy, source in ((self._rows, matrices), (self._columns, matrices.transpose(1, 2))):
            for at in _portions(source):
                # rows are independent, so several matrices are one tall one
                part = source[at]
                tall = part[0] if part.shape[0] == 1 else part.reshape(-1, part.shape[2])
                quantized = self._quantizer(tall, self.scaling)
                for target, quantized_part in (
                    (copy.codes[at], quantized.values.to(self.scaling.fmt.dtype)),
                    (copy.scales[at], quantized.inverse.to(_SCALES)),
                ):
                    target.copy_(quantized_part.view(torch.uint8).view(target.shape))


def _portions(source: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of matrices and of rows that are quantized at once: full matrices, or rows of one."""
    count, rows, cols = source.shape
    limit = max(1, (PORTION_CPU if source.device.type == "cpu" else PORTION_GPU) // max(1, cols))
    together, height = max(1, limit // max(1, rows)), min(rows, limit)
    for first in range(0, count, together):
        for low in range(0, rows, max(1, height)):
            yield slice(first, min(count, first + together)), slice(low, min(rows, low + height))
