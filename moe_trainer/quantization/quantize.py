"""Formats of 8 and 4 bits, their rounding and their scales, in plain torch. These are the reference definitions.

A tensor is multiplied by scales, each shared by a block, and rounded to the grid of a format. Blocks lie along the last
dimension, which is the contracted one. A block whose maximum is not finite becomes NaN, so that saturation does not
hide an overflow from the checks. fp64 tensors stay fp64 (with fp32 scales) for verification runs. Which scales exist:
docs/design/quantization.md.

Shape letters: R rows, K contraction dimension.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class NumberFormat(NamedTuple):
    """A binary floating-point format with subnormals.

    Args:
        min_exponent: of normal numbers.
        dtype: torch's, of one byte.
    """

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype

    @property
    def is_packed(self) -> bool:
        """Whether two numbers share a byte of `dtype`."""
        return self.dtype == torch.float4_e2m1fn_x2


E4M3 = NumberFormat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = NumberFormat("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = NumberFormat("e2m1", 1, 0, 6.0, torch.float4_e2m1fn_x2)

FP32, POWER_OF_TWO, TWO_LEVEL = "fp32", "power of two", "two level"
"""Kinds of scales: any fp32 number; a power of two; an E4M3 number per block below an fp32 number per tensor."""

HADAMARD_SIZE = 16
NEGATIVE_SIGNS = 0xD7E8
"""The one fixed sign vector of the random Hadamard transform: bit i is set if element i is -1.

The same for every layer and step, so both operands agree.
"""
_MAX_EXPONENT = 127


@dataclass(frozen=True)
class Scaling:
    """How one operand is scaled and rounded.

    Args:
        rows, cols: of a block; 0 for the full tensor.
        scales: FP32, POWER_OF_TWO or TWO_LEVEL.
        stochastic: round at random to either neighbor, without bias.
        hadamard: transform the contraction dimension first, 16 elements at a time.
    """

    fmt: NumberFormat
    rows: int = 0
    cols: int = 0
    scales: str = FP32
    stochastic: bool = False
    hadamard: bool = False

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the full tensor."""
        return self.rows == 0

    def __str__(self) -> str:
        where = "one scale per tensor" if self.per_tensor else f"one scale per {self.rows} x {self.cols}"
        return f"{self.fmt.name} with {where}"


class QuantizedTensor(NamedTuple):
    """A quantized matrix.

    Args:
        values: [R, K] on the format's grid, in fp32 or fp64, or in the format's dtype from a kernel; E2M1 is packed
            there, [R, K / 2] (`unpack_e2m1`).
        inverse: scales to multiply by, () or one per block [R / rows, K / cols].
    """

    values: Tensor
    inverse: Tensor
    scaling: Scaling

    @property
    def is_packed(self) -> bool:
        """Whether two values share a byte."""
        return self.values.dtype == E2M1.dtype

    def unpacked(self) -> "QuantizedTensor":
        """Return the same matrix with one value per element."""
        return self._replace(values=unpack_e2m1(self.values)) if self.is_packed else self

    def dequantized(self) -> Tensor:
        """Return the values [R, K] that a GEMM computes with."""
        values = self.unpacked().values
        values = values.float() if values.itemsize == 1 else values
        return values * expand_scales(self.inverse, self.scaling, values.shape)


