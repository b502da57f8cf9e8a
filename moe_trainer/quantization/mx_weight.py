"""Model weights stored in MXFP8, by rows and by columns, and in no other form (--reuse-grad-buf-for-mxfp8-param-ag).

Blocks lie along the contracted dimension, so the output and the input gradient need different bytes. Both are made from
the weight in the model's format, once per iteration, and equal what a GEMM would make of it. The parameter itself is a
NaN placeholder, as in fp8_weight.py.

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width, B blocks of a row.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.fp8_weight import PORTION_CPU, PORTION_GPU, nan_placeholder
from moe_trainer.quantization.quantize import POWER_OF_TWO, QuantizedTensor, Scaling

_SCALES = torch.float8_e8m0fnu  # exponent + 127, NaN as 255: scales are powers of two, which it holds exactly


def is_mx(scaling: Scaling) -> bool:
    """Return whether a weight's blocks lie along one dimension and have power-of-two scales."""
    return scaling.rows == 1 and scaling.scales == POWER_OF_TWO and scaling.fmt.dtype is not None


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


class MxWeight:
    """Both copies of one parameter [N, K], or of a stack of experts [e, N, K].

    Attributes:
        home: the owner of the fp32 values, set by the optimizer.
    """

    elements_per_byte = 1

    def __init__(
        self,
        shape: torch.Size,
        scaling: Scaling,
        device: torch.device,
        quantizer: Callable[[Tensor, Scaling], QuantizedTensor],
    ):
        """Allocate the copies.

        Args:
            quantizer: as QuantizedGemms has it.
        """
        self.shape, self.scaling, self._quantizer = shape, scaling, quantizer
        self.home: Any = None
        count, height, width = (shape[0] if len(shape) == 3 else 1), *shape[-2:]

        def allocate(rows: int, cols: int) -> MxCopy:
            sizes = (cols, -(-cols // scaling.cols))
            return MxCopy(*(torch.zeros(count, rows, size, dtype=torch.uint8, device=device) for size in sizes))

        self._rows, self._columns = allocate(height, width), allocate(width, height)

    def placeholder_param(self, dtype: torch.dtype) -> Tensor:
        """Return the data of the parameter: its shape over a single NaN."""
        return nan_placeholder(self.shape, dtype, self._rows.codes.device)

    def scale_fn(self) -> None:
        """Return None: the scales follow from the values."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored, by name; the first dimension counts matrices."""
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
                for target, found in (
                    (copy.codes[at], quantized.values.to(self.scaling.fmt.dtype)),
                    (copy.scales[at], quantized.inverse.to(_SCALES)),
                ):
                    target.copy_(found.view(torch.uint8).view(target.shape))


def _portions(source: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of matrices and of rows that are quantized at once: full matrices, or rows of one."""
    count, rows, cols = source.shape
    limit = max(1, (PORTION_CPU if source.device.type == "cpu" else PORTION_GPU) // max(1, cols))
    together, height = max(1, limit // max(1, rows)), min(rows, limit)
    for first in range(0, count, together):
        for low in range(0, rows, max(1, height)):
            yield slice(first, min(count, first + together)), slice(low, min(rows, low + height))
