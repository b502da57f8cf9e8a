"""Products of quantised matrices by the device's own fp8 units (torch._scaled_mm), where that gives what the definition gives.

NOTE: written from torch's documentation, not yet run on a GPU. So nothing is taken on trust: the first time a kind of product is met on
a device a small one is computed both ways, and where the device refuses or gives another result, the definition (quantize.py) is
computed instead, with a warning. Scales per tensor and blocks of 1 x 128 with 128 x 128 have a native form here; MX and NV formats, whose
scales the device wants in an order of its own, are computed by definition.
"""

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.quantize import E4M3, E5M2, POWER_OF_TWO, Quantized, Scaling, quantize

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
_ROW, _SQUARE = (1, 128), (128, 128)
_PROBE = 256
_CLOSE = 2e-2


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor | None:
    """a [M, K] times b [N, K] transposed by the device; None where it cannot, or may not be trusted to."""
    if not a.values.is_cuda or a.values.dtype == torch.float64 or not a.values.numel():
        return None
    if not a.scaling.per_tensor and (a.values.shape[1] % _ROW[1] or b.values.shape[0] % _SQUARE[0]):
        return None
    if not _works(a.values.device, a.scaling, b.scaling, dtype):
        return None
    rows, cols = a.values.shape[0], b.values.shape[0]
    return _run(_padded(a), _padded(b), dtype)[:rows, :cols]


def _padded(x: Quantized) -> Quantized:
    """Filled up with zeros to sizes that the units take; a product does not change but for rows of zeros."""
    rows, cols = (-size % _ALIGNMENT for size in x.values.shape)
    if not rows and not cols:
        return x
    inverse = x.inverse if x.scaling.rows != 1 else F.pad(x.inverse, (0, 0, 0, rows), value=1.0)
    return Quantized(F.pad(x.values.to(torch.float32), (0, cols, 0, rows)), inverse, x.scaling)


def _has_native(a: Scaling, b: Scaling) -> bool:
    if a.fmt.dtype is None or (a.fmt, b.fmt) == (E5M2, E5M2):
        return False
    shapes = (a.rows, a.cols), (b.rows, b.cols)
    return (a.per_tensor and b.per_tensor) or (shapes == (_ROW, _SQUARE) and a.scales == POWER_OF_TWO and a.fmt == b.fmt == E4M3)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    left, right = a.values.to(a.scaling.fmt.dtype), b.values.to(b.scaling.fmt.dtype)
    inverse_a, inverse_b = a.inverse, b.inverse
    if not a.scaling.per_tensor:  # the scales of 1 x 128 blocks are wanted column by column
        inverse_a, inverse_b = inverse_a.t().contiguous().t(), inverse_b.t()
    # a sum in the units' own narrow accumulator is what the definition does not have
    return torch._scaled_mm(left, right.t(), scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=False)


@functools.lru_cache
def _works(device: torch.device, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Whether the device computes such a product as defined, tried once."""
    if not _has_native(a, b) or torch.cuda.get_device_capability(device) < (8, 9):
        logger.warning("products of %s with %s have no native form here: they are computed by definition, in fp32, which is slower than "
                       "bf16 (--transformer-impl transformer_engine has more forms)", a, b)
        return False
    generator = torch.Generator(device).manual_seed(0)
    left, right = (quantize(torch.randn(_PROBE, _PROBE, generator=generator, device=device), scaling) for scaling in (a, b))
    expected = left.dequantized() @ right.dequantized().t()
    try:
        found = _run(left, right, dtype).float()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logger.warning("torch._scaled_mm refuses %s with %s: these products are computed by definition, in fp32 (%s)", a, b, error)
        return False
    close = (found - expected).norm() <= _CLOSE * expected.norm()
    if not close:
        logger.warning("torch._scaled_mm gives other numbers for %s with %s: these products are computed by definition, in fp32", a, b)
    return bool(close)
