"""A gated DeltaNet layer's heart with kernels: the short convolution by Triton kernels of our own, the delta rule by those of flash-linear-attention.

The convolution saves its input alone, and computes what it needs of its result again in backward; the sums over positions that are the
weight's gradient are written by each program for its own, and added by another kernel: no atomics. Gates are computed by torch.

Packed documents take the torch version: flash-linear-attention wants to know on the host where they begin.

Shapes: as in ops/gated_delta_rule.py.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops import gated_delta_rule
from moe_trainer.ops.gated_delta_rule import Heads
from moe_trainer.ops.triton_blocks import sum_partials, wide

POSITIONS, CHANNELS = 64, 64  # of a program


@triton.jit
def _before_silu(x, weight, position, channel, length, channels, stride, first, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """The convolution at some positions and channels, [positions, channels]; weight: [C, W] in the rows of its channels."""
    total = tl.zeros_like(position[:, None] + channel[None, :]).to(WIDE)
    for back in tl.static_range(WIDTH):
        at = position - back
        inside = ((at >= 0) & (at < length))[:, None] & (channel < channels)[None, :]
        factor = tl.load(weight + channel * WIDTH + WIDTH - 1 - back, mask=channel < channels, other=0.0).to(WIDE)
        total += tl.load(x + first + at[:, None].to(tl.int64) * stride + channel[None, :], mask=inside, other=0.0).to(WIDE) * factor[None, :]
    return total


@triton.jit
def convolve_kernel(x, weight, y, length, batch, channels, stride_s, stride_b, WIDTH: tl.constexpr, WIDE: tl.constexpr, POSITIONS: tl.constexpr,
                    CHANNELS: tl.constexpr):
    """y = SiLU of the convolution; y is contiguous."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.program_id(2).to(tl.int64)
    value = _before_silu(x, weight, position, channel, length, channels, stride_s, sequence * stride_b, WIDTH, WIDE)
    value = value / (1.0 + tl.exp(-value))
    to = y + (position[:, None].to(tl.int64) * batch + sequence) * channels + channel[None, :]
    tl.store(to, value.to(y.dtype.element_ty), mask=(position < length)[:, None] & (channel < channels)[None, :])


