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
    """Return scales in tiles, padded with ones, flat; of a stack [..., R, B] for each matrix."""
    one = 127 if scales_RB.dtype == torch.uint8 else 1.0  # bytes of E8M0
    rows, cols = -scales_RB.shape[-2] % TILE_ROWS, -scales_RB.shape[-1] % TILE_COLS
    filled = F.pad(scales_RB, (0, cols, 0, rows), value=one)
    tiles = filled.unflatten(-1, (-1, TILE_COLS)).unflatten(-3, (-1, TILE_ROWS // QUARTER, QUARTER))
    return tiles.transpose(-4, -2).flatten(-5)


def swizzle_e8m0(scales_RB: Tensor) -> Tensor:
    """Return powers of two in tiles as swizzle_scales does, in E8M0."""
    return swizzle_scales(scales_RB.to(torch.float8_e8m0fnu).view(torch.uint8)).view(torch.float8_e8m0fnu)


def swizzle_e8m0_of_groups(scales_RB: Tensor, ends_e: Tensor) -> Tensor:
    """Return powers of two in tiles, one group of columns after the other, in E8M0.

    Args:
        ends_e: int32, the end of each group in tiles of TILE_COLS columns. The columns after the last group follow it.
    """
    tiles = (
        swizzle_e8m0(scales_RB).view(torch.uint8).view(-(-scales_RB.shape[0] // TILE_ROWS), -1, TILE_ROWS * TILE_COLS)
    )
    num_rows, num_columns = tiles.shape[:2]
    column_T = torch.arange(num_columns, dtype=ends_e.dtype, device=ends_e.device)
    group_T = torch.searchsorted(ends_e, column_T, right=True)
    ends = F.pad(ends_e, (0, 1), value=num_columns)
    start_T, size_T = F.pad(ends, (1, 0))[group_T], ends.diff(prepend=ends.new_zeros(1))[group_T]
    row = torch.arange(num_rows, device=ends_e.device)[:, None]
    place = start_T * num_rows + row * size_T + (column_T - start_T)
    flat = tiles.flatten(0, 1)
    return torch.empty_like(flat).index_copy_(0, place.flatten(), flat).view(torch.float8_e8m0fnu)


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
    values = x.values if fmt.is_packed else x.values.to(fmt.dtype)
    if rows or cols:
        filled = F.pad(values if fmt.is_packed else values.view(torch.uint8), (0, cols, 0, rows))
        values = filled if fmt.is_packed else filled.view(fmt.dtype)
    inverse = x.inverse
    if not x.scaling.per_tensor:
        missing = [
            -(-size // block) - have
            for size, block, have in zip(values.shape, (x.scaling.rows, x.scaling.cols), inverse.shape)
        ]
        inverse = F.pad(inverse, (0, missing[1], 0, missing[0]), value=0.0 if fmt.is_packed else 1.0)
    return QuantizedTensor(values, inverse, x.scaling)
