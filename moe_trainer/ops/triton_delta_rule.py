"""The core of a gated DeltaNet layer with kernels.

`gated_delta` uses our Triton kernels for convolution and delta rule; `gated_delta_by` uses flash-linear-attention's
delta rule, with gates in torch. The convolution saves only its input; weight gradients are partial sums added by a
second kernel, without atomics. Packed documents always use our kernels, because flash-linear-attention needs the
document boundaries on the host.

Shapes: as in ops/gated_delta_rule.py.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops import triton_delta_chunks
from moe_trainer.ops.gated_delta_rule import Heads
from moe_trainer.ops.triton_blocks import sum_partials, wide
from moe_trainer.ops.triton_delta_chunks import Gates

POSITIONS, CHANNELS = tl.constexpr(64), tl.constexpr(64)  # of a program


@triton.jit
def _same(ids, one, other, length):
    """Return whether both positions exist and are in one document."""
    there = (one >= 0) & (other >= 0) & (one < length) & (other < length)
    return there & (tl.load(ids + one, mask=there, other=0) == tl.load(ids + other, mask=there, other=0))


@triton.jit
def _program():
    """Of this program: positions, channels, and the sequence."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return position, channel, tl.program_id(2).to(tl.int64)


@triton.jit
def _before_silu(x, weight, ids, position, channel, length, channels, stride, WIDTH: tl.constexpr):
    """The convolution of one sequence at some positions and channels, [positions, channels]; weight [C, W]."""
    WIDE: tl.constexpr = wide(x.dtype.element_ty)
    total = tl.zeros_like(position[:, None] + channel[None, :]).to(WIDE)
    for back in tl.static_range(WIDTH):
        at = position - back
        seen = (at >= 0) & (at < length)
        if ids is not None:
            seen = _same(ids, at, position, length)
        inside = seen[:, None] & (channel < channels)[None, :]
        factor = tl.load(weight + channel * WIDTH + WIDTH - 1 - back, mask=channel < channels, other=0.0).to(WIDE)
        value = tl.load(x + at[:, None].to(tl.int64) * stride + channel[None, :], mask=inside, other=0.0)
        total += value.to(WIDE) * factor[None, :]
    return total


@triton.jit
def convolve_kernel(x, weight, ids, y, length, channels, stride_s, stride_b, WIDTH: tl.constexpr):
    """Write the SiLU of the convolution to the contiguous y."""
    position, channel, sequence = _program()
    x += sequence * stride_b
    if ids is not None:
        ids += sequence * length
    value = _before_silu(x, weight, ids, position, channel, length, channels, stride_s, WIDTH)
    value = value / (1.0 + tl.exp(-value))
    to = y + (position[:, None].to(tl.int64) * tl.num_programs(2) + sequence) * channels + channel[None, :]
    tl.store(to, value.to(y.dtype.element_ty), mask=(position < length)[:, None] & (channel < channels)[None, :])


