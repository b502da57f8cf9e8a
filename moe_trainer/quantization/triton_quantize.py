"""Triton kernels that quantize a matrix to fp8 in one pass, block maximum, scale, rounded bytes, and dequantize it.

The results equal those of quantize.py bit for bit; values leave as bytes of the format. Rounding is arithmetic (adding
and subtracting 1.5 * 2^23 steps), not a conversion instruction: it gives the same bytes on devices without fp8 and in
Triton's interpreter, whose conversions truncate. Matrices may have any strides, so a transposed view needs no copy.

Shapes: R rows, K contraction dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.triton_blocks import block_size, num_warps_for
from moe_trainer.quantization.mxfp8_rowwise import ROW_SCALING, TORCH_ROW_CASTS, RowCasts
from moe_trainer.quantization.quantize import (
    POWER_OF_TWO,
    TWO_LEVEL,
    NumberFormat,
    QuantizedTensor,
    Scaling,
    compute_scale,
)
from moe_trainer.quantization.quantize import quantize as define


@triton.jit
def _not_finite(size):
    """Return 1 for NaN and for absolute values beyond fp32's maximum."""
    return (~(size <= 3.4028234663852886e38)).to(tl.int32)


@triton.jit
def _finite_scale(amax, is_bad, FORMAT: tl.constexpr, POWER: tl.constexpr):
    """Return the format's maximum over amax as compute_scale does: 1 for zeros, NaN if not finite."""
    # torch divides a number by a tensor this way: a rounded reciprocal, then a GEMM
    scale = tl.minimum(
        tl.div_rn(tl.zeros_like(amax) + 1.0, tl.where(amax == 0.0, 1.0, amax)) * FORMAT[0], 3.4028234663852886e38
    )
    if POWER:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    return tl.where(is_bad, float("nan"), scale)


@triton.jit
def _byte(value, FORMAT: tl.constexpr):
    """Round an fp32 number to the nearest byte of a format, see `_format`."""
    FMAX: tl.constexpr = FORMAT[0]
    MANTISSA: tl.constexpr = FORMAT[1]
    LEAST: tl.constexpr = FORMAT[2]
    is_nan = value != value
    value = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, value), -FMAX), FMAX)
    power = ((value.to(tl.int32, bitcast=True)) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, LEAST) * (1.0 / (1 << MANTISSA))
    magic = step * 12582912.0
    rounded = tl.abs((value + magic) - magic)
    bits = rounded.to(tl.int32, bitcast=True)
    # the exponent's bias goes from 127 to 1 - log2(LEAST): that of the bits of LEAST, less one
    least_bits = (tl.zeros_like(rounded) + LEAST).to(tl.int32, bitcast=True)
    normal = ((bits - least_bits) >> (23 - MANTISSA)) + (1 << MANTISSA)
    subnormal = (rounded * ((1 << MANTISSA) / LEAST)).to(tl.int32)
    code = tl.where(rounded < LEAST, subnormal, normal)
    code = tl.where(value.to(tl.int32, bitcast=True) < 0, code | 0x80, code)
    return tl.where(is_nan, 0x7F, code).to(tl.uint8)


@triton.jit
def _number(byte, FORMAT: tl.constexpr):
    """Return the fp32 number of a byte of `_byte`."""
    MANTISSA: tl.constexpr = FORMAT[1]
    LEAST: tl.constexpr = FORMAT[2]
    code = byte.to(tl.int32) & 0x7F
    least_bits = (tl.zeros_like(code).to(tl.float32) + LEAST).to(tl.int32, bitcast=True)
    normal = (((code - (1 << MANTISSA)) << (23 - MANTISSA)) + least_bits).to(tl.float32, bitcast=True)
    size = tl.where(code < (1 << MANTISSA), code.to(tl.float32) * (LEAST / (1 << MANTISSA)), normal)
    size = tl.where(code == 0x7F, float("nan"), size)
    sign = (byte.to(tl.int32) & 0x80) << 24  # of zeros, too
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of this program: rows, their places in a contiguous matrix, which of them there are, and the numbers in fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = x + row[:, None] * stride_r + column[None, :].to(tl.int64) * stride_k
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return row, row[:, None] * num_columns + column[None, :], inside, value


