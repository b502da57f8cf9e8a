"""MXFP8 rows for communication: an E4M3 byte per element and an E8M0 byte per 32 elements.

They travel as one row of bytes (`pack`), or as two tables for libraries that send elements of one byte and an fp32
scale for 128 of them (`split`): four E8M0 bytes take the place of one such scale. Libraries copy them bit by bit.

A row is rounded by itself, so the result does not depend on the rank that packs it, and packing unpacked rows is exact.
bf16 and fp32 represent all values exactly.

Shape letters: R rows, H width.
"""

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling, expand_scales, quantize

ROW_SCALING = Scaling(E4M3, 1, 32, POWER_OF_TWO)
_SCALES = torch.float8_e8m0fnu  # exponent + 127, NaN as 255: scales are powers of two, which it holds exactly


def row_nbytes(width: int) -> int:
    """Return the number of bytes of a packed row."""
    return width + -(-width // ROW_SCALING.cols)


def pack(x_RH: Tensor) -> Tensor:
    """Round rows to MXFP8 and return them as uint8 [R, row_nbytes(H)]."""
    return torch.cat([table.view(torch.uint8) for table in _tables(x_RH)], 1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the values [R, width] of packed rows."""
    return _values(packed[:, :width].contiguous().view(E4M3.dtype), packed[:, width:].contiguous(), dtype)


def split(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to MXFP8; return E4M3 elements [R, H] and scales, fp32 with the bits of four E8M0, [R, H / 128]."""
    values, scales = _tables(x_RH)
    return values, scales.view(torch.float32)


def join(values_RH: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [R, H] of the tables of `split`."""
    return _values(values_RH, scales, dtype)


def round_to_mxfp8(x_RH: Tensor) -> Tensor:
    """Return rows rounded as by pack and unpack."""
    return quantize(x_RH, ROW_SCALING).dequantized().to(x_RH.dtype)


def _tables(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    rounded = quantize(x_RH, ROW_SCALING)
    return rounded.values.float().to(E4M3.dtype), rounded.inverse.to(_SCALES)


def _values(values_RH: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    inverse = scales.view(_SCALES).float()
    return (values_RH.float() * expand_scales(inverse, ROW_SCALING, values_RH.shape)).to(dtype)
