"""Numbers in 8 and 4 bits: formats, rounding, and the scales that make a tensor fit, in plain torch.

A tensor is divided by scales, each shared by a block of it, and rounded onto the grid of a format. The contraction dimension of the
product it is meant for is always the last one, and blocks lie along it. What comes out are values on the grid, still in fp32, and the
inverse scales: `Quantized.dequantized` is what a product of the device computes with, exactly.

Definitions, by who shares a scale:

* the whole tensor: fmax / amax in fp32, from its own maximum (current scaling) or from a given scale (delayed scaling).
* blocks of 1 x 128 and 128 x 128 (DeepSeek-V3, section 3.3.2): fp32 scales, by default cut down to a power of two as
  TransformerEngine does.
* 1 x 32 (OCP MX, arXiv 2506.08027 for the choice of rounding): a power of two (E8M0), rounded so that nothing saturates.
* 1 x 16 and 16 x 16 (NVFP4, arXiv 2509.25149): an E4M3 scale per block and one fp32 scale for the whole tensor.

A block whose maximum is not finite becomes NaN: saturation would hide from the checks what must stop or skip an iteration.
fp64 tensors stay fp64 (scales are fp32 all the same): proofs need that, no device does.

Shape letters: R rows, K contraction dimension.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.hadamard import hadamard_matrix
from moe_trainer.ops.transfer import to_device


class Format(NamedTuple):
    """A binary format with subnormals. min_exponent: of normal numbers; dtype: torch's, where it has one of a byte."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: torch.dtype | None = None