@triton.jit
def gradient_kernel(
    x, weight, ids, grad, grad_x, partial, length, channels, stride_s, stride_b, grad_s, grad_b, WIDTH: tl.constexpr
):
    """The gradient of x, and this program's share of the weight's: partial [programs, C, W].

    grad_s, grad_b: strides of grad.
    """
    WIDE: tl.constexpr = partial.dtype.element_ty
    position, channel, sequence = _program()
    x += sequence * stride_b
    if ids is not None:
        ids += sequence * length
    known = channel < channels
    result = tl.zeros([POSITIONS, CHANNELS], WIDE)
    grad += sequence * grad_b
    mine = partial + ((tl.program_id(0) * tl.num_programs(2) + sequence) * channels + channel) * WIDTH
    for ahead in tl.static_range(WIDTH):
        later = position + ahead
        value = _before_silu(x, weight, ids, later, channel, length, channels, stride_s, WIDTH)
        share = 1.0 / (1.0 + tl.exp(-value))
        at = grad + later[:, None].to(tl.int64) * grad_s + channel[None, :]
        slope = tl.load(at, mask=(later < length)[:, None] & known[None, :], other=0.0).to(WIDE)
        slope = slope * share * (1.0 + value * (1.0 - share))
        if ids is not None:
            slope = tl.where(_same(ids, position, later, length)[:, None], slope, 0.0)
        factor = tl.load(weight + channel * WIDTH + WIDTH - 1 - ahead, mask=known, other=0.0).to(WIDE)
        result += slope * factor[None, :]
        here = x + position[:, None].to(tl.int64) * stride_s + channel[None, :]
        read = tl.load(here, mask=(position < length)[:, None] & known[None, :], other=0.0).to(WIDE)
        tl.store(mine + WIDTH - 1 - ahead, tl.sum(read * slope, 0), mask=known)
    to = grad_x + (position[:, None].to(tl.int64) * tl.num_programs(2) + sequence) * channels + channel[None, :]
    tl.store(to, result.to(grad_x.dtype.element_ty), mask=(position < length)[:, None] & known[None, :])


def convolution_forward(x_SBC: Tensor, weight_CW: Tensor, ids_BS: Tensor | None) -> Tensor:
    """As causal_convolution, without a gradient; x's channels lie side by side."""
    length, _, channels = x_SBC.shape
    y_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
    if y_SBC.numel():
        convolve_kernel[_grid(x_SBC)](
            x_SBC, weight_CW, ids_BS, y_SBC, length, channels, *x_SBC.stride()[:2], WIDTH=weight_CW.shape[1]
        )
    return y_SBC


def convolution_backward(
    x_SBC: Tensor, weight_CW: Tensor, ids_BS: Tensor | None, grad_SBC: Tensor
) -> tuple[Tensor, Tensor]:
    """Of x and of the weight."""
    length, _, channels = x_SBC.shape
    grad_SBC, grid = _side_by_side(grad_SBC), _grid(x_SBC)
    grad_x = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
    dtype = torch.promote_types(x_SBC.dtype, torch.float32)
    partial = torch.empty(grid[0] * grid[2], weight_CW.numel(), dtype=dtype, device=x_SBC.device)
    if x_SBC.numel():
        strides = *x_SBC.stride()[:2], *grad_SBC.stride()[:2]
        gradient_kernel[grid](
            x_SBC,
            weight_CW,
            ids_BS,
            grad_SBC,
            grad_x,
            partial,
            length,
            channels,
            *strides,
            weight_CW.shape[1],
            num_warps=8,
        )
    return grad_x, sum_partials(partial, torch.empty_like(weight_CW))


def _grid(x_SBC: Tensor) -> tuple[int, int, int]:
    length, batch, channels = x_SBC.shape
    return triton.cdiv(length, POSITIONS.value), triton.cdiv(channels, CHANNELS.value), batch


def _side_by_side(x_SBC: Tensor) -> Tensor:
    return x_SBC if x_SBC.stride(2) == 1 else x_SBC.contiguous()


