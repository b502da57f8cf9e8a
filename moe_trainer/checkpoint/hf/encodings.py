"""How quantized Hugging Face folders store a weight: values in fp8, fp4 or int4, and scales of blocks.

| encoding | values | scales of blocks | scale of the tensor |
|---|---|---|---|
| block fp8 | E4M3 | fp32, 128 x 128, to multiply by | |
| MXFP4 | E2M1, two per byte, the first in the low bits | E8M0 (a byte, exponent + 127), 1 x 32, to multiply by | |
| NVFP4 | E2M1, likewise | E4M3, 1 x 16, to multiply by | fp32 |
| int4 (read only) | value + 8, eight per int32, the first in the low bits | bf16, 1 x group, to multiply by | |

Rounding and scales are those of moe_trainer/quantization/quantize.py. Dequantized weights are bf16: MXFP4 exactly, the
others rounded.

Sources: deepseek-ai/DeepSeek-V3 README_WEIGHTS.md; OCP Microscaling Formats 1.0; compressed-tensors at ac8e2ba,
compressors/nvfp4/base.py, compressors/mxfp4/base.py and compressors/pack_quantized/helpers.py.

Shape letters: N rows, K columns (the contraction), B blocks of a row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import (
    E2M1,
    E4M3,
    POWER_OF_TWO,
    TWO_LEVEL,
    Scaling,
    block_amax,
    compute_amax,
    compute_scale,
    expand_scales,
    quantize,
    round_nearest,
    tensor_scale,
    unpack_e2m1,
)
from moe_trainer.quantization.scaled_layouts import pack_e2m1

BLOCK_SIZE = 128
BLOCK_FP8 = Scaling(E4M3, BLOCK_SIZE, BLOCK_SIZE)
MXFP4 = Scaling(E2M1, 1, 32, POWER_OF_TWO)
NVFP4 = Scaling(E2M1, 1, 16, TWO_LEVEL)
_PORTION = 2**22  # elements that are in fp32 at once


class Encoded(NamedTuple):
    """A weight [N, K] as it is stored.

    Attributes:
        values: E4M3 [N, K], or bytes [N, K / 2].
        scales: fp32 [ceil(N / 128), ceil(K / 128)], or bytes (E8M0) or E4M3 [N, B].
        factor: fp32 scalar that maps the largest weight to the largest product of value and scale; 1 except in NVFP4.
        error, size: sums of squares, of the rounding errors and of the weights.
    """

    values: Tensor
    scales: Tensor
    factor: Tensor
    error: float
    size: float


def encode(weight_NK: Tensor, scaling: Scaling, largest: Tensor | None = None) -> Encoded:
    """Quantize a weight by one of the encodings.

    Args:
        largest: absolute value that determines the scale of the tensor in NVFP4, by default the largest of the weight.

    Raises:
        ValueError: if a weight is not finite.
    """
    largest = compute_amax(weight_NK) if largest is None else largest
    factor = tensor_scale(largest, E2M1) if scaling.scales == TWO_LEVEL else torch.ones(())
    values, scales, error, size = [], [], 0.0, 0.0
    for rows in _portions(weight_NK):
        x = weight_NK[rows].float()
        if not torch.isfinite(x).all():
            raise ValueError("a weight is not finite")
        quantized = quantize(_limit(x, scaling) if scaling.scales == POWER_OF_TWO else x, scaling, largest=largest)
        error += (quantized.dequantized() - x).square().sum(dtype=torch.float64).item()
        size += x.square().sum(dtype=torch.float64).item()
        inverse = quantized.inverse
        if scaling.scales == POWER_OF_TWO:
            inverse = inverse.to(torch.float8_e8m0fnu).view(torch.uint8)
        elif scaling.scales == TWO_LEVEL:
            inverse = round_nearest(inverse * factor, E4M3).to(torch.float8_e4m3fn)
        values.append(
            quantized.values.to(torch.float8_e4m3fn)
            if scaling.fmt is E4M3
            else pack_e2m1(quantized.values).view(torch.uint8)
        )
        scales.append(inverse)
    return Encoded(torch.cat(values), torch.cat(scales), factor, error, size)


def _limit(x: Tensor, scaling: Scaling) -> Tensor:
    """Clamp every block to what its largest value is rounded to.

    That is 3, 4 or 6 of E2M1. A block whose largest value becomes 3 gets the grid that is twice as fine, on which that
    is 6: no error grows, and a dequantized weight gets the same bytes again.
    """
    amax = block_amax(x, scaling.rows, scaling.cols)
    scale = compute_scale(amax, scaling.fmt, power_of_two=True)
    limit = expand_scales(round_nearest(amax * scale, scaling.fmt) / scale, scaling, x.shape)
    return x.clamp(-limit, limit)


def decode_fp4(packed: Tensor, scales: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return a weight in bf16 of its values and scales in fp4.

    Shapes: packed bytes [N, K / 2]; scales E4M3 or E8M0 bytes [N, B]; factor to multiply by, () -> [N, K].
    """
    out = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.bfloat16)
    for rows in _portions(out):
        part = scales[rows]
        inverse = (part.view(torch.float8_e8m0fnu) if part.dtype == torch.uint8 else part).float()
        inverse = inverse if factor is None else inverse * factor.float()
        values = unpack_e2m1(packed[rows]).unflatten(1, (inverse.shape[1], -1))
        out[rows] = (values * inverse[..., None]).flatten(1).to(torch.bfloat16)
    return out


def decode_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in bf16 of its values and scales in int4.

    Shapes: packed int32 [N, K / 8], scales [N, B] -> [N, K].
    """
    out = torch.empty(packed.shape[0], 8 * packed.shape[1], dtype=torch.bfloat16)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for rows in _portions(out):
        values = (packed[rows, :, None] >> shifts & 15) - 8
        inverse = scales[rows].float()
        groups = values.flatten(1).unflatten(1, (inverse.shape[1], -1))
        out[rows] = (groups * inverse[..., None]).flatten(1).to(torch.bfloat16)
    return out


def decode_block_fp8(value: Tensor, scales: Tensor, block: int = BLOCK_SIZE) -> Tensor:
    """Multiply fp8 values by their scale per block; returns bf16.

    Shapes: value [N, K], scales [ceil(N / block), ceil(K / block)] -> [N, K].

    Raises:
        ValueError: if the scales have another shape.
    """
    needed = tuple(-(-size // block) for size in value.shape)
    if value.dim() != 2 or tuple(scales.shape) != needed:
        raise ValueError(
            f"{list(scales.shape)} scales, and {list(needed)} are needed for a weight {list(value.shape)} in "
            f"blocks of {block}"
        )
    out = torch.empty(value.shape, dtype=torch.bfloat16)
    for row in range(needed[0]):  # one row of blocks at a time: all in fp32 would take four times the source
        rows = slice(row * block, (row + 1) * block)
        wide = scales[row].repeat_interleave(block)[: value.shape[1]]
        out[rows] = (value[rows].float() * wide).to(torch.bfloat16)
    return out


def _portions(matrix: Tensor) -> Iterator[slice]:
    """Yield ranges of rows that are decoded or quantized at once: full blocks."""
    rows, cols = matrix.shape
    height = max(1, _PORTION // max(1, cols) // BLOCK_SIZE) * BLOCK_SIZE
    for first in range(0, max(rows, 1), height):
        yield slice(first, min(rows, first + height))
