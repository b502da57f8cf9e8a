"""Quantized GEMMs of many experts in one call (torch.nn.functional.scaled_grouped_mm).

| operands | scales | compute capability |
|---|---|---|
| one scale per matrix, E4M3 | one per row, equal for all tokens of an expert | 9.0 |
| MX, E4M3 | swizzled, expert by expert | from 10.0 |

Only outputs and input gradients, in bf16. Other recipes run expert by expert (scaled_mm.py). As there, the first use on
a device is checked against the definition.

Shape letters: R tokens sorted by expert, e experts with tokens, N output width, K contraction dimension.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.ops.grouped_gemm import token_offsets
from moe_trainer.quantization.quantize import E4M3, QuantizedTensor, Scaling, quantize
from moe_trainer.quantization.scaled_layouts import swizzle_scales
from moe_trainer.quantization.scaled_mm import MX, TENSORS, gemm_kind, matches_reference

_PROBE_ROWS, _PROBE = (37, 219), 256


def can_use_native_grouped_mm(x: Tensor, outputs: int, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Return whether one call can multiply the experts' tokens x [R, K] by their weights [outputs, K], into `dtype`."""
    kind = gemm_kind(a, b)
    if kind not in (TENSORS, MX) or not a.fmt == b.fmt == E4M3 or not x.is_cuda or dtype != torch.bfloat16:
        return False
    multiple = 16 if kind == TENSORS else 128
    return x.shape[-1] % multiple == 0 and outputs % 16 == 0 and _works(x.device, a, b)


def native_grouped_mm(a: Sequence[QuantizedTensor], b: Sequence[QuantizedTensor]) -> Tensor:
    """Return a_e [R_e, K] @ b_e [N, K]^T for every expert e, computed by the device: [R, N], bf16."""
    left = torch.cat([x.values.to(E4M3.dtype) for x in a])
    if gemm_kind(a[0].scaling, b[0].scaling) == TENSORS:
        scales = torch.cat([x.inverse.expand(x.values.shape[0]) for x in a])
    else:
        scales = torch.cat([swizzle_scales(x.inverse).view(-1, x.inverse.shape[1]) for x in a])
    return _call(left, scales, b, token_offsets([x.values.shape[0] for x in a], left.device), a[0].scaling)


def native_grouped_mm_of_buffer(
    values_RK: Tensor, inverse: Tensor, b: Sequence[QuantizedTensor], offsets_e: Tensor, scaling: Scaling
) -> Tensor:
    """Return the same with the tokens of all experts in one buffer.

    Args:
        values_RK: each expert's tokens, a multiple of 128 with MX operands, whose scales are in tiles of 128 tokens.
        inverse: scales of tokens [R, 1], or of blocks [R, K / 32].
        offsets_e: int32 on the device, the end of each expert's tokens.
        scaling: of the tokens.
    """
    if gemm_kind(scaling, b[0].scaling) == TENSORS:
        scales = inverse.reshape(-1)
    else:
        scales = swizzle_scales(inverse).view(-1, inverse.shape[1])
    return _call(values_RK.to(E4M3.dtype), scales, b, offsets_e, scaling)


def _call(left: Tensor, scales: Tensor, b: Sequence[QuantizedTensor], offsets_e: Tensor, scaling: Scaling) -> Tensor:
    right = torch.stack([x.values.to(E4M3.dtype).contiguous() for x in b])
    if gemm_kind(scaling, b[0].scaling) == TENSORS:
        both = scales, torch.stack([x.inverse.expand(x.values.shape[0]) for x in b])
        how, swizzle = ScalingType.RowWise, SwizzleType.NO_SWIZZLE
    else:
        of_weights = torch.stack([swizzle_scales(x.inverse) for x in b])
        both = scales.to(torch.float8_e8m0fnu), of_weights.to(torch.float8_e8m0fnu)
        how, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(
        left,
        right.transpose(1, 2),
        both[0],
        how,
        both[1],
        how,
        swizzle,
        swizzle,
        offs=offsets_e,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


@functools.lru_cache
def _works(device: torch.device, a: Scaling, b: Scaling) -> bool:
    """Return whether the device computes such GEMMs as defined; tried once."""
    capability, is_mx = torch.cuda.get_device_capability(device), gemm_kind(a, b) == MX
    if not (capability >= (10, 0) if is_mx else (9, 0) <= capability < (10, 0)):
        return False
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, scaling: Scaling) -> QuantizedTensor:
        return quantize(torch.randn(rows, _PROBE, generator=generator, device=device), scaling)

    left, right = [random(rows, a) for rows in _PROBE_ROWS], [random(_PROBE, b) for _ in _PROBE_ROWS]
    expected = torch.cat([one.dequantized() @ other.dequantized().t() for one, other in zip(left, right)])
    return matches_reference(
        lambda: native_grouped_mm(left, right),
        expected,
        f"torch's scaled_grouped_mm {{}} {a} with {b}: experts are multiplied one by one",
    )
