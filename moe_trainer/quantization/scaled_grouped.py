"""Quantized GEMMs of many experts in one call: torch.nn.functional.scaled_grouped_mm, or kernels of ours.

| operands, E4M3 | scales | compute capability | weight gradients |
|---|---|---|---|
| one scale per matrix | one per row, equal for all tokens of an expert | 9.0 | no |
| MX | swizzled, expert by expert | from 10.0 | yes |
| blocks of 128 | fp32 (triton_block_gemm.py) | 9.0 | yes |

In bf16. Other recipes run expert by expert (scaled_mm.py), or in bf16 (grouped.py). As there, the first use on a device
is checked against the definition.

Shape letters: R tokens sorted by expert, e experts with tokens, N output width, K contraction dimension, C tokens in a
buffer, B blocks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from moe_trainer.ops.grouped_gemm import token_offsets
from moe_trainer.quantization.quantize import E4M3, QuantizedTensor, Scaling, quantize
from moe_trainer.quantization.scaled_layouts import TILE_ROWS, swizzle_e8m0, swizzle_e8m0_of_groups
from moe_trainer.quantization.scaled_mm import BLOCKS, MX, TENSORS, GemmKind, gemm_kind, matches_reference

_PROBE_ROWS, _PROBE = (37, 219), 256
_PROBE_GROUPS, _PROBE_TOKENS = (128, 0, 256), 512
"""Multiples of 128, an empty group, and tokens after the last group."""


class ExpertKernels(NamedTuple):
    """Kernels for quantized tokens of all experts.

    Args:
        of_tokens, over_tokens: GEMMs of operands with blocks of 128 (triton_block_gemm.py).
        quantize_both: triton_quantize.quantize_both.
    """

    of_tokens: Callable[..., Tensor]
    over_tokens: Callable[..., Tensor]
    quantize_both: Callable[[Tensor, Scaling], tuple[QuantizedTensor, QuantizedTensor] | None]


class StackedWeights(NamedTuple):
    """Quantized weights of all experts.

    Args:
        values_eNK: on the format's grid, in its one-byte dtype or wider.
        inverse: scales to multiply by, [e] or one per block, [e, ceil(N / rows), ceil(K / cols)].
    """

    values_eNK: Tensor
    inverse: Tensor
    scaling: Scaling

    @staticmethod
    def of(weights: Sequence[QuantizedTensor]) -> "StackedWeights":
        """Copy the weights of all experts into two tensors, in as few bytes as a value has."""
        weights = [weight.unpacked() for weight in weights]
        values, inverse = (torch.stack(tables) for tables in zip(*((x.values, x.inverse) for x in weights)))
        scaling = weights[0].scaling
        if not scaling.fmt.is_packed and values.dtype == torch.float32:
            values = values.to(scaling.fmt.dtype)
        return StackedWeights(values, inverse, scaling)

    def matrices(self) -> list[QuantizedTensor]:
        """Return the weight of every expert."""
        return [QuantizedTensor(*pair, self.scaling) for pair in zip(self.values_eNK, self.inverse)]


def can_use_native_grouped_mm(x: Tensor, outputs: int, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Return whether one call can multiply the experts' tokens x [R, K] by their weights [outputs, K], into `dtype`."""
    kind = gemm_kind(a, b)
    if kind not in (TENSORS, MX) or not a.fmt == b.fmt == E4M3 or not x.is_cuda or dtype != torch.bfloat16:
        return False
    multiple = 16 if kind == TENSORS else 128
    return x.shape[-1] % multiple == 0 and outputs % 16 == 0 and _works(x.device, a, b)


def can_use_native_weight_grad(grad: Tensor, x: Tensor, a: Scaling, b: Scaling, dtype: torch.dtype) -> bool:
    """Return whether one call can multiply the experts' tokens grad [N, C] and x [K, C], into `dtype`."""
    if gemm_kind(a, b) != MX or not a.fmt == b.fmt == E4M3 or not x.is_cuda or dtype != torch.bfloat16:
        return False
    sizes = (*grad.shape, len(x))
    return not any(size % 16 for size in sizes) and _weight_grads_work(x.device, a, b)