def round_nearest(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Round fp32 or fp64 to the nearest number of a format, ties to even, with saturation. NaN stays."""
    x = x.clamp(-fmt.max, fmt.max)
    if not fmt.is_packed and x.dtype == torch.float32:
        return x.to(fmt.dtype).to(x.dtype)
    step = _step(x, fmt)
    return torch.round(x / step) * step


def round_stochastic(x: Tensor, fmt: NumberFormat, generator: torch.Generator | None) -> Tensor:
    """Round to one of the two neighbors with unbiased probabilities, with saturation."""
    x = x.clamp(-fmt.max, fmt.max)
    step = _step(x, fmt)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    steps = x / step
    low = torch.floor(steps)
    # not floor(steps + noise): that sum may be rounded up to the next number, even where x is one, beyond the largest
    # too
    return (low + (steps - low + noise >= 1)) * step


def _step(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the distance between the numbers of the format around x."""
    exponent = torch.frexp(x)[1] - 1
    return torch.ldexp(torch.ones_like(x), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)


def floor_power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two not above x > 0, within 2^-127 and 2^127. NaN stays."""
    exponent = (torch.frexp(x)[1] - 1).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    return torch.where(torch.isnan(x), x, torch.ldexp(torch.ones_like(x), exponent))


def compute_scale(amax: Tensor, fmt: NumberFormat, power_of_two: bool = False) -> Tensor:
    """Return the fp32 factor that maps amax to the format's maximum; 1 for zeros, NaN if not finite."""
    amax = amax.float()
    scale = (fmt.max / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = floor_power_of_two(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def compute_amax(x: Tensor) -> Tensor:
    """Return the largest absolute value in fp32; 0 for an empty tensor."""
    return x.detach().abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def block_amax(x_RK: Tensor, rows: int, cols: int) -> Tensor:
    """Return the largest absolute value of every block, fp32 [ceil(R / rows), ceil(K / cols)]."""
    height, width = -(-x_RK.shape[0] // rows), -(-x_RK.shape[1] // cols)
    padded = F.pad(x_RK.abs(), (0, width * cols - x_RK.shape[1], 0, height * rows - x_RK.shape[0]))
    return padded.view(height, rows, width, cols).amax((1, 3)).float()


def expand_scales(scales: Tensor, scaling: Scaling, shape: torch.Size) -> Tensor:
    """Return one scale per element, or the single scale."""
    if scales.dim() == 0:
        return scales
    return scales.repeat_interleave(scaling.rows, 0)[: shape[0]].repeat_interleave(scaling.cols, 1)[:, : shape[1]]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the values of scaled_layouts.pack_e2m1, in fp32: [R, K]."""
    codes = packed.view(torch.uint8)
    code = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    size = (code & 7).float()
    size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
    return torch.where(code > 7, -size, size)


def quantize(
    x_RK: Tensor,
    scaling: Scaling,
    scale: Tensor | None = None,
    generator: torch.Generator | None = None,
    largest: Tensor | None = None,
) -> QuantizedTensor:
    """Quantize a matrix, with blocks along its last dimension.

    Args:
        scale: of the full tensor, instead of the one that follows from its maximum (delayed scaling).
        generator: of stochastic rounding.
        largest: absolute value of the tensor that the matrix is a part of, for two-level scales.
    """
    x_RK = (x_RK if x_RK.dtype == torch.float64 else x_RK.float()).contiguous()
    if scaling.hadamard:
        x_RK = hadamard(x_RK)
    if scaling.per_tensor:
        amax = compute_amax(x_RK)
        scale = (
            compute_scale(amax, scaling.fmt) if scale is None else torch.where(torch.isfinite(amax), scale, torch.nan)
        )
        inverse = 1.0 / scale
    else:
        amax = block_amax(x_RK, scaling.rows, scaling.cols)
        if scaling.scales == TWO_LEVEL:
            if largest is None:
                largest = amax.amax((-2, -1), keepdim=True) if amax.numel() else amax.new_zeros(())
            scale, inverse, _ = two_level_scales(amax, largest, scaling.fmt)
        else:
            scale = compute_scale(amax, scaling.fmt, scaling.scales == POWER_OF_TWO)
            inverse = 1.0 / scale
    scaled = x_RK * expand_scales(scale, scaling, x_RK.shape)
    rounded = (
        round_stochastic(scaled, scaling.fmt, generator) if scaling.stochastic else round_nearest(scaled, scaling.fmt)
    )
    return QuantizedTensor(rounded, inverse, scaling)


def tensor_scale(whole: Tensor, fmt: NumberFormat) -> Tensor:
    """Return the fp32 number of two-level scales, which maps the largest block to E4M3's maximum."""
    return compute_scale(whole, fmt._replace(max=fmt.max * E4M3.max))


def two_level_scales(amax: Tensor, whole: Tensor, fmt: NumberFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, their inverses and the E4M3 numbers in these: one per block, times an fp32 number per tensor.

    A block too small for E4M3, or whose scale would overflow fp32 (0 times that would be NaN), becomes zero.

    Args:
        amax: of blocks.
        whole: the largest of the tensor that a block belongs to.
    """
    per_tensor = tensor_scale(whole, fmt)
    stored = round_nearest(amax / fmt.max * per_tensor, E4M3)
    inverse = stored / per_tensor
    scale = 1.0 / inverse
    return torch.where(torch.isinf(scale), torch.zeros_like(scale), scale), inverse, stored


def hadamard(x_RK: Tensor) -> Tensor:
    """Apply the random Hadamard transform to every 16 elements of the last dimension, padded with zeros.

    It is orthogonal: the matmul of two transformed matrices is that of the matrices. Returns [R, K rounded up to 16].
    """
    x_RK = F.pad(x_RK, (0, -x_RK.shape[1] % HADAMARD_SIZE))
    return (x_RK.unflatten(1, (-1, HADAMARD_SIZE)) @ _signed_hadamard_matrix(x_RK)).flatten(1)


def _signed_hadamard_matrix(like: Tensor) -> Tensor:
    """Compute the matrix with signs, [16, 16], on the device: a CUDA graph cannot copy it from the host."""
    index = torch.arange(HADAMARD_SIZE, device=like.device)
    parity = (0x6996 >> (index[:, None] & index)) & 1  # of the bits that both indices have; 0x6996 is a table
    is_negative = parity ^ ((NEGATIVE_SIGNS >> index[:, None]) & 1)
    return (1 - 2 * is_negative).to(like.dtype) * HADAMARD_SIZE**-0.5
