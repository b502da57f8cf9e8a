"""Number formats in which the optimizer may keep moments and main parameters, and how fp32 gets into them and back.

fp32 and bf16 are kept as they are. fp16 and fp8 (e4m3) have a narrow range, so a span of elements shares one fp32 scale and
`values = stored * scale` (TransformerEngine's FusedAdam: one scale a tensor). The scale is the smallest power of two with which the largest
magnitude fits, not the quotient itself: multiplying by it is exact, so the rounding of an element is that of the format alone whoever holds
its neighbours, storing what was read changes nothing, and runs cut differently over ranks keep the same values. The price is at most one of
the binades below the largest value; elements further below it than the format reaches become coarser, then zero. Second moments are the
exception: a row that gets no gradient for a step would be moved by its first moment over eps, so what is above zero never becomes zero.

fp32 main parameters of a bf16 model need not repeat the half that the model has: `split` keeps the other half, 16 bits, and `join` gives
back all 32. The model's half is rounded to nearest, ties away from zero (torch's cast: to even), since a tie is the one
remainder that would not fit.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

_LEAST_EXPONENT = -126  # of a scale: the smallest that is not subnormal


@dataclass(frozen=True)
class Format:
    """How elements are stored. largest: what the format can hold, where elements share a scale; None: no scale."""

    dtype: torch.dtype
    largest: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def scaled(self) -> bool:
        return self.largest is not None


FORMATS = MappingProxyType({
    "fp32": Format(torch.float32),
    "bf16": Format(torch.bfloat16),
    "fp16": Format(torch.float16, 2.0**15),  # half of what it can hold, as in TransformerEngine
    "fp8": Format(torch.float8_e4m3fn, 448.0),
})
"""By the values of --exp-avg-dtype, --exp-avg-sq-dtype and --main-params-dtype."""


def scale_for(values: Tensor, largest: float) -> Tensor:
    """The smallest power of two by which `values` (fp32, not empty) must be divided to stay within `largest`; 1 for zeros.

    Returns: fp32 scalar on their device; nothing waits for the device.
    """
    mantissa, exponent = torch.frexp(torch.linalg.vector_norm(values, ord=float("inf")))
    room_mantissa, room_exponent = math.frexp(largest)
    # values < 2^exponent; one binade more fits where their mantissa is not above that of `largest`
    wanted = (exponent - room_exponent + (mantissa > room_mantissa)).clamp_(min=_LEAST_EXPONENT)
    return torch.where(mantissa > 0, torch.ldexp(torch.ones_like(mantissa), wanted), 1.0)


def encode(values: Tensor, fmt: Format, keep_positive: bool = False) -> tuple[Tensor, Tensor | None]:
    """fp32 values in a format, and their scale where the format has one.

    keep_positive: what is above zero stays so, if need be as the smallest number of a format with a scale.
    """
    if not fmt.scaled:
        return values.to(fmt.dtype), None
    scale = scale_for(values, fmt.largest)
    scaled = values / scale
    if keep_positive:
        scaled = torch.where(values > 0, scaled.clamp(min=torch.finfo(fmt.dtype).smallest_normal * torch.finfo(fmt.dtype).eps), scaled)
    return scaled.to(fmt.dtype), scale


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """The fp32 values of what `encode` returned; exact."""
    slow = stored.dtype == torch.float8_e4m3fn and stored.device.type == "cpu"
    values = _from_e4m3(stored) if slow else stored.to(torch.float32)
    return values if scale is None else values.mul_(scale)


def _from_e4m3(stored: Tensor) -> Tensor:
    """Finite e4m3 as fp32, seven times as fast as torch's own cast on a CPU: its bits are those of an fp16 number 256 times smaller."""
    bits = stored.view(torch.int8).to(torch.int16)
    sign, rest = (bits & 0x80).bitwise_left_shift_(8), (bits & 0x7F).bitwise_left_shift_(7)
    return sign.bitwise_or_(rest).view(torch.float16).to(torch.float32).mul_(256.0)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Cut finite fp32 values into their nearest bf16 (ties away from zero) and what is missing, int16: the lower half of their bits."""
    bits = values.contiguous().view(torch.int32)
    return (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values that `split` cut."""
    return high.to(torch.float32).view(torch.int32).add_(low).view(torch.float32)