def can_use_block_gemms(x: Tensor, a: Scaling, b: Scaling, dtype: torch.dtype, kernels: ExpertKernels) -> bool:
    """Return whether kernels of ours can multiply quantized tokens like x by operands scaled like b, into `dtype`."""
    if gemm_kind(a, b) != BLOCKS or not a.fmt == b.fmt == E4M3:
        return False
    return x.is_cuda and dtype == torch.bfloat16 and _block_gemms_work(x.device, a, b, kernels)


def native_grouped_mm(a: Sequence[QuantizedTensor], b: Sequence[QuantizedTensor]) -> Tensor:
    """Return a_e [R_e, K] @ b_e [N, K]^T for every expert e, computed by the device: [R, N], bf16."""
    left = torch.cat([x.values.to(E4M3.dtype) for x in a])
    if gemm_kind(a[0].scaling, b[0].scaling) == TENSORS:
        scales = torch.cat([x.inverse.expand(x.values.shape[0]) for x in a])
    else:
        scales = torch.cat([_rows_of_scales(x.inverse) for x in a])
    offsets_e = token_offsets([x.values.shape[0] for x in a], left.device)
    return _of_tokens(left, scales, StackedWeights.of(b), offsets_e, a[0].scaling)


def native_grouped_mm_of_buffer(
    values_RK: Tensor, inverse: Tensor, weights: StackedWeights, offsets_e: Tensor, scaling: Scaling
) -> Tensor:
    """Return the same with the tokens of all experts in one buffer.

    Args:
        values_RK: each expert's tokens, a multiple of 128 with MX operands, whose scales are in tiles of 128 tokens.
        inverse: scales of tokens [R, 1], or of blocks [R, K / 32].
        offsets_e: int32 on the device, the end of each expert's tokens.
        scaling: of the tokens.
    """
    is_mx = gemm_kind(scaling, weights.scaling) == MX
    scales = _rows_of_scales(inverse) if is_mx else inverse.reshape(-1)
    return _of_tokens(values_RK.to(E4M3.dtype), scales, weights, offsets_e, scaling)


