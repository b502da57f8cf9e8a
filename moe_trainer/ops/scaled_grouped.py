"""Quantised products of many experts in one call of the device's units (torch.nn.functional.scaled_grouped_mm).

| operands | as | devices |
|---|---|---|
| one scale a matrix, E4M3 | a scale a row, the same for all rows of an expert | 9.0 |
| MX, E4M3 | tiles of scales, expert by expert | from 10.0 |

Only products whose rows are grouped (outputs and gradients of inputs), in bf16. What is not here, blocks of 128 and NV among it, the
caller multiplies expert by expert (scaled_mm.py). As there, a kind is tried once on a device and computed by definition beside it.

Shape letters: R rows sorted by expert, e experts that have rows, N output width, K contraction dimension.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.ops.grouped_gemm import row_offsets
from moe_trainer.ops.quantize import E4M3, Quantized, Scaling, quantize
from moe_trainer.ops.scaled_layouts import in_tiles
from moe_trainer.ops.scaled_mm import MX, TENSORS, Kind, as_defined, kind_of

_PROBE_ROWS, _PROBE = (37, 219), 256


def can_group(x: Tensor, outputs: int, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Whether one call can multiply experts' rows x [R, K] by their weights [outputs, K]."""
    kind = kind_of(a, b)
    if kind not in (TENSORS, MX) or not a.fmt == b.fmt == E4M3 or not x.is_cuda or dtype != torch.bfloat16:
        return False
    multiple = 16 if kind == TENSORS else 128
    return x.shape[-1] % multiple == 0 and outputs % 16 == 0 and _works(x.device, a, b)


def multiply_groups(a: Sequence[Quantized], b: Sequence[Quantized]) -> Tensor:
    """a_e [R_e, K] times b_e [N, K] transposed for every expert e, by the device. Returns: [R, N], bf16."""
    kind = kind_of(a[0].scaling, b[0].scaling)
    left = torch.cat([x.values.to(E4M3.dtype) for x in a])
    right = torch.stack([x.values.to(E4M3.dtype).contiguous() for x in b])
    scales, how, swizzle = _scales(a, b, kind)
    return F.scaled_grouped_mm(left, right.transpose(1, 2), scales[0], how, scales[1], how, swizzle, swizzle,
                               offs=row_offsets([x.values.shape[0] for x in a], left.device), output_dtype=torch.bfloat16, use_fast_accum=False)


def _scales(a: Sequence[Quantized], b: Sequence[Quantized], kind: Kind) -> tuple[tuple[Tensor, Tensor], ScalingType, SwizzleType]:
    if kind == TENSORS:
        of_rows = torch.cat([x.inverse.expand(x.values.shape[0]) for x in a])
        return (of_rows, torch.stack([x.inverse.expand(x.values.shape[0]) for x in b])), ScalingType.RowWise, SwizzleType.NO_SWIZZLE
    of_rows = torch.cat([in_tiles(x.inverse).view(-1, x.inverse.shape[1]) for x in a])
    both = tuple(scales.to(torch.float8_e8m0fnu) for scales in (of_rows, torch.stack([in_tiles(x.inverse) for x in b])))
    return both, ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4


@functools.lru_cache
def _works(device: torch.device, a: Scaling, b: Scaling) -> bool:
    """Whether the device computes such products as defined, tried once."""
    capability, is_mx = torch.cuda.get_device_capability(device), kind_of(a, b) == MX
    if not ((10, 0) <= capability if is_mx else (9, 0) <= capability < (10, 0)):
        return False
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, scaling: Scaling) -> Quantized:
        return quantize(torch.randn(rows, _PROBE, generator=generator, device=device), scaling)

    left, right = [random(rows, a) for rows in _PROBE_ROWS], [random(_PROBE, b) for _ in _PROBE_ROWS]
    expected = torch.cat([one.dequantized() @ other.dequantized().t() for one, other in zip(left, right)])
    return as_defined(lambda: multiply_groups(left, right), expected, f"torch's scaled_grouped_mm {{}} {a} with {b}: experts are multiplied one by one")
