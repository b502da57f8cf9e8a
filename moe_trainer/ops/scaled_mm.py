"""Products of quantised matrices by the device's own units (torch.nn.functional.scaled_mm), where that gives what the definition gives.

| kind of product | scales | devices |
|---|---|---|
| tensors | one fp32 number a matrix | from 8.9 |
| blocks | 1 x 128 with 1 x 128 or 128 x 128, powers of two in fp32 | 9.0 |
| mx | 1 x 32, E8M0 in tiles | from 10.0 |
| nv | 1 x 16 (16 x 16: repeated), E2M1, E4M3 in tiles and an fp32 number | from 10.0 |

Formats of 8 bits may be mixed, but for two E5M2.

NOTE: written from torch's documentation and signatures, not yet run on a GPU. So nothing is taken on trust: the first time a kind of
product is met on a device a small one is computed both ways, and where the device refuses or gives another result, the definition
(quantize.py) is computed instead, with a warning. Layouts of scales stand in scaled_layouts.py, and are tested without a device.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.ops.quantize import E2M1, E4M3, E5M2, POWER_OF_TWO, TWO_LEVEL, Quantized, Scaling, quantize
from moe_trainer.ops.scaled_layouts import by_columns, filled_up, in_tiles, of_squares, packed, two_levels

logger = logging.getLogger(__name__)

_PROBE = 256
_CLOSE = 2e-2
"""How far a device's product may be from the definition, of its norm."""


class Kind(NamedTuple):
    """A kind of product. name; rows and columns of operands come in multiples of `rows` and `cols`; device: compute capability, from
    which (below `until`) units have it."""

    name: str
    rows: int
    cols: int
    device: tuple[int, int]
    until: tuple[int, int] = (99, 0)


TENSORS, BLOCKS = Kind("tensors", 16, 16, (8, 9)), Kind("blocks", 16, 128, (9, 0), until=(10, 0))
MX, NV = Kind("mx", 32, 32, (10, 0)), Kind("nv", 32, 32, (10, 0))


def kind_of(a: Scaling, b: Scaling) -> Kind | None:
    """The kind of product of two operands; None for what no unit has."""
    if a.per_tensor and b.per_tensor:
        return None if None in (a.fmt.dtype, b.fmt.dtype) or (a.fmt, b.fmt) == (E5M2, E5M2) else TENSORS
    shapes, formats, scales = {(a.rows, a.cols), (b.rows, b.cols)}, {a.fmt, b.fmt}, {a.scales, b.scales}
    if E4M3 in formats and formats <= {E4M3, E5M2} and scales == {POWER_OF_TWO}:
        if shapes <= {(1, 128), (128, 128)} and (1, 128) in shapes:
            return BLOCKS
        return MX if shapes == {(1, 32)} else None
    return NV if formats == {E2M1} and scales == {TWO_LEVEL} and shapes <= {(1, 16), (16, 16)} else None


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor | None:
    """a [M, K] times b [N, K] transposed by the device; None where it cannot, or may not be trusted to."""
    if not a.values.is_cuda or a.values.dtype == torch.float64 or not a.values.numel():
        return None
    return multiply(a, b, dtype) if _works(a.values.device, a.scaling, b.scaling, dtype) else None


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """The product, by the device. Of a kind that there is."""
    kind, rows, cols = kind_of(a.scaling, b.scaling), a.values.shape[0], b.values.shape[0]
    (left, *scales_a), (right, *scales_b) = (_operand(filled_up(x, kind.rows, kind.cols), kind) for x in (a, b))
    # a sum in the units' own narrow accumulator is what the definition does not have
    y = F.scaled_mm(left, right.t(), *_given(scales_a), *_given(scales_b), *(_swizzles(x) for x in (scales_a, scales_b)),
                    output_dtype=dtype, use_fast_accum=False)
    return y[:rows, :cols]


class _Scales(NamedTuple):
    """Scales of one level, as the device wants them."""

    values: Tensor
    kind: ScalingType
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE


def _given(scales: list[_Scales]) -> tuple[list[Tensor], list[ScalingType]]:
    return [level.values for level in scales], [level.kind for level in scales]


def _swizzles(scales: list[_Scales]) -> list[SwizzleType]:
    return [level.swizzle for level in scales]


def _operand(x: Quantized, kind: Kind) -> tuple[Tensor | _Scales, ...]:
    """Values, and scales level by level. x is filled up."""
    inverse, scaling = x.inverse, x.scaling
    if kind == TENSORS:
        return x.values.contiguous(), _Scales(inverse, ScalingType.TensorWise)
    if kind == BLOCKS:
        if scaling.rows == 1:
            return x.values.contiguous(), _Scales(by_columns(inverse), ScalingType.BlockWise1x128)
        return x.values.contiguous(), _Scales(of_squares(inverse), ScalingType.BlockWise128x128)
    tiled = SwizzleType.SWIZZLE_32_4_4
    if kind == MX:
        return x.values.contiguous(), _Scales(in_tiles(inverse).to(torch.float8_e8m0fnu), ScalingType.BlockWise1x32, tiled)
    stored, whole = two_levels(inverse.repeat_interleave(scaling.rows, 0)[:x.values.shape[0]])
    return (packed(x.values), _Scales(in_tiles(stored).to(E4M3.dtype), ScalingType.BlockWise1x16, tiled),
            _Scales(whole, ScalingType.TensorWise))


@functools.lru_cache
def _works(device: torch.device, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Whether the device computes such a product as defined, tried once."""
    kind = kind_of(a, b)
    if kind is None or not kind.device <= torch.cuda.get_device_capability(device) < kind.until:
        logger.warning("products of %s with %s have no native form here: they are computed by definition, in fp32, which is slower than "
                       "bf16 (--transformer-impl transformer_engine has more forms)", a, b)
        return False
    generator = torch.Generator(device).manual_seed(0)
    left, right = (quantize(torch.randn(_PROBE, _PROBE, generator=generator, device=device), scaling) for scaling in (a, b))
    expected = left.dequantized() @ right.dequantized().t()
    return as_defined(lambda: multiply(left, right, dtype), expected, f"torch's scaled_mm {{}} {a} with {b}: these products are computed by "
                      "definition, in fp32")


def as_defined(compute: Callable[[], Tensor], expected: Tensor, complaint: str) -> bool:
    """Whether a device computes what the definition gives; a warning where it does not. complaint: with a place for what it does."""
    try:
        found = compute().float()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logger.warning("%s (%s)", complaint.format("refuses"), error)
        return False
    close = bool((found - expected).norm() <= _CLOSE * expected.norm())
    if not close:
        logger.warning("%s", complaint.format("gives other numbers for"))
    return close