def native_grouped_weight_grad(
    grad_NC: Tensor, of_grad_NB: Tensor, x_KC: Tensor, of_x_KB: Tensor, offsets_e: Tensor
) -> Tensor:
    """Return grad_e @ x_e^T over the tokens of every expert e, for MX operands: [e, N, K], bf16.

    Args:
        of_grad_NB, of_x_KB: inverse scales of blocks along the tokens.
        offsets_e: as of native_grouped_mm_of_buffer, multiples of 128.
    """
    ends_e = offsets_e // TILE_ROWS  # four blocks of 32 tokens
    scales, of_x = (
        swizzle_e8m0_of_groups(inverse, ends_e).view(-(-len(inverse) // TILE_ROWS) * TILE_ROWS, -1)
        for inverse in (of_grad_NB, of_x_KB)
    )
    return _call(grad_NC.to(E4M3.dtype), x_KC.to(E4M3.dtype).t(), scales, of_x, offsets_e, MX)


def _rows_of_scales(inverse_RB: Tensor) -> Tensor:
    return swizzle_e8m0(inverse_RB).view(-1, inverse_RB.shape[1])


def _of_tokens(left: Tensor, scales: Tensor, b: StackedWeights, offsets_e: Tensor, scaling: Scaling) -> Tensor:
    right, kind = b.values_eNK.to(E4M3.dtype), gemm_kind(scaling, b.scaling)
    if kind == TENSORS:
        of_weights = b.inverse[:, None].expand(right.shape[:2]).contiguous()
    else:
        of_weights = swizzle_e8m0(b.inverse)
    return _call(left, right.transpose(1, 2), scales, of_weights, offsets_e, kind)


def _call(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, offsets_e: Tensor, kind: GemmKind | None
) -> Tensor:
    how = ScalingType.RowWise if kind == TENSORS else ScalingType.BlockWise1x32
    swizzle = SwizzleType.NO_SWIZZLE if kind == TENSORS else SwizzleType.SWIZZLE_32_4_4
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]  # torch's stub lacks it
        left,
        right,
        left_scales,
        how,
        right_scales,
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
    random = _probes(device)
    left, right = [random(rows, a) for rows in _PROBE_ROWS], [random(_PROBE, b) for _ in _PROBE_ROWS]
    expected = torch.cat([one.dequantized() @ other.dequantized().t() for one, other in zip(left, right)])
    return matches_reference(
        lambda: native_grouped_mm(left, right),
        expected,
        f"torch's scaled_grouped_mm {{}} {a} with {b}: experts are multiplied one by one",
    )


@functools.lru_cache
def _weight_grads_work(device: torch.device, a: Scaling, b: Scaling) -> bool:
    """Return whether the device computes weight gradients of MX operands as defined; tried once."""
    if torch.cuda.get_device_capability(device) < MX.device:
        return False
    random = _probes(device)
    grad, x = random(_PROBE, a, _PROBE_TOKENS), random(_PROBE, b, _PROBE_TOKENS)
    offsets_e = token_offsets(_PROBE_GROUPS, device)
    return matches_reference(
        lambda: native_grouped_weight_grad(grad.values, grad.inverse, x.values, x.inverse, offsets_e),
        _defined_weight_grad(grad, x),
        f"torch's scaled_grouped_mm {{}} weight gradients of {a} with {b}: they are computed in bf16",
    )


@functools.lru_cache
def _block_gemms_work(device: torch.device, a: Scaling, b: Scaling, kernels: ExpertKernels) -> bool:
    """Return whether the kernels compute as defined on this device; tried once."""
    if not BLOCKS.device <= torch.cuda.get_device_capability(device) < BLOCKS.until:
        return False
    random, offsets_e = _probes(device), token_offsets(_PROBE_GROUPS, device)

    def bytes_of(x: QuantizedTensor) -> tuple[Tensor, Tensor]:
        return x.values.to(E4M3.dtype), x.inverse

    warning = f"the kernel {{}} {a} with {b}: experts are multiplied in bf16"
    if b.rows == 1:
        grad, x = random(_PROBE, a, _PROBE_TOKENS), random(_PROBE, b, _PROBE_TOKENS)
        return matches_reference(
            lambda: kernels.over_tokens(*bytes_of(grad), *bytes_of(x), offsets_e, torch.bfloat16),
            _defined_weight_grad(grad, x),
            warning,
        )
    tokens, weights = random(_PROBE_TOKENS, a), [random(_PROBE, b) for _ in _PROBE_GROUPS]
    rows = tokens.dequantized()[: sum(_PROBE_GROUPS)].split(_PROBE_GROUPS)
    expected = torch.cat([x @ weight.dequantized().t() for x, weight in zip(rows, weights)])
    stack = StackedWeights.of(weights)

    def compute() -> Tensor:
        return kernels.of_tokens(
            *bytes_of(tokens), stack.values_eNK.to(E4M3.dtype), stack.inverse, offsets_e, torch.bfloat16
        )[: len(expected)]

    return matches_reference(compute, expected, warning)


def _probes(device: torch.device) -> Callable[..., QuantizedTensor]:
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, scaling: Scaling, cols: int = _PROBE) -> QuantizedTensor:
        return quantize(torch.randn(rows, cols, generator=generator, device=device), scaling)

    return random


def _defined_weight_grad(grad: QuantizedTensor, x: QuantizedTensor) -> Tensor:
    parts = ((t.dequantized()[:, : sum(_PROBE_GROUPS)].split(_PROBE_GROUPS, 1)) for t in (grad, x))
    return torch.stack([one @ other.t() for one, other in zip(*parts)])
