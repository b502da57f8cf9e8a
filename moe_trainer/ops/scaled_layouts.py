"""Scales and values of quantised matrices in the order in which devices read them (torch.nn.functional.scaled_mm, cuBLASLt).

| blocks | scales [R / rows, K / cols] become | format |
|---|---|---|
| 1 x 128 | the same, stored column by column | fp32 |
| 128 x 128 | transposed, [K / 128 filled up to 4, R / 128], stored column by column | fp32 |
| 1 x 32 (MX) | tiles | E8M0 |
| 1 x 16 (NV) | tiles, and one fp32 number for the matrix | E4M3 |

Tiles: 128 rows by 4 columns each, filled up, one behind the other along a row of tiles; in a tile row 32 q + l and column k stand at
16 l + 4 q + k, so that what 32 threads read first lies together.

Shape letters: R rows, K contraction dimension, B blocks along it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.quantize import E4M3, Quantized

TILE_ROWS, TILE_COLS, QUARTER = 128, 4, 32


def by_columns(scales_RB: Tensor) -> Tensor:
    """The same scales, stored column by column."""
    return scales_RB.t().contiguous().t()


def of_squares(scales: Tensor) -> Tensor:
    """Scales of 128 x 128 blocks [R / 128, K / 128], transposed."""
    return F.pad(scales, (0, -scales.shape[1] % TILE_COLS)).t()


def in_tiles(scales_RB: Tensor) -> Tensor:
    """Scales in tiles, filled up with ones; flat."""
    filled = F.pad(scales_RB, (0, -scales_RB.shape[1] % TILE_COLS, 0, -scales_RB.shape[0] % TILE_ROWS), value=1.0)
    tiles = filled.view(-1, TILE_ROWS // QUARTER, QUARTER, filled.shape[1] // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def two_levels(inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse scales as E4M3 numbers, still in fp32, and the fp32 number that all are multiplied by: the largest is E4M3's largest."""
    largest = inverse.amax()
    whole = torch.where(largest == 0, torch.ones_like(largest), largest / E4M3.max)
    return (inverse / whole).to(E4M3.dtype).float(), whole


def packed(values_RK: Tensor) -> Tensor:
    """Numbers on E2M1's grid, two in a byte, the first one in the lower half. Returns: [R, K / 2] in torch's dtype of such pairs."""
    size = values_RK.abs()
    code = torch.where(size <= 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).nan_to_num().to(torch.uint8)
    code |= torch.signbit(values_RK).to(torch.uint8) << 3
    return (code[:, 0::2] | code[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def filled_up(x: Quantized, row_multiple: int, col_multiple: int) -> Quantized:
    """The same in its format's own dtype of a byte (E2M1: in fp32), with rows and columns of zeros up to multiples."""
    rows, cols = -x.values.shape[0] % row_multiple, -x.values.shape[1] % col_multiple
    fmt = x.scaling.fmt
    values = x.values if fmt.dtype is None else x.values.to(fmt.dtype)
    if rows or cols:
        filled = F.pad(values if fmt.dtype is None else values.view(torch.uint8), (0, cols, 0, rows))
        values = filled if fmt.dtype is None else filled.view(fmt.dtype)
    inverse = x.inverse
    if not x.scaling.per_tensor:
        missing = [-(-size // block) - have for size, block, have in
                   zip(values.shape, (x.scaling.rows, x.scaling.cols), inverse.shape)]
        inverse = F.pad(inverse, (0, missing[1], 0, missing[0]), value=0.0 if fmt.dtype is None else 1.0)
    return Quantized(values, inverse, x.scaling)
