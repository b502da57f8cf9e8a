"""Quantized GEMMs of all experts whose token counts stay on the device.

Tokens are sorted by expert, and each expert's are padded with zeros to a multiple (QuantizedGemms.token_multiple). So
blocks along the tokens never cover two experts, and one call quantizes the tokens of all experts, with the scales of
quantize.py for each of them. Tokens after the last expert's may be anything.

A GEMM is one call for quantized operands (scaled_grouped.py), or a grouped GEMM of the operands' values.
On CUDA that one is in bf16: a value times the scale of its block is exact there, because both have few bits, and the
fp32 scale of an expert's tensor multiplies the result. On CPU it is in fp32, as the definition.

Shape letters: C tokens in the buffer, e experts, R rows and K contraction dimension of an operand, N output width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.grouped_gemm import GroupedGemms, token_offsets
from moe_trainer.quantization.quantize import (
    TWO_LEVEL,
    QuantizedTensor,
    Scaling,
    block_amax,
    compute_scale,
    expand_scales,
    hadamard,
    round_nearest,
    round_stochastic,
    tensor_scale,
    two_level_scales,
)
from moe_trainer.quantization.scaled_grouped import (
    ExpertKernels,
    StackedWeights,
    can_use_block_gemms,
    can_use_native_grouped_mm,
    can_use_native_weight_grad,
    native_grouped_mm_of_buffer,
    native_grouped_weight_grad,
)
from moe_trainer.quantization.scaled_layouts import split_two_level


class TokenGroups(NamedTuple):
    """The tokens of each expert.

    Attributes:
        offsets_e: int32, the end of each expert's tokens.
        expert_C: int64, the expert of each token; e for tokens after the last expert's.
        gemms: grouped GEMMs that read the offsets.
    """

    offsets_e: Tensor
    expert_C: Tensor
    gemms: GroupedGemms

    def per_token(self, numbers_e: Tensor, fill: float = 0.0) -> Tensor:
        """Return the number of each token's expert, `fill` for tokens after the last expert's."""
        return F.pad(numbers_e, (0, 1), value=fill)[self.expert_C]

    def amax(self, sizes_C: Tensor) -> Tensor:
        """Return each expert's largest of the tokens' sizes, infinity if one is not finite."""
        sizes_C = torch.where(torch.isfinite(sizes_C), sizes_C, torch.inf)
        found = sizes_C.new_zeros(len(self.offsets_e) + 1)
        return found.scatter_reduce_(0, self.expert_C[:: len(self.expert_C) // len(sizes_C)], sizes_C, "amax")[:-1]


def make_token_groups(counts_e: Tensor, num_tokens: int, gemms: GroupedGemms) -> TokenGroups:
    """Make the groups of counts on the device."""
    offsets_e = token_offsets(counts_e, counts_e.device)
    token_C = torch.arange(num_tokens, dtype=torch.int32, device=counts_e.device)
    return TokenGroups(offsets_e, torch.searchsorted(offsets_e, token_C, right=True), gemms)


class GroupedOperand(NamedTuple):
    """Quantized tokens of all experts, [R, K], where R or K are the tokens.

    Attributes:
        values: on the format's grid.
        inverse: scales to multiply by: one per block of a row, or per token if that is [C, 1] or [C].
        blocks, scale_e: `inverse` is numbers with few bits, None if these are 1, divided by an fp32 number per expert,
            None if that is 1.
        scaling: how they were scaled.
    """

    values: Tensor
    inverse: Tensor
    blocks: Tensor | None
    scale_e: Tensor | None
    scaling: Scaling

    @staticmethod
    def of(
        values: Tensor,
        blocks: Tensor | None,
        scale_e: Tensor | None,
        scaling: Scaling,
        groups: TokenGroups,
        transposed: bool,
    ) -> "GroupedOperand":
        """Return the operand with these scales; `transposed` with the tokens as its columns."""
        if scale_e is not None:
            step = scaling.cols if transposed and not scaling.per_tensor else 1
            scales = groups.per_token(scale_e, 1.0)[::step]
            inverse = (1.0 if blocks is None else blocks) / (scales if transposed else scales.unsqueeze(1))
        elif blocks is not None:
            inverse = blocks
        else:
            raise ValueError("tokens have no scales: neither of blocks nor of experts")
        return GroupedOperand(values, inverse, blocks, scale_e, scaling)

    @staticmethod
    def of_blocks(x: QuantizedTensor) -> "GroupedOperand":
        """Return the operand of tokens whose blocks have scales of their own."""
        return GroupedOperand(x.values, x.inverse, x.inverse, None, x.scaling)

    @property
    def factor_e(self) -> Tensor | None:
        """The fp32 number that multiplies each expert's tokens, None if that is 1."""
        return None if self.scale_e is None else 1.0 / self.scale_e

    def of_gemm(self, in_bf16: bool) -> Tensor:
        """Return what a grouped GEMM multiplies: bf16 without `factor_e`, or all in fp32."""
        values = self.values.float()
        inverse = self.blocks if in_bf16 else self.inverse
        if inverse is not None:
            values = values * (
                inverse if self.scaling.per_tensor else expand_scales(inverse, self.scaling, values.shape)
            )
        return values.bfloat16() if in_bf16 else values


class BothOperands(NamedTuple):
    """Tokens quantized along their rows, [C, K], and along the tokens, [K, C]."""

    rows: GroupedOperand
    columns: GroupedOperand


