"""MXFP8 rows for communication: an E4M3 byte per element and an E8M0 byte per 32 elements.

They travel as one row of bytes (`pack`), or as two tables for libraries that send elements of one byte and an fp32
scale for 128 of them (`split`): four E8M0 bytes take the place of one such scale. Libraries copy them bit by bit.

A row is rounded by itself, so the result does not depend on the rank that packs it, and packing unpacked rows is exact.
bf16 and fp32 represent all values exactly.

Shape letters: R rows, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling, expand_scales, quantize

ROW_SCALING = Scaling(E4M3, 1, 32, POWER_OF_TWO)
_SCALES = torch.float8_e8m0fnu  # exponent + 127, NaN as 255: scales are powers of two, which it holds exactly


def row_nbytes(width: int) -> int:
    """Return the number of bytes of a packed row."""
    return width + -(-width // ROW_SCALING.cols)


def _quantize(x_RH: Tensor, values: Tensor, exponents: Tensor) -> None:
    rounded = quantize(x_RH, ROW_SCALING)
    values.copy_(rounded.values.float().to(E4M3.dtype).view(torch.uint8))
    exponents.copy_(rounded.inverse.to(_SCALES).view(torch.uint8))


def _dequantize(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    values_RH = values.contiguous().view(E4M3.dtype).float()
    inverse = exponents.contiguous().view(_SCALES).float()
    return (values_RH * expand_scales(inverse, ROW_SCALING, values_RH.shape)).to(dtype)


@dataclass(frozen=True)
class RowCasts:
    """How rows are cast to MXFP8 and back: plain torch, or kernels (triton_quantize.py) with the same bytes.

    Attributes:
        quantize: write the bytes of rows [R, H] to tables of uint8, the values [R, H] and exponents [R, ceil(H / 32)].
        dequantize: return the rows of both tables in a dtype. Rows of the tables may have any distance.
    """

    quantize: Callable[[Tensor, Tensor, Tensor], None] = _quantize
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor] = _dequantize

    def pack(self, x_RH: Tensor) -> Tensor:
        """Round rows to MXFP8 and return them as uint8 [R, row_nbytes(H)]."""
        num_rows, width = x_RH.shape
        packed = torch.empty(num_rows, row_nbytes(width), dtype=torch.uint8, device=x_RH.device)
        self.quantize(x_RH, packed[:, :width], packed[:, width:])
        return packed

    def unpack(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the values [R, width] of packed rows."""
        return self.dequantize(packed[:, :width], packed[:, width:], dtype)

    def split(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows to MXFP8.

        Returns:
            E4M3 elements [R, H]; scales, fp32 with the bits of four E8M0, [R, H / 128].
        """
        values, exponents = self._tables(x_RH)
        return values.view(E4M3.dtype), exponents.view(torch.float32)

    def join(self, values_RH: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows [R, H] of the tables of `split`."""
        return self.dequantize(values_RH.view(torch.uint8), scales.view(torch.uint8), dtype)

    def round(self, x_RH: Tensor) -> Tensor:
        """Return rows rounded as by pack and unpack."""
        return self.dequantize(*self._tables(x_RH), x_RH.dtype)

    def _tables(self, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, width = x_RH.shape
        values = torch.empty(num_rows, width, dtype=torch.uint8, device=x_RH.device)
        exponents = values.new_empty(num_rows, row_nbytes(width) - width)
        self.quantize(x_RH, values, exponents)
        return values, exponents


TORCH_ROW_CASTS = RowCasts()
