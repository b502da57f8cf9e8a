"""GEMMs of quantized matrices on the device's own units (torch.nn.functional.scaled_mm).

| kind | scales | compute capability |
|---|---|---|
| tensors | one fp32 number per matrix | from 8.9 |
| blocks | 1 x 128 with 1 x 128 or 128 x 128, powers of two in fp32 | 9.0 |
| mx | 1 x 32, E8M0, swizzled | from 10.0 |
| nv | 1 x 16 (16 x 16 is repeated), E2M1, E4M3 swizzled and an fp32 number | from 10.0 |

The first GEMM of a kind on a device is compared with the definition (quantize.py), which replaces it with a warning if
they differ.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.quantization.quantize import (
    E2M1,
    E4M3,
    E5M2,
    POWER_OF_TWO,
    TWO_LEVEL,
    QuantizedTensor,
    Scaling,
    quantize,
)
from moe_trainer.quantization.scaled_layouts import (
    block128_layout,
    column_major,
    pack_e2m1,
    pad_to_multiple,
    split_two_level,
    swizzle_e8m0,
    swizzle_scales,
)

logger = logging.getLogger(__name__)

_PROBE = 256
_CLOSE = 2e-2
"""How far a device's GEMM may be from the definition, of its norm."""
_BY_DEFINITION = "these GEMMs are computed by definition, in fp32"


class GemmKind(NamedTuple):
    """A kind of GEMM.

    Args:
        rows, cols: operands have multiples of these.
        device: compute capability from which units exist, below `until`.
    """

    name: str
    rows: int
    cols: int
    device: tuple[int, int]
    until: tuple[int, int] = (99, 0)


TENSORS, BLOCKS = GemmKind("tensors", 16, 16, (8, 9)), GemmKind("blocks", 16, 128, (9, 0), until=(10, 0))
MX, NV = GemmKind("mx", 32, 32, (10, 0)), GemmKind("nv", 32, 32, (10, 0))


def gemm_kind(a: Scaling, b: Scaling) -> GemmKind | None:
    """Return the kind of GEMM of two operands; None if no unit has it."""
    if a.per_tensor and b.per_tensor:
        return None if a.fmt.is_packed or b.fmt.is_packed or (a.fmt, b.fmt) == (E5M2, E5M2) else TENSORS
    shapes, formats, scales = {(a.rows, a.cols), (b.rows, b.cols)}, {a.fmt, b.fmt}, {a.scales, b.scales}
    if E4M3 in formats and formats <= {E4M3, E5M2} and scales == {POWER_OF_TWO}:
        if shapes <= {(1, 128), (128, 128)} and (1, 128) in shapes:
            return BLOCKS
        return MX if shapes == {(1, 32)} else None
    return NV if formats == {E2M1} and scales == {TWO_LEVEL} and shapes <= {(1, 16), (16, 16)} else None


def scaled_mm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, narrow: torch.dtype | None = None
) -> Tensor | None:
    """Return a [M, K] @ b [N, K]^T computed by the device; None if it cannot or its results differ.

    Args:
        narrow: dtype of the result where the device has such a GEMM, but none that writes `dtype`.
    """
    if not a.values.is_cuda or a.values.dtype == torch.float64 or not a.values.numel():
        return None
    narrow, how = narrow or dtype, (a.values.device, a.scaling, b.scaling)
    if not _works(*how, narrow):
        return None
    is_wide = narrow != dtype and _works(*how, dtype, f"these GEMMs write {narrow}, to which sums are rounded")
    return native_mm(a, b, dtype if is_wide else narrow)


def native_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b^T computed by the device.

    Raises:
        ValueError: if no unit has such a GEMM.
    """
    kind, rows, cols = gemm_kind(a.scaling, b.scaling), a.values.shape[0], b.values.shape[0]
    if kind is None:
        raise ValueError(f"no unit multiplies {a.scaling} and {b.scaling}")
    left, right = (_operand(pad_to_multiple(x, kind.rows, kind.cols), kind) for x in (a, b))
    # a sum in the units' own narrow accumulator is what the definition does not have
    y = F.scaled_mm(
        left.values,
        right.values.t(),
        [level.values for level in left.scales],
        [level.kind for level in left.scales],
        [level.values for level in right.scales],
        [level.kind for level in right.scales],
        [level.swizzle for level in left.scales],
        [level.swizzle for level in right.scales],
        output_dtype=dtype,
        use_fast_accum=False,
    )
    return y[:rows, :cols]


class _Scales(NamedTuple):
    """Scales of one level in the device's layout."""

    values: Tensor
    kind: ScalingType
    swizzle: SwizzleType = SwizzleType.NO_SWIZZLE


class _Operand(NamedTuple):
    """A padded matrix as the device takes it, with its scales level by level."""

    values: Tensor
    scales: tuple[_Scales, ...]


def _operand(x: QuantizedTensor, kind: GemmKind) -> _Operand:
    inverse, scaling = x.inverse, x.scaling
    if kind == TENSORS:
        return _Operand(x.values.contiguous(), (_Scales(inverse, ScalingType.TensorWise),))
    if kind == BLOCKS:
        if scaling.rows == 1:
            scales = _Scales(column_major(inverse), ScalingType.BlockWise1x128)
        else:
            scales = _Scales(block128_layout(inverse), ScalingType.BlockWise128x128)
        return _Operand(x.values.contiguous(), (scales,))
    tiled = SwizzleType.SWIZZLE_32_4_4
    if kind == MX:
        return _Operand(x.values.contiguous(), (_Scales(swizzle_e8m0(inverse), ScalingType.BlockWise1x32, tiled),))
    stored, whole = split_two_level(inverse.repeat_interleave(scaling.rows, 0)[: x.values.shape[0]])
    levels = (
        _Scales(swizzle_scales(stored).to(E4M3.dtype), ScalingType.BlockWise1x16, tiled),
        _Scales(whole, ScalingType.TensorWise),
    )
    return _Operand(x.values if x.is_packed else pack_e2m1(x.values), levels)


@functools.lru_cache
def _works(device: torch.device, a: Scaling, b: Scaling, dtype: torch.dtype, instead: str = _BY_DEFINITION) -> bool:
    """Return whether the device computes a GEMM as defined; tried once. `instead`: what else happens."""
    kind = gemm_kind(a, b)
    if kind is None or not kind.device <= torch.cuda.get_device_capability(device) < kind.until:
        logger.warning(
            "GEMMs of %s and %s have no native kernel here: they are computed by definition, in fp32, which is slower "
            "than bf16 (--transformer-impl transformer_engine has more kernels)",
            a,
            b,
        )
        return False
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        quantize(torch.randn(_PROBE, _PROBE, generator=generator, device=device), scaling) for scaling in (a, b)
    )
    expected = left.dequantized() @ right.dequantized().t()
    return matches_reference(
        lambda: native_mm(left, right, dtype),
        expected,
        f"torch's scaled_mm {{}} {a} with {b} into {dtype}: {instead}",
    )


def matches_reference(compute: Callable[[], Tensor], expected: Tensor, warning: str) -> bool:
    """Return whether a device computes what the definition gives; log a warning if it does not.

    Args:
        warning: its text, with a placeholder for what the device does.
    """
    try:
        found = compute().float()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logger.warning("%s (%s)", warning.format("refuses"), error)
        return False
    close = bool((found - expected).norm() <= _CLOSE * expected.norm())
    if not close:
        logger.warning("%s", warning.format("gives other numbers for"))
    return close