def quantize_tokens(
    x_CK: Tensor,
    scaling: Scaling,
    groups: TokenGroups,
    quantizer: Callable[..., QuantizedTensor],
    scale: Tensor | None = None,
    generator: torch.Generator | None = None,
    transposed: bool = False,
) -> GroupedOperand:
    """Quantize the tokens of every expert by itself; `transposed` with blocks along the tokens, [K, C].

    The other arguments are those of quantize.quantize.
    """
    x = x_CK.t() if transposed else x_CK
    if not scaling.per_tensor and scaling.scales != TWO_LEVEL:
        return GroupedOperand.of_blocks(quantizer(x, scaling, None, generator))
    x = x.float().contiguous()
    if scaling.hadamard:
        x = hadamard(x)

    def per_expert(numbers_e: Tensor, step: int = 1, fill: float = 1.0) -> Tensor:
        numbers = groups.per_token(numbers_e, fill)[::step]
        return numbers if transposed else numbers.unsqueeze(1)

    if scaling.per_tensor:
        amax_e = groups.amax(x.abs().amax(0 if transposed else 1))
        finite_e = torch.isfinite(amax_e)
        scale_e = (
            compute_scale(amax_e, scaling.fmt) if scale is None else torch.where(finite_e, scale.float(), torch.nan)
        )
        values = _round(x * per_expert(scale_e), scaling, generator)
        return GroupedOperand.of(values, None, scale_e, scaling, groups, transposed)
    amax = block_amax(x, 1, scaling.cols)
    whole_e = groups.amax(amax.amax(0 if transposed else 1))
    step = scaling.cols if transposed else 1
    whole = per_expert(whole_e, step, fill=0.0)
    block_scale, _, stored = two_level_scales(amax, whole, scaling.fmt)
    values = _round(x * expand_scales(block_scale, scaling, x.shape), scaling, generator)
    return GroupedOperand.of(values, stored, tensor_scale(whole_e, scaling.fmt), scaling, groups, transposed)


def _round(x: Tensor, scaling: Scaling, generator: torch.Generator | None) -> Tensor:
    return round_stochastic(x, scaling.fmt, generator) if scaling.stochastic else round_nearest(x, scaling.fmt)


def grouped_mm_of_tokens(
    x: GroupedOperand, weights: StackedWeights, groups: TokenGroups, dtype: torch.dtype, kernels: ExpertKernels | None
) -> Tensor:
    """Return x_e [C_e, K] @ w_e [N, K]^T for every expert e: [C, N] in `dtype`."""
    values_eNK, inverse, scaling = weights
    if can_use_native_grouped_mm(x.values, values_eNK.shape[1], x.scaling, scaling, dtype):
        return native_grouped_mm_of_buffer(x.values, x.inverse, weights, groups.offsets_e, x.scaling)
    if kernels is not None and can_use_block_gemms(x.values, x.scaling, scaling, dtype, kernels):
        return kernels.of_tokens(*_bytes(x), values_eNK.to(scaling.fmt.dtype), inverse, groups.offsets_e, dtype)
    if not x.values.is_cuda:
        w_eNK = torch.stack([weight.dequantized() for weight in weights.matrices()])
        return groups.gemms.forward(x.of_gemm(False), w_eNK, groups.offsets_e).to(dtype)
    exact, factors = zip(*(_exact(weight) for weight in weights.matrices()))
    y_CN = groups.gemms.forward(x.of_gemm(True), torch.stack(exact), groups.offsets_e)
    if x.factor_e is None and factors[0] is None:
        return y_CN.to(dtype)
    factor_e = groups.offsets_e.new_ones(len(exact), dtype=torch.float32)
    if x.factor_e is not None:
        factor_e = factor_e * x.factor_e
    if factors[0] is not None:
        factor_e = factor_e * torch.stack([factor.reshape(()) for factor in factors])
    return (y_CN.float() * groups.per_token(factor_e).unsqueeze(1)).to(dtype)


def grouped_mm_over_tokens(
    grad: GroupedOperand,
    x: GroupedOperand,
    groups: TokenGroups,
    dtype: torch.dtype,
    narrow: torch.dtype,
    kernels: ExpertKernels | None,
) -> Tensor:
    """Return grad_e [N, C_e] @ x_e [K, C_e]^T for every expert e: [e, N, K] in `dtype`, by torch's kernel in `narrow`.

    Args:
        narrow: dtype of the tokens.
    """
    if can_use_native_weight_grad(grad.values, x.values, grad.scaling, x.scaling, narrow):
        return native_grouped_weight_grad(grad.values, grad.inverse, x.values, x.inverse, groups.offsets_e)
    if kernels is not None and can_use_block_gemms(x.values, grad.scaling, x.scaling, narrow, kernels):
        return kernels.over_tokens(*_bytes(grad), *_bytes(x), groups.offsets_e, dtype)
    in_bf16 = x.values.is_cuda
    total = groups.gemms.weight_grad(grad.of_gemm(in_bf16).t(), x.of_gemm(in_bf16).t(), groups.offsets_e)
    if in_bf16:
        for factor_e in (grad.factor_e, x.factor_e):
            if factor_e is not None:
                total = total.float() * factor_e[:, None, None]
    return total.to(dtype)


def _bytes(x: GroupedOperand) -> tuple[Tensor, Tensor]:
    return x.values.to(x.scaling.fmt.dtype), x.inverse


def _exact(weight: QuantizedTensor) -> tuple[Tensor, Tensor | None]:
    """Return a bf16 matrix without rounding and the fp32 number, if any, that multiplies it."""
    values, scaling, inverse = weight.values.float(), weight.scaling, weight.inverse
    if scaling.per_tensor:
        return values.bfloat16(), inverse
    factor = None
    if scaling.scales == TWO_LEVEL:
        inverse, factor = split_two_level(inverse)
    return (values * expand_scales(inverse, scaling, values.shape)).bfloat16(), factor
