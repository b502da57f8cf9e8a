"""Rows in MXFP8 as bytes that can travel: one E4M3 byte an element, one E8M0 byte for every 32 elements of a row, a row after the other.

Only a row itself decides how it is rounded, so it does not matter who packs it, in which company, and how often: numbers that have been
unpacked pack into themselves. bf16 and fp32 hold them exactly.

Shape letters: R rows, H width.
"""

import torch
from torch import Tensor

from moe_trainer.ops.quantize import E4M3, POWER_OF_TWO, Scaling, quantize, spread

ROWS = Scaling(E4M3, 1, 32, POWER_OF_TWO)
_SCALES = torch.float8_e8m0fnu  # exponent + 127, NaN as 255: scales are powers of two, which it holds exactly


def packed_width(width: int) -> int:
    """Bytes of a row."""
    return width + -(-width // ROWS.cols)


def pack(x_RH: Tensor) -> Tensor:
    """Round rows to MXFP8. Returns: uint8 [R, packed_width(H)]."""
    rounded = quantize(x_RH, ROWS)
    return torch.cat([rounded.values.float().to(E4M3.dtype).view(torch.uint8), rounded.inverse.to(_SCALES).view(torch.uint8)], 1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The numbers of packed rows. Returns: [R, width]."""
    inverse = packed[:, width:].contiguous().view(_SCALES).float()
    values = packed[:, :width].contiguous().view(E4M3.dtype).float()
    return (values * spread(inverse, ROWS, values.shape)).to(dtype)


def rounded(x_RH: Tensor) -> Tensor:
    """What pack and unpack make of rows, without the bytes."""
    return quantize(x_RH, ROWS).dequantized().to(x_RH.dtype)
