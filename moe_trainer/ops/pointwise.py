"""Normalization and activation functions with hand-written backwards.

Eager torch pays per pass over memory, so the backwards touch each tensor as few times as possible: reductions are
matrix-vector products, results are written into the gradient that autograd returns, and nothing is saved that the input
does not hold. bf16 and fp16 inputs are normalized in fp32; fp64 stays fp64 for gradcheck.

Shapes: T tokens, H features, F width of an activation's output.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):
        x_TH = x.reshape(-1, x.shape[-1])
        wide_TH = x_TH.to(_wide(x.dtype))  # mixed-dtype arithmetic is slower than one conversion
        rstd_T1 = torch.linalg.vector_norm(wide_TH, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        y_TH = torch.mul(wide_TH, rstd_T1)
        if weight is not None:
            y_TH.mul_(_gain(weight, y_TH.dtype, zero_centered))
        ctx.save_for_backward(x_TH, weight, rstd_T1)
        ctx.zero_centered = zero_centered
        out_dtype = x.dtype if weight is None else weight.dtype
        return y_TH.to(out_dtype).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x_TH, weight, rstd_T1 = ctx.saved_tensors
        g_TH, wide_TH = grad.reshape(x_TH.shape).to(rstd_T1.dtype), x_TH.to(rstd_T1.dtype)
        product_TH = g_TH * wide_TH
        grad_weight = None
        if weight is None:
            dot_T1 = product_TH.sum(-1, keepdim=True)
            grad_x = g_TH * rstd_T1
        else:
            gain_H = _gain(weight, g_TH.dtype, ctx.zero_centered)
            dot_T1 = (product_TH @ gain_H).unsqueeze_(-1)
            grad_x = (g_TH * gain_H).mul_(rstd_T1)
            if ctx.needs_input_grad[1]:
                grad_weight = (rstd_T1.squeeze(-1) @ product_TH).to(weight.dtype)
        # d rstd / dx = -rstd^3 x / H
        grad_x.addcmul_(wide_TH, dot_T1.mul_(rstd_T1.pow(3)).div_(x_TH.shape[-1]), value=-1)
        return grad_x.to(x_TH.dtype).view(grad.shape), grad_weight, None, None


def _gain(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    gain_H = weight.to(dtype)
    return gain_H + 1 if zero_centered else gain_H


class _WideRMSNorm(torch.autograd.Function):
    """torch's fused kernel in fp32, where its single dtype of x and gain would round the gain; saves x as it is."""

    @staticmethod
    def forward(ctx, x_TH, weight, eps, zero_centered):
        wide = _wide(torch.promote_types(x_TH.dtype, weight.dtype))
        gain_H = _gain(weight, wide, zero_centered)
        y_TH, rstd_T1 = torch.ops.aten._fused_rms_norm(x_TH.to(wide), gain_H.shape, gain_H, eps)
        ctx.save_for_backward(x_TH, gain_H, rstd_T1)
        ctx.dtype = weight.dtype
        return y_TH.to(weight.dtype)

    @staticmethod
    def backward(ctx, grad_TH):
        x_TH, gain_H, rstd_T1 = ctx.saved_tensors
        grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
            grad_TH.to(gain_H.dtype), x_TH.to(gain_H.dtype), gain_H.shape, rstd_T1, gain_H, ctx.needs_input_grad[:2]
        )
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        return (
            grad_x.to(x_TH.dtype) if needs_x else None,
            grad_weight.to(ctx.dtype) if needs_weight else None,
            None,
            None,
        )


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Scale each row to unit root mean square, then by the weight (by 1 + weight if zero-centered).

    On CUDA by torch's fused kernel.

    Returns:
        Like x, in the dtype of the weight.

    Shapes: x [..., H]; weight [H] or None (no gain).
    """
    # F.rms_norm on CPU takes up to 3.5 times as long (fp32, 1024 x 256 and larger) and differs in the last bits
    if not x.is_cuda:
        return _RMSNorm.apply(x, weight, eps, zero_centered)
    x_TH = x.reshape(-1, x.shape[-1])
    if weight is not None and (zero_centered or weight.dtype != x.dtype):
        return _WideRMSNorm.apply(x_TH, weight, eps, zero_centered).view(x.shape)
    return F.rms_norm(x_TH, x.shape[-1:], weight, eps).view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Normalize each row to mean 0 and variance 1, then apply weight (1 + weight if zero-centered) and bias.

    Shapes: x [..., H]; weight, bias [H]. Returns: like x, in the dtype of the weight.
    """
    dtype = x.dtype
    gain_H = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    y = F.layer_norm(x, (x.shape[-1],), gain_H, None if bias is None else bias.to(dtype), eps)
    return y.to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs):
        x_T2F = x.reshape(-1, x.shape[-1])
        gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
        y_TF = F.silu(gate_TF).mul_(up_TF)
        if probs is not None:
            # fp32 probabilities round once, in the product
            probs_T1 = probs.reshape(-1, 1)
            y_TF = y_TF.mul_(probs_T1) if probs.dtype == y_TF.dtype else (y_TF * probs_T1).to(y_TF.dtype)
        ctx.save_for_backward(x_T2F, probs)
        return y_TF.view(*x.shape[:-1], y_TF.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        x_T2F, probs = ctx.saved_tensors
        gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
        g_TF = grad.reshape(gate_TF.shape)
        grad_x = torch.empty_like(x_T2F, memory_format=torch.contiguous_format)
        grad_gate_TF, grad_up_TF = grad_x.chunk(2, dim=-1)
        part_TF = F.silu(gate_TF).mul_(g_TF)
        grad_probs = None
        if probs is None:
            grad_up_TF.copy_(part_TF)
            torch.mul(g_TF, up_TF, out=part_TF)
        else:
            if ctx.needs_input_grad[1]:
                grad_probs = torch.linalg.vecdot(part_TF, up_TF).to(probs.dtype).view(probs.shape)
            local_T1 = probs.reshape(-1, 1).to(x_T2F.dtype)
            torch.mul(part_TF, local_T1, out=grad_up_TF)
            torch.mul(g_TF, up_TF, out=part_TF).mul_(local_T1)
        torch.ops.aten.silu_backward.grad_input(part_TF, gate_TF, grad_input=grad_gate_TF)
        return grad_x.view(*grad.shape[:-1], x_T2F.shape[-1]), grad_probs


def swiglu(x: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, each token times its probability.

    Shapes: x [..., 2F] = [gate; up]; probs x.shape[:-1]; result [..., F] in the dtype of x.
    """
    if probs is not None:
        assert probs.numel() * x.shape[-1] == x.numel(), (probs.shape, x.shape)
    return _SwiGLU.apply(x, probs)


def _base(kind: str, x: Tensor) -> Tensor:
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "silu":
        return F.silu(x)
    if kind == "squared_relu":
        return F.relu(x).square()
    return x * torch.sigmoid(1.702 * x)


@dataclass(frozen=True)
class Activation:
    """The nonlinearity between the two linears of an MLP.

    Args:
        kind: one of KINDS.
        gated: the input holds [gate; up] and the result is f(gate) * (up + linear_offset).
        clamp: upper limit of the gate, and limit of up in both directions (gated only).

    Source: GLU variants (arXiv 2002.05202); squared ReLU (arXiv 2109.08668); offset and clamp as in gpt-oss.
    """

    kind: str
    gated: bool = False
    linear_offset: float = 0.0
    clamp: float | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"unknown activation {self.kind!r}: one of {KINDS}")

    @property
    def in_per_out(self) -> int:
        """Number of input features per output feature."""
        return 2 if self.gated else 1

    def __call__(self, x: Tensor, probs: Tensor | None = None) -> Tensor:
        """Apply to x [..., F or 2F], times probs (x.shape[:-1]); return [..., F] in the dtype of x."""
        if self.gated and self.kind == "silu" and self.linear_offset == 0.0 and self.clamp is None:
            return swiglu(x, probs)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            if self.clamp is not None:
                gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
            y = _base(self.kind, gate) * (up + self.linear_offset if self.linear_offset else up)
        else:
            y = _base(self.kind, x)
        return y if probs is None else (y * probs.unsqueeze(-1)).to(x.dtype)
