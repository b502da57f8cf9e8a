"""Number formats of optimizer state, and the conversion between them and fp32.

fp32 and bf16 are stored as they are. fp16 and fp8 (e4m3) have a narrow range, so a span of elements shares one fp32
scale and `values = stored * scale` (TransformerEngine's FusedAdam: one scale per tensor). docs/design/optimizer.md
explains the choice of scales.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

_MIN_SCALE_EXPONENT = -126  # the smallest scale that is not subnormal


@dataclass(frozen=True)
class Format:
    """Storage format of elements, as `dtype` rounds them."""

    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class ScaledFormat(Format):
    """Storage format of elements that share a scale.

    Args:
        max_magnitude: largest magnitude to store.
    """

    max_magnitude: float


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "fp32": Format(torch.float32),
        "bf16": Format(torch.bfloat16),
        "fp16": ScaledFormat(torch.float16, 2.0**15),  # half of its range, as in TransformerEngine
        "fp8": ScaledFormat(torch.float8_e4m3fn, 448.0),
    }
)
"""Formats by the values of --exp-avg-dtype, --exp-avg-sq-dtype and --main-params-dtype."""


def compute_scale(values: Tensor, max_magnitude: float) -> Tensor:
    """Return the smallest power of two that scales `values` (fp32, not empty) into the range; 1 for zeros.

    A power of two multiplies exactly, so the rounding of an element does not depend on which other elements share its
    scale.

    Returns:
        fp32 scalar on the device of `values`, computed without synchronization.
    """
    mantissa, exponent = torch.frexp(torch.linalg.vector_norm(values, ord=float("inf")))
    max_mantissa, max_exponent = math.frexp(max_magnitude)
    # values < 2^exponent; one more binade fits unless their mantissa exceeds that of max_magnitude
    scale_exponent = (exponent - max_exponent + (mantissa > max_mantissa)).clamp_(min=_MIN_SCALE_EXPONENT)
    return torch.where(mantissa > 0, torch.ldexp(torch.ones_like(mantissa), scale_exponent), 1.0)


def encode(values: Tensor, fmt: ScaledFormat, keep_positive: bool = False) -> tuple[Tensor, Tensor]:
    """Convert fp32 values to a format with a scale.

    Args:
        keep_positive: round positive values up to the smallest number of the format instead of to zero. Second
            moments need it: a first moment divided by eps would be a huge step.

    Returns:
        The stored values, and their scale.
    """
    scale = compute_scale(values, fmt.max_magnitude)
    scaled = values / scale
    if keep_positive:
        smallest = torch.finfo(fmt.dtype).smallest_normal * torch.finfo(fmt.dtype).eps
        scaled = torch.where(values > 0, scaled.clamp(min=smallest), scaled)
    return scaled.to(fmt.dtype), scale


def decode(stored: Tensor, scale: Tensor) -> Tensor:
    """Return the exact fp32 values of the output of `encode`."""
    needs_bit_cast = stored.dtype == torch.float8_e4m3fn and stored.device.type == "cpu"
    return (_e4m3_to_fp32(stored) if needs_bit_cast else stored.to(torch.float32)).mul_(scale)


def _e4m3_to_fp32(stored: Tensor) -> Tensor:
    """Convert finite e4m3 numbers, seven times as fast as torch's cast on a CPU.

    The bits of an e4m3 number, moved to the right place, are those of an fp16 number 256 times smaller.
    """
    bits = stored.view(torch.int8).to(torch.int16)
    sign, rest = (bits & 0x80).bitwise_left_shift_(8), (bits & 0x7F).bitwise_left_shift_(7)
    return sign.bitwise_or_(rest).view(torch.float16).to(torch.float32).mul_(256.0)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split finite fp32 values into bf16 values and remainders (int16, the lower half of the bits).

    Ties round away from zero, unlike torch's cast: a tie to even is the one remainder that would not fit 16 bits.
    """
    bits = values.contiguous().view(torch.int32)
    return (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values that `split` was given."""
    return high.to(torch.float32).view(torch.int32).add_(low).view(torch.float32)
