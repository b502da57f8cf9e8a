"""Scales and values in the layouts of torch.nn.functional.scaled_mm (cuBLASLt).

| blocks | scales [R / rows, K / cols] become | format |
|---|---|---|
| 1 x 128 | column-major | fp32 |
| 128 x 128 | transposed, [K / 128 padded to a multiple of 4, R / 128], column-major | fp32 |
| 1 x 32 (MX) | swizzled tiles | E8M0 |
| 1 x 16 (NV) | swizzled tiles, and one fp32 number per matrix | E4M3 |

Tiles have 128 rows and 4 columns; row 32 q + l and column k are at 16 l + 4 q + k. Shape letters: R rows, K
contraction, B blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.quantization.quantize import E4M3, QuantizedTensor

TILE_ROWS, TILE_COLS, QUARTER = 128, 4, 32


def column_major(scales_RB: Tensor) -> Tensor:
    """Return the same scales in column-major storage."""
    return scales_RB.t().contiguous().t()


def block128_layout(scales: Tensor) -> Tensor:
    """Return scales of 128 x 128 blocks [R / 128, K / 128], padded and transposed."""
    return F.pad(scales, (0, -scales.shape[1] % TILE_COLS)).contiguous().t()  # also those of a transposed weight


def swizzle_scales(scales_RB: Tensor) -> Tensor:
    """Return scales in tiles, padded with ones, flat."""
    filled = F.pad(scales_RB, (0, -scales_RB.shape[1] % TILE_COLS, 0, -scales_RB.shape[0] % TILE_ROWS), value=1.0)
    tiles = filled.view(-1, TILE_ROWS // QUARTER, QUARTER, filled.shape[1] // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def split_two_level(inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Split inverse scales into E4M3 numbers (in fp32) and one fp32 factor; the largest is E4M3's maximum."""
    largest = inverse.amax()
    whole = torch.where(largest == 0, torch.ones_like(largest), largest / E4M3.max)
    return (inverse / whole).to(E4M3.dtype).float(), whole


def pack_e2m1(values_RK: Tensor) -> Tensor:
    """Pack values on E2M1's grid into bytes, two per byte, the first in the lower half: [R, K / 2]."""
    size = values_RK.abs()
    code = torch.where(size <= 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).nan_to_num().to(torch.uint8)
    code |= torch.signbit(values_RK).to(torch.uint8) << 3
    return (code[:, 0::2] | code[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def pad_to_multiple(x: QuantizedTensor, row_multiple: int, col_multiple: int) -> QuantizedTensor:
    """Pad with zeros to multiples, in the format's one-byte dtype (E2M1: fp32, or packed if nothing is missing)."""
    if x.is_packed:
        if not (x.values.shape[0] % row_multiple or 2 * x.values.shape[1] % col_multiple):
            return x
        x = x.unpacked()
    rows, cols = -x.values.shape[0] % row_multiple, -x.values.shape[1] % col_multiple
    fmt = x.scaling.fmt
    values = x.values if fmt.dtype is None else x.values.to(fmt.dtype)
    if rows or cols:
        filled = F.pad(values if fmt.dtype is None else values.view(torch.uint8), (0, cols, 0, rows))
        values = filled if fmt.dtype is None else filled.view(fmt.dtype)
    inverse = x.inverse
    if not x.scaling.per_tensor:
        missing = [
            -(-size // block) - have
            for size, block, have in zip(values.shape, (x.scaling.rows, x.scaling.cols), inverse.shape)
        ]
        inverse = F.pad(inverse, (0, missing[1], 0, missing[0]), value=0.0 if fmt.dtype is None else 1.0)
    return QuantizedTensor(values, inverse, x.scaling)
