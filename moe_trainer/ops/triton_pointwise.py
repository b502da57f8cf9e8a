"""Activations of MLPs times the tokens' probabilities, one Triton kernel each way.

The torch version (ops/expert_mlp.py) needs six passes over [R, F] forward and ten backward for SwiGLU. Here h is read
once and the result written once; one program per token also sums the probability's gradient, so results are
reproducible. Intermediates are not rounded: bf16 results differ from the torch version's by its roundings.

Shapes: R tokens, F width of the result; h [R, 2F] = [gate; up] for SwiGLU, [R, F] for gelu and squared ReLU; p [R] or
None.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.expert_mlp import ActivationFns
from moe_trainer.ops.pointwise import Activation
from moe_trainer.ops.triton_blocks import block_size, contiguous_rows, num_warps_for, wide


@triton.jit
def _positive(x):
    """max(x, 0), and NaN of NaN: tl.maximum returns 0 then."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _value(gate, up, KIND: tl.constexpr):
    """f(gate) * up for SwiGLU, f(gate) for the others."""
    if KIND == "swiglu":
        value = gate / (1.0 + tl.exp(-gate)) * up
    elif KIND == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        positive = _positive(gate)
        value = positive * positive
    return value


@triton.jit
def _slope(gate, KIND: tl.constexpr):
    """f'(gate)."""
    if KIND == "swiglu":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    elif KIND == "gelu":
        slope = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        slope = 2.0 * _positive(gate)
    return slope


@triton.jit
def forward_kernel(h, p, a, h_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One row, one block of columns."""
    WIDE: tl.constexpr = wide(h.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = h + row * h_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(WIDE)
    up = gate
    if KIND == "swiglu":
        up = tl.load(at + width, mask=inside, other=0.0).to(WIDE)
    value = _value(gate, up, KIND)
    if p is not None:
        value *= tl.load(p + row).to(WIDE)
    tl.store(a + row * width + column, value.to(a.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    h, p, grad_a, a, grad_h, grad_p, h_stride, grad_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """One row, block by block. a: for the forward's result, or None."""
    WIDE: tl.constexpr = wide(h.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if p is not None:
        weight = tl.load(p + row).to(WIDE)
    dots = tl.zeros([BLOCK], WIDE)
    grad_width = width
    if KIND == "swiglu":
        grad_width = 2 * width
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        at = h + row * h_stride + column
        gate = tl.load(at, mask=inside, other=0.0).to(WIDE)
        grad = tl.load(grad_a + row * grad_stride + column, mask=inside, other=0.0).to(WIDE)
        to = grad_h + row * grad_width + column
        up = gate
        slope = _slope(gate, KIND)
        if KIND == "swiglu":
            up = tl.load(at + width, mask=inside, other=0.0).to(WIDE)
            silu = gate / (1.0 + tl.exp(-gate))
            tl.store(to + width, (grad * weight * silu).to(grad_h.dtype.element_ty), mask=inside)
            slope = slope * up
        tl.store(to, (grad * weight * slope).to(grad_h.dtype.element_ty), mask=inside)
        value = _value(gate, up, KIND)
        dots += grad * value
        if a is not None:
            tl.store(a + row * width + column, (value * weight).to(a.dtype.element_ty), mask=inside)
    if p is not None:
        tl.store(grad_p + row, tl.sum(dots, 0).to(grad_p.dtype.element_ty))


def _forward(kind: str, h: Tensor, p: Tensor | None) -> Tensor:
    width = h.shape[1] // (2 if kind == "swiglu" else 1)
    h = contiguous_rows(h, h.shape[1])
    a = h.new_empty(h.shape[0], width)
    if a.numel():
        block = block_size(width, 1024)
        forward_kernel[(h.shape[0], triton.cdiv(width, block))](h, p, a, h.stride(0), width, KIND=kind, BLOCK=block)
    return a


def _backward(kind: str, h: Tensor, p: Tensor | None, grad_a: Tensor, again: bool = True):
    """Return a again (unless it is not wanted), the gradient of h, and that of p."""
    width = grad_a.shape[1]
    h, grad_a = contiguous_rows(h, h.shape[1]), contiguous_rows(grad_a, width)
    a = h.new_empty(h.shape[0], width) if again else None
    grad_h = torch.empty_like(h, memory_format=torch.contiguous_format)
    grad_p = None if p is None else torch.empty_like(p, memory_format=torch.contiguous_format)
    if h.shape[0]:
        block = block_size(width, 2048)
        strides, warps = (h.stride(0), grad_a.stride(0)), num_warps_for(4 * block)
        backward_kernel[(h.shape[0],)](
            h, p, grad_a, a, grad_h, grad_p, *strides, width, KIND=kind, BLOCK=block, num_warps=warps
        )
    return a, grad_h, grad_p


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs):
        x_T2F = contiguous_rows(x, x.shape[-1])
        p_T = None if probs is None else probs.reshape(-1).contiguous()
        ctx.save_for_backward(x_T2F, p_T)
        return _forward("swiglu", x_T2F, p_T).view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx, grad):
        x_T2F, p_T = ctx.saved_tensors
        _, grad_x, grad_p = _backward("swiglu", x_T2F, p_T, grad.reshape(x_T2F.shape[0], -1), again=False)
        return grad_x.view(*grad.shape[:-1], x_T2F.shape[1]), None if grad_p is None else grad_p.view(grad.shape[:-1])


def swiglu(x: Tensor, probs: Tensor | None = None) -> Tensor:
    """silu(gate) * up, each row times its probability; as ops/pointwise.py: swiglu."""
    return _SwiGLU.apply(x, probs)


SWIGLU = ActivationFns(functools.partial(_forward, "swiglu"), functools.partial(_backward, "swiglu"))
GELU = ActivationFns(functools.partial(_forward, "gelu"), functools.partial(_backward, "gelu"))
SQUARED_RELU = ActivationFns(functools.partial(_forward, "squared_relu"), functools.partial(_backward, "squared_relu"))
ACTIVATIONS = (
    (Activation("silu", gated=True), swiglu, SWIGLU),
    (Activation("gelu"), None, GELU),
    (Activation("squared_relu"), None, SQUARED_RELU),
)
"""Activations with kernels: the function for dense MLPs, or None, and those of experts."""