@triton.jit
def gradient_kernel(x, weight, grad, grad_x, partial, length, batch, channels, stride_s, stride_b, grad_stride_s, grad_stride_b, WIDTH: tl.constexpr,
                    WIDE: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr):
    """The gradient of x, and this program's share of the weight's: partial [programs, C, W]."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.program_id(2).to(tl.int64)
    known = channel < channels
    result = tl.zeros([POSITIONS, CHANNELS], WIDE)
    mine = partial + ((tl.program_id(0) * batch + sequence) * channels + channel) * WIDTH
    for ahead in tl.static_range(WIDTH):
        later = position + ahead
        value = _before_silu(x, weight, later, channel, length, channels, stride_s, sequence * stride_b, WIDTH, WIDE)
        share = 1.0 / (1.0 + tl.exp(-value))
        at = grad + later[:, None].to(tl.int64) * grad_stride_s + sequence * grad_stride_b + channel[None, :]
        slope = tl.load(at, mask=(later < length)[:, None] & known[None, :], other=0.0).to(WIDE) * share * (1.0 + value * (1.0 - share))
        factor = tl.load(weight + channel * WIDTH + WIDTH - 1 - ahead, mask=known, other=0.0).to(WIDE)
        result += slope * factor[None, :]
        here = x + position[:, None].to(tl.int64) * stride_s + sequence * stride_b + channel[None, :]
        read = tl.load(here, mask=(position < length)[:, None] & known[None, :], other=0.0).to(WIDE)
        tl.store(mine + WIDTH - 1 - ahead, tl.sum(read * slope, 0), mask=known)
    to = grad_x + (position[:, None].to(tl.int64) * batch + sequence) * channels + channel[None, :]
    tl.store(to, result.to(grad_x.dtype.element_ty), mask=(position < length)[:, None] & known[None, :])


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBC, weight_CW):
        x_SBC, weight_CW = x_SBC if x_SBC.stride(2) == 1 else x_SBC.contiguous(), weight_CW.contiguous()
        ctx.save_for_backward(x_SBC, weight_CW)
        length, batch, channels = x_SBC.shape
        y_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
        if y_SBC.numel():
            convolve_kernel[_grid(x_SBC)](x_SBC, weight_CW, y_SBC, length, batch, channels, *x_SBC.stride()[:2], WIDTH=weight_CW.shape[1],
                                          WIDE=wide(x_SBC.dtype), POSITIONS=POSITIONS, CHANNELS=CHANNELS)
        return y_SBC

    @staticmethod
    def backward(ctx, grad_SBC):
        x_SBC, weight_CW = ctx.saved_tensors
        length, batch, channels = x_SBC.shape
        grad_SBC = grad_SBC if grad_SBC.stride(2) == 1 else grad_SBC.contiguous()
        programs, dtype = triton.cdiv(length, POSITIONS) * batch, torch.promote_types(x_SBC.dtype, torch.float32)
        grad_x = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
        partial = torch.empty(programs, weight_CW.numel(), dtype=dtype, device=x_SBC.device)
        if x_SBC.numel():
            gradient_kernel[_grid(x_SBC)](
                x_SBC, weight_CW, grad_SBC, grad_x, partial, length, batch, channels, *x_SBC.stride()[:2], *grad_SBC.stride()[:2],
                WIDTH=weight_CW.shape[1], WIDE=wide(dtype), POSITIONS=POSITIONS, CHANNELS=CHANNELS, num_warps=8)
        return grad_x, sum_partials(partial, torch.empty_like(weight_CW))


def _grid(x_SBC: Tensor) -> tuple[int, int, int]:
    length, batch, channels = x_SBC.shape
    return triton.cdiv(length, POSITIONS), triton.cdiv(channels, CHANNELS), batch


def causal_convolution(x_SBC: Tensor, weight_CW: Tensor) -> Tensor:
    """As ops/gated_delta_rule.py: causal_convolution, without documents; computed in fp32 (fp64) and rounded once."""
    return _Convolution.apply(x_SBC, weight_CW)


def gated_delta(rule: Callable[..., tuple[Tensor, Tensor | None]], x_SBC: Tensor, beta_SBN: Tensor, alpha_SBN: Tensor, weight_CW: Tensor,
                a_log_N: Tensor, dt_bias_N: Tensor, heads: Heads, ids_BS: Tensor | None = None) -> Tensor:
    """As ops/gated_delta_rule.py: gated_delta. rule: chunk_gated_delta_rule of flash-linear-attention."""
    if ids_BS is not None:
        return gated_delta_rule.gated_delta(x_SBC, beta_SBN, alpha_SBN, weight_CW, a_log_N, dt_bias_N, heads, ids_BS)
    q, k, v = causal_convolution(x_SBC, weight_CW).transpose(0, 1).split(heads.channels, -1)
    q, k = (each.unflatten(-1, (heads.keys, heads.key_dim)) for each in (q, k))
    fp32 = torch.promote_types(x_SBC.dtype, torch.float32)
    g_SBN = -a_log_N.to(fp32).exp() * F.softplus(alpha_SBN.to(fp32) + dt_bias_N.to(fp32))
    y_BSNE, _ = rule(q, k, v.unflatten(-1, (heads.values, heads.value_dim)), g_SBN.transpose(0, 1), beta_SBN.to(fp32).sigmoid().transpose(0, 1),
                     use_qk_l2norm_in_kernel=True)
    return y_BSNE.transpose(0, 1)


def load() -> Callable[..., Tensor]:
    """gated_delta by the installed package. Raises: ImportError."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return functools.partial(gated_delta, chunk_gated_delta_rule)
