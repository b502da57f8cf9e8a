"""MXFP8 rows packed into bytes for communication: an E4M3 byte per element, then an E8M0 byte per 32 elements.

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
    rounded = quantize(x_RH, ROW_SCALING)
    return torch.cat(
        [rounded.values.float().to(E4M3.dtype).view(torch.uint8), rounded.inverse.to(_SCALES).view(torch.uint8)], 1
    )


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the values [R, width] of packed rows."""
    inverse = packed[:, width:].contiguous().view(_SCALES).float()
    values = packed[:, :width].contiguous().view(E4M3.dtype).float()
    return (values * expand_scales(inverse, ROW_SCALING, values.shape)).to(dtype)


def round_to_mxfp8(x_RH: Tensor) -> Tensor:
    """Return rows rounded as by pack and unpack."""
    return quantize(x_RH, ROW_SCALING).dequantized().to(x_RH.dtype)