E4M3 = Format("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = Format("e2m1", 1, 0, 6.0)

FP32, POWER_OF_TWO, TWO_LEVEL = "fp32", "power of two", "two level"
"""Kinds of scales: any fp32 number; a power of two; an E4M3 number per block below an fp32 number per tensor."""

HADAMARD_SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The one fixed sign vector of the random Hadamard transform; the same for every layer and step, so both operands agree."""
_MAX_EXPONENT = 127


@dataclass(frozen=True)
class Scaling:
    """How one operand is made to fit.

    rows, cols: of a block; 0 for the whole tensor. scales: FP32, POWER_OF_TWO or TWO_LEVEL. stochastic: round at random, to either
    neighbour in proportion. hadamard: transform the contraction dimension first, 16 elements at a time.
    """

    fmt: Format
    rows: int = 0
    cols: int = 0
    scales: str = FP32
    stochastic: bool = False
    hadamard: bool = False

    @property
    def per_tensor(self) -> bool:
        """Does one scale serve the whole tensor?"""
        return self.rows == 0


class Quantized(NamedTuple):
    """values [R, K] on the format's grid, in fp32 or fp64, or in the format's own dtype of a byte where a kernel has made them; inverse:
    scales to multiply by, () or one a block [R / rows, K / cols]."""

    values: Tensor
    inverse: Tensor
    scaling: Scaling

    def dequantized(self) -> Tensor:
        """The numbers that a product sees. Shape: [R, K]."""
        values = self.values.float() if self.values.itemsize == 1 else self.values
        return values * spread(self.inverse, self.scaling, self.values.shape)


def round_nearest(x: Tensor, fmt: Format) -> Tensor:
    """Round fp32 or fp64 to the nearest number of a format, ties to even; beyond its largest number saturate. NaN stays."""
    x = x.clamp(-fmt.max, fmt.max)
    if fmt.dtype is not None and x.dtype == torch.float32:
        return x.to(fmt.dtype).to(x.dtype)
    step = _step(x, fmt)
    return torch.round(x / step) * step


def round_stochastic(x: Tensor, fmt: Format, generator: torch.Generator | None) -> Tensor:
    """Round to one of the two neighbours, to each with a probability that makes the mean exact; saturate."""
    x = x.clamp(-fmt.max, fmt.max)
    step = _step(x, fmt)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    steps = x / step
    low = torch.floor(steps)
    # not floor(steps + noise): that sum may be rounded up to the next number, even where x is one, beyond the largest too
    return (low + (steps - low + noise >= 1)) * step


def _step(x: Tensor, fmt: Format) -> Tensor:
    """Distance between the numbers of the format around x."""
    exponent = torch.frexp(x)[1] - 1
    return torch.ldexp(torch.ones_like(x), exponent.clamp(min=fmt.min_exponent) - fmt.mantissa_bits)


def floor_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is not above x > 0; at least 2^-127, at most 2^127. NaN stays."""
    exponent = (torch.frexp(x)[1] - 1).clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    return torch.where(torch.isnan(x), x, torch.ldexp(torch.ones_like(x), exponent))


def scale_of(amax: Tensor, fmt: Format, power_of_two: bool = False) -> Tensor:
    """The factor that brings a maximum to the format's largest number; fp32. 1 for zeros, NaN for what is not finite."""
    amax = amax.float()
    scale = (fmt.max / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = floor_power_of_two(scale)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute value, fp32; 0 of nothing."""
    return x.detach().abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def block_amax(x_RK: Tensor, rows: int, cols: int) -> Tensor:
    """The largest absolute value of every block, fp32; blocks at the ends may be smaller. Shape: [ceil(R / rows), ceil(K / cols)]."""
    height, width = -(-x_RK.shape[0] // rows), -(-x_RK.shape[1] // cols)
    padded = F.pad(x_RK.abs(), (0, width * cols - x_RK.shape[1], 0, height * rows - x_RK.shape[0]))
    return padded.view(height, rows, width, cols).amax((1, 3)).float()


def spread(scales: Tensor, scaling: Scaling, shape: torch.Size) -> Tensor:
    """One scale per element, or the only one."""
    if scales.dim() == 0:
        return scales
    return scales.repeat_interleave(scaling.rows, 0)[:shape[0]].repeat_interleave(scaling.cols, 1)[:, :shape[1]]


def quantize(x_RK: Tensor, scaling: Scaling, scale: Tensor | None = None, generator: torch.Generator | None = None) -> Quantized:
    """Bring a matrix into a format, with blocks along its last dimension.

    scale: of the whole tensor, given (delayed scaling) instead of found. generator: of stochastic rounding.
    """
    x_RK = (x_RK if x_RK.dtype == torch.float64 else x_RK.float()).contiguous()
    if scaling.hadamard:
        x_RK = hadamard(x_RK)
    if scaling.per_tensor:
        amax = amax_of(x_RK)
        scale = scale_of(amax, scaling.fmt) if scale is None else torch.where(torch.isfinite(amax), scale, torch.nan)
        inverse = 1.0 / scale
    else:
        amax = block_amax(x_RK, scaling.rows, scaling.cols)
        if scaling.scales == TWO_LEVEL:
            scale, inverse = _two_level(amax, scaling.fmt)
        else:
            scale = scale_of(amax, scaling.fmt, scaling.scales == POWER_OF_TWO)
            inverse = 1.0 / scale
    scaled = x_RK * spread(scale, scaling, x_RK.shape)
    rounded = round_stochastic(scaled, scaling.fmt, generator) if scaling.stochastic else round_nearest(scaled, scaling.fmt)
    return Quantized(rounded, inverse, scaling)


def _two_level(amax: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Scales and their inverses: an E4M3 number per block times an fp32 number for all.

    The tensor's number puts the largest block at E4M3's largest number; a block too small for any E4M3 number, or whose scale would be
    beyond fp32 (with 0 that would give NaN), becomes zero.
    """
    whole = amax.amax() if amax.numel() else amax.new_zeros(())
    tensor_scale = scale_of(whole, Format("", 0, 0, fmt.max * E4M3.max))
    stored = round_nearest(amax / fmt.max * tensor_scale, E4M3)
    inverse = stored / tensor_scale
    scale = 1.0 / inverse
    return torch.where(torch.isinf(scale), torch.zeros_like(scale), scale), inverse


def hadamard(x_RK: Tensor) -> Tensor:
    """Random Hadamard transform of every 16 elements of the last dimension, filled up with zeros: orthogonal, so that a product
    of two transformed matrices is that of the matrices. Returns [R, K rounded up to 16]."""
    x_RK = F.pad(x_RK, (0, -x_RK.shape[1] % HADAMARD_SIZE))
    signs = torch.tensor(SIGNS, dtype=x_RK.dtype)
    matrix = signs[:, None] * hadamard_matrix(HADAMARD_SIZE, x_RK.dtype, signs.device) * HADAMARD_SIZE**-0.5
    return (x_RK.unflatten(1, (-1, HADAMARD_SIZE)) @ to_device(matrix, x_RK.device)).flatten(1)