def _compact(x_SBC: Tensor, weight_CW: Tensor, ids_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the inputs of the convolution as its kernels take them."""
    return _side_by_side(x_SBC), weight_CW.contiguous(), None if ids_BS is None else ids_BS.contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBC, weight_CW, ids_BS):
        x_SBC, weight_CW, ctx.ids_BS = _compact(x_SBC, weight_CW, ids_BS)
        ctx.save_for_backward(x_SBC, weight_CW)
        return convolution_forward(x_SBC, weight_CW, ctx.ids_BS)

    @staticmethod
    def backward(ctx, grad_SBC):
        x_SBC, weight_CW = ctx.saved_tensors
        return *convolution_backward(x_SBC, weight_CW, ctx.ids_BS, grad_SBC), None


def causal_convolution(x_SBC: Tensor, weight_CW: Tensor, ids_BS: Tensor | None = None) -> Tensor:
    """As ops/gated_delta_rule.py: causal_convolution; computed in fp32 (fp64) and rounded once."""
    return _Convolution.apply(x_SBC, weight_CW, ids_BS)


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBC, beta_SBN, alpha_SBN, weight_CW, a_log_N, dt_bias_N, heads, ids_BS):
        x_SBC, weight_CW, ids_BS = _compact(x_SBC, weight_CW, ids_BS)
        gates = beta_SBN, alpha_SBN, a_log_N, dt_bias_N
        ctx.save_for_backward(x_SBC, weight_CW, *gates)
        ctx.rest = heads, ids_BS
        return triton_delta_chunks.forward(convolution_forward(x_SBC, weight_CW, ids_BS), Gates(*gates, ids_BS), heads)

    @staticmethod
    def backward(ctx, grad_SBNE):
        x_SBC, weight_CW, beta_SBN, alpha_SBN, a_log_N, dt_bias_N = ctx.saved_tensors
        heads, ids_BS = ctx.rest
        gates = Gates(beta_SBN, alpha_SBN, a_log_N, dt_bias_N, ids_BS)
        y_SBC = convolution_forward(x_SBC, weight_CW, ids_BS)
        grad_y, *grads, partial = triton_delta_chunks.backward(y_SBC, gates, heads, grad_SBNE)
        of_rates = sum_partials(partial, torch.empty(partial.shape[1:], dtype=a_log_N.dtype, device=partial.device))
        grad_x, grad_weight = convolution_backward(x_SBC, weight_CW, ids_BS, grad_y)
        return grad_x, *grads, grad_weight, of_rates[0], of_rates[1].to(dt_bias_N.dtype), None, None


def gated_delta(
    x_SBC: Tensor,
    beta_SBN: Tensor,
    alpha_SBN: Tensor,
    weight_CW: Tensor,
    a_log_N: Tensor,
    dt_bias_N: Tensor,
    heads: Heads,
    ids_BS: Tensor | None = None,
) -> Tensor:
    """As ops/gated_delta_rule.py: gated_delta; what the convolution gives is rounded to the dtype of x."""
    return _GatedDelta.apply(x_SBC, beta_SBN, alpha_SBN, weight_CW, a_log_N, dt_bias_N, heads, ids_BS)


def gated_delta_by(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    x_SBC: Tensor,
    beta_SBN: Tensor,
    alpha_SBN: Tensor,
    weight_CW: Tensor,
    a_log_N: Tensor,
    dt_bias_N: Tensor,
    heads: Heads,
    ids_BS: Tensor | None = None,
) -> Tensor:
    """The same by chunk_gated_delta_rule of flash-linear-attention."""
    if ids_BS is not None:
        return gated_delta(x_SBC, beta_SBN, alpha_SBN, weight_CW, a_log_N, dt_bias_N, heads, ids_BS)
    q, k, v = causal_convolution(x_SBC, weight_CW).transpose(0, 1).split(heads.channels, -1)
    q, k = (each.unflatten(-1, (heads.keys, heads.key_dim)) for each in (q, k))
    fp32 = torch.promote_types(x_SBC.dtype, torch.float32)
    g_SBN = -a_log_N.to(fp32).exp() * F.softplus(alpha_SBN.to(fp32) + dt_bias_N.to(fp32))
    y_BSNE, _ = rule(
        q,
        k,
        v.unflatten(-1, (heads.values, heads.value_dim)),
        g_SBN.transpose(0, 1),
        beta_SBN.to(fp32).sigmoid().transpose(0, 1),
        use_qk_l2norm_in_kernel=True,
    )
    return y_BSNE.transpose(0, 1)


def load_fla() -> Callable[..., Tensor]:
    """gated_delta by flash-linear-attention. Raises: ImportError."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return functools.partial(gated_delta_by, chunk_gated_delta_rule)