@triton.jit
def _row_scales(value, FORMAT: tl.constexpr, POWER: tl.constexpr, SQUARE: tl.constexpr):
    """Return the scale of each row of a tile, the same for all if it is one block (SQUARE)."""
    size = tl.abs(value)
    bad = _not_finite(size)
    amax, is_bad = tl.max(size, 1), tl.max(bad, 1)
    if SQUARE:
        amax, is_bad = tl.zeros_like(amax) + tl.max(amax, 0), tl.zeros_like(is_bad) + tl.max(is_bad, 0)
    return _finite_scale(amax, is_bad > 0, FORMAT, POWER)


@triton.jit
def block_kernel(
    x,
    out,
    inverse,
    num_rows,
    num_columns,
    stride_r,
    stride_k,
    FORMAT: tl.constexpr,
    POWER: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize ROWS x COLUMNS numbers: one block (SQUARE), or ROWS blocks of one row each."""
    row, place, inside, value = _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS, COLUMNS)
    scale = _row_scales(value, FORMAT, POWER, SQUARE)
    byte = _byte(value * scale[:, None], FORMAT)
    tl.store(out + place, byte, mask=inside)
    inverse_scale = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    if SQUARE:
        first = tl.arange(0, ROWS) == 0
        block = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(inverse + block + tl.arange(0, ROWS), inverse_scale, mask=first)
    else:
        tl.store(inverse + row * tl.num_programs(1) + tl.program_id(1), inverse_scale, mask=row < num_rows)


@triton.jit
def _store_blocks(value, out, inverse, num_rows, num_columns, row, column, FORMAT, POWER, BLOCK, ROWS, COLUMNS):
    """Quantize a tile to blocks of BLOCK numbers of one row; `row` and `column` are the tile's first."""
    blocks = tl.reshape(value, (ROWS * (COLUMNS // BLOCK), BLOCK))
    scale = _row_scales(blocks, FORMAT, POWER, False)
    byte = tl.reshape(_byte(blocks * scale[:, None], FORMAT), (ROWS, COLUMNS))
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + rows[:, None] * num_columns + columns[None, :], byte, mask=inside)
    inverse_scale = tl.reshape(tl.div_rn(tl.zeros_like(scale) + 1.0, scale), (ROWS, COLUMNS // BLOCK))
    number, width = column // BLOCK + tl.arange(0, COLUMNS // BLOCK), tl.cdiv(num_columns, BLOCK)
    inside = (rows < num_rows)[:, None] & (number < width)[None, :]
    tl.store(inverse + rows[:, None] * width + number[None, :], inverse_scale, mask=inside)


@triton.jit
def both_kernel(
    x,
    out,
    inverse,
    out_t,
    inverse_t,
    num_rows,
    num_columns,
    stride_r,
    stride_k,
    FORMAT: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile to blocks along its rows, and its transpose along its columns."""
    _, _, _, value = _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS, COLUMNS)
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    _store_blocks(value, out, inverse, num_rows, num_columns, row, column, FORMAT, POWER, BLOCK, ROWS, COLUMNS)
    turned = tl.trans(value)
    _store_blocks(turned, out_t, inverse_t, num_columns, num_rows, column, row, FORMAT, POWER, BLOCK, COLUMNS, ROWS)


@triton.jit
def e8m0_kernel(
    x,
    out,
    exponents,
    num_rows,
    num_columns,
    stride_r,
    stride_k,
    out_stride,
    exponent_stride,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize ROWS blocks of one row each; inverse scales leave as bytes, both into rows of any distance."""
    row, _, inside, value = _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS, COLUMNS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scale = _row_scales(value, FORMAT, True, False)
    tl.store(out + row[:, None] * out_stride + column[None, :], _byte(value * scale[:, None], FORMAT), mask=inside)
    # a scale of 2^n has the exponent n + 127, its inverse -n + 127
    inverse = 254 - ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF)
    inverse = tl.where(scale != scale, 0xFF, inverse).to(tl.uint8)
    tl.store(exponents + row * exponent_stride + tl.program_id(1), inverse, mask=row < num_rows)


@triton.jit
def dequantize_kernel(
    values,
    scales,
    out,
    num_rows,
    num_columns,
    value_stride,
    scale_stride,
    FORMAT: tl.constexpr,
    E8M0: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply the numbers of bytes by their block's inverse scale: an fp32 number, or a byte (E8M0)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    number = _number(tl.load(values + row[:, None] * value_stride + column[None, :], mask=inside, other=0), FORMAT)
    block_row = row * 0 + tl.program_id(0) if SQUARE else row
    scale = tl.load(scales + block_row * scale_stride + tl.program_id(1), mask=row < num_rows, other=0)
    if E8M0:
        bits = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23)  # 2^-127 is below the normal numbers
        scale = tl.where(scale == 0xFF, float("nan"), bits.to(tl.float32, bitcast=True))
    place = row[:, None] * num_columns + column[None, :]
    tl.store(out + place, (number * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def amax_kernel(x, partial, num_rows, num_columns, stride_r, stride_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the largest absolute value of a tile; NaN if a number is not finite."""
    _, _, _, value = _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS, COLUMNS)
    size = tl.abs(value)
    is_bad = tl.max(tl.max(_not_finite(size), 1), 0)
    amax = tl.max(tl.max(size, 1), 0)
    to = partial + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.where(is_bad > 0, float("nan"), amax))


@triton.jit
def scale_kernel(
    x,
    out,
    scale,
    num_rows,
    num_columns,
    stride_r,
    stride_k,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a tile times the tensor's scale, as bytes."""
    _, place, inside, value = _tile(x, num_rows, num_columns, stride_r, stride_k, ROWS, COLUMNS)
    tl.store(out + place, _byte(value * tl.load(scale), FORMAT), mask=inside)


def _format(fmt: NumberFormat) -> tuple[float, int, float]:
    """Return what kernels know of a format: the maximum, the bits of the mantissa, the smallest normal number."""
    return fmt.max, fmt.mantissa_bits, 2.0**fmt.min_exponent


def _rows_of_tile(num_rows: int, columns: int) -> int:
    """Return how many blocks of one row a program takes."""
    return block_size(num_rows, max(1, 4096 // columns), 1)


def _tensor(x_RK: Tensor, scaling: Scaling, scale: Tensor | None, out: Tensor) -> Tensor:
    num_rows, width = x_RK.shape
    columns = block_size(width, 512)
    rows = 4096 // columns
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(width, columns))
    partial = torch.zeros(max(1, grid[0] * grid[1]), dtype=torch.float32, device=x_RK.device)
    if x_RK.numel():
        amax_kernel[grid](x_RK, partial, num_rows, width, *x_RK.stride(), ROWS=rows, COLUMNS=columns)
    amax = partial.amax()
    if scale is None:
        scale = compute_scale(amax, scaling.fmt)
    else:
        scale = torch.where(torch.isfinite(amax), scale.float(), torch.nan)
    if x_RK.numel():
        tile = {"FORMAT": _format(scaling.fmt), "ROWS": rows, "COLUMNS": columns}
        scale_kernel[grid](x_RK, out, scale.contiguous(), num_rows, width, *x_RK.stride(), **tile)
    return 1.0 / scale


def can(x_RK: Tensor, scaling: Scaling) -> bool:
    """Return whether the kernels support this tensor and scaling."""
    shaped = scaling.per_tensor or (scaling.rows in (1, scaling.cols) and scaling.scales != TWO_LEVEL)
    return (
        not scaling.fmt.is_packed
        and shaped
        and not (scaling.stochastic or scaling.hadamard)
        and x_RK.dtype != torch.float64
    )


def quantize(x_RK: Tensor, scaling: Scaling, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to E4M3 or E5M2, with blocks along its last dimension.

    Args:
        scaling: one scale per tensor, or blocks of 1 x n or n x n with n a power of two; fp32 or power-of-two scales.
        scale: of the full tensor (delayed scaling).

    Returns:
        Bytes [R, K] in the dtype of the format; inverse scales, fp32, () or [ceil(R / rows), ceil(K / cols)].

    Raises:
        ValueError: for other formats, stochastic rounding, the Hadamard transform and fp64.

    Shapes: x [R, K], any strides.
    """
    fmt, rows, columns = scaling.fmt, scaling.rows, scaling.cols
    if not can(x_RK, scaling):
        raise ValueError(
            "the Triton kernels quantize fp32 and half precision to E4M3 and E5M2, rounding to nearest: not "
            f"{scaling} of {x_RK.dtype}"
        )
    num_rows, width = x_RK.shape
    out = torch.empty(num_rows, width, dtype=torch.uint8, device=x_RK.device)
    if scaling.per_tensor:
        return out.view(fmt.dtype), _tensor(x_RK, scaling, scale, out)
    inverse = torch.empty(
        triton.cdiv(num_rows, rows), triton.cdiv(width, columns), dtype=torch.float32, device=x_RK.device
    )
    if x_RK.numel():
        tile = rows if rows > 1 else _rows_of_tile(num_rows, columns)
        block_kernel[(triton.cdiv(num_rows, tile), inverse.shape[1])](
            x_RK,
            out,
            inverse,
            num_rows,
            width,
            *x_RK.stride(),
            FORMAT=_format(fmt),
            POWER=scaling.scales == POWER_OF_TWO,
            SQUARE=rows > 1,
            ROWS=tile,
            COLUMNS=columns,
            num_warps=num_warps_for(tile * columns),
        )
    return out.view(fmt.dtype), inverse


def quantize_with_fallback(
    x_RK: Tensor, scaling: Scaling, scale: Tensor | None = None, generator: torch.Generator | None = None
) -> QuantizedTensor:
    """Quantize like quantize.quantize, with the kernels where they support it."""
    if not can(x_RK, scaling):
        return define(x_RK, scaling, scale, generator)
    return QuantizedTensor(*quantize(x_RK, scaling, scale), scaling)


def quantize_both(x_RK: Tensor, scaling: Scaling) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """Quantize a matrix and its transpose, from one read; None if the kernel does not support it.

    Args:
        scaling: blocks of 1 x n with n a power of two up to 128.
    """
    block = scaling.cols
    if scaling.rows != 1 or not can(x_RK, scaling) or block > 128:
        return None
    (num_rows, width), device = x_RK.shape, x_RK.device
    shapes = (num_rows, width), (width, num_rows)
    values = [torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes]
    inverse = [torch.empty(rows, triton.cdiv(size, block), dtype=torch.float32, device=device) for rows, size in shapes]
    if x_RK.numel():
        rows, columns = 128, max(block, 64)
        both_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(width, columns))](
            x_RK,
            *(values[0], inverse[0], values[1], inverse[1]),
            *x_RK.shape,
            *x_RK.stride(),
            FORMAT=_format(scaling.fmt),
            POWER=scaling.scales == POWER_OF_TWO,
            BLOCK=block,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=num_warps_for(rows * columns),
        )
    one, other = (QuantizedTensor(x.view(scaling.fmt.dtype), y, scaling) for x, y in zip(values, inverse))
    return one, other


def dequantize(values_RK: Tensor, inverse: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Return values times their blocks' inverse scales, in `dtype`.

    Args:
        values_RK: bytes of E4M3 or E5M2, as `quantize` returns them; rows of any distance.
        inverse: one per block, fp32, or uint8 with the bits of E8M0.
        scaling: blocks of 1 x n or n x n with n a power of two.
    """
    num_rows, width = values_RK.shape
    rows, columns = scaling.rows, scaling.cols
    out = torch.empty(num_rows, width, dtype=dtype, device=values_RK.device)
    if values_RK.numel():
        tile = rows if rows > 1 else _rows_of_tile(num_rows, columns)
        dequantize_kernel[(triton.cdiv(num_rows, tile), triton.cdiv(width, columns))](
            values_RK.view(torch.uint8),
            inverse,
            out,
            num_rows,
            width,
            values_RK.stride(0),
            inverse.stride(0),
            FORMAT=_format(scaling.fmt),
            E8M0=inverse.dtype == torch.uint8,
            SQUARE=rows > 1,
            ROWS=tile,
            COLUMNS=columns,
            num_warps=num_warps_for(tile * columns),
        )
    return out


def _quantize_rows(x_RH: Tensor, values: Tensor, exponents: Tensor) -> None:
    if x_RH.dtype == torch.float64:
        TORCH_ROW_CASTS.quantize(x_RH, values, exponents)
    elif x_RH.numel():
        columns = ROW_SCALING.cols
        tile = _rows_of_tile(x_RH.shape[0], columns)
        e8m0_kernel[(triton.cdiv(x_RH.shape[0], tile), exponents.shape[1])](
            x_RH,
            values,
            exponents,
            *x_RH.shape,
            *x_RH.stride(),
            values.stride(0),
            exponents.stride(0),
            FORMAT=_format(ROW_SCALING.fmt),
            ROWS=tile,
            COLUMNS=columns,
            num_warps=num_warps_for(tile * columns),
        )


def _dequantize_rows(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(values, exponents, ROW_SCALING, dtype)


ROW_CASTS = RowCasts(_quantize_rows, _dequantize_rows)
