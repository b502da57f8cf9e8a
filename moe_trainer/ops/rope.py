"""Rotary position embeddings: inverse frequencies with their scalings, cos/sin tables, and the rotation.

A table holds cos and sin of position * frequency, [S, D/2] for D rotated features. Pairs are halves (feature i with i +
D/2; Llama, Mixtral, Qwen) or interleaved (2i with 2i + 1; DeepSeek). Backward is the rotation by the negative angle;
only the tables are saved.

Shapes: S positions, B sequences, N heads, D rotated features.
"""

import math

import torch
from torch import Tensor


def inverse_frequencies(dim: int, base: float) -> Tensor:
    """Return 1 / base^(2i/dim) for i in [0, dim/2), fp32 [dim/2]."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


def llama3_scaling(
    inv_freq: Tensor,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_positions: int = 8192,
) -> Tensor:
    """Slow the frequencies whose wavelength exceeds the original context, blending in between.

    With equal factors there is nothing in between.
    Source: Llama 3.1 release; Megatron-LM --use-rope-scaling.
    """
    wavelength = 2 * math.pi / inv_freq
    turns = original_max_positions / wavelength
    smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def yarn_frequencies(
    dim: int,
    base: float,
    factor: float,
    original_max_positions: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    round_to_int: bool = True,
) -> Tensor:
    """Return YaRN's frequencies, fp32 [dim/2]: slow ones interpolated by `factor`, with a linear ramp.

    Args:
        beta_fast, beta_slow: rotations over the original context that bound the ramp.

    Source: arXiv 2309.00071, as used by DeepSeek-V2/V3.
    """

    def feature_of(rotations: float) -> float:
        return dim * math.log(original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = feature_of(beta_fast), feature_of(beta_slow)
    if round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    keep = 1.0 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0.0, 1.0)
    fast = inverse_frequencies(dim, base)
    return fast / factor * (1.0 - keep) + fast * keep


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1, or 1 without extension."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_tables(
    inv_freq: Tensor, positions_S: Tensor, position_scale: float = 1.0, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the positions times `position_scale`, times `amplitude`; fp32 [S, D/2]."""
    angles = torch.outer(positions_S.float() * position_scale, inv_freq.to(positions_S.device))
    return angles.cos() * amplitude, angles.sin() * amplitude


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, offset: int, sign: int) -> Tensor:
    """Rotate the features [offset, offset + 2 * cos.shape[-1]) of x [S, B, N, *]; the rest is copied.

    On a CPU half precision is converted to fp32 and back: short strided runs of bf16 are three times slower. Kernels of
    CUDA read and write it and compute in fp32; they round the first of two matmuls, too.
    """
    half = cos.shape[-1]
    end = offset + 2 * half
    dtype = x.dtype
    if not x.is_cuda:
        x = x.to(torch.promote_types(x.dtype, cos.dtype))
    cos, sin = (table[:, None, None, :] if x.is_cuda else table.to(x.dtype)[:, None, None, :] for table in (cos, sin))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if offset:
        out[..., :offset] = x[..., :offset]
    if end < x.shape[-1]:
        out[..., end:] = x[..., end:]
    # [..., 2, D / 2] or [..., D / 2, 2]: both features of a pair are multiplied by the cosine at once
    pair, sizes = (-1, (half, 2)) if interleaved else (-2, (2, half))
    x, y = (each[..., offset:end].unflatten(-1, sizes) for each in (x, out))
    torch.mul(x, cos.unsqueeze(pair), out=y)
    (x1, x2), (y1, y2) = x.unbind(pair), y.unbind(pair)
    y1.addcmul_(x2, sin, value=-sign)
    y2.addcmul_(x1, sin, value=sign)
    return out.to(dtype)


class Rotation(torch.autograd.Function):
    """Rotation by rotate(x, cos, sin, interleaved, offset, sign); backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx, rotate, x, cos, sin, interleaved, offset):
        ctx.save_for_backward(cos, sin)
        ctx.rotate, ctx.layout = rotate, (interleaved, offset)
        return rotate(x, cos, sin, interleaved, offset, 1)

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.rotate(grad, *ctx.saved_tensors, *ctx.layout, -1), None, None, None, None


def apply_rope(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """Rotate R features of every head, from `offset` on, by its position's angles.

    Shapes: x [S, B, N, D]; cos, sin [S, R/2] fp32 (or the dtype of x), offset + R <= D. Returns: like x, contiguous.
    Source: RoFormer (arXiv 2104.09864).
    """
    return Rotation.apply(_rotate, x_SBND, cos, sin, interleaved, offset)
