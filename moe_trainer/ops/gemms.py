"""The three GEMMs of a linear layer: output, gradient of the input, gradient of the weight.

`LinearGemms` is the interface. `UnquantizedGemms` and `LMHeadGemms` implement it here; quantization/gemms.py does with
quantized operands. Layers and autograd functions take one of them and never ask which.

Shape letters: T tokens (any leading dimensions), K input width, N output width, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

WgradFn = Callable[..., Tensor]
"""Computes a weight gradient, in the dtype that may be given, else in that of its operands."""


def multiply(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return left @ right of matrices, in their dtype or in a wider one, to which nothing is rounded before."""
    if dtype in (None, left.dtype):
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else left.to(dtype) @ right.to(dtype)


class LinearGemms(Protocol):
    """The three GEMMs of a linear layer; all leading dimensions are tokens.

    is_quantized: the weight gradient is not simply grad^T @ x, so it cannot be accumulated by the GEMM itself
    (ops/main_grad.py).
    """

    @property
    def is_quantized(self) -> bool: ...

    def output(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight^T, in `dtype` or that of x."""

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return grad @ weight."""

    def make_wgrad_fn(self, grad: Tensor, x: Tensor) -> WgradFn:
        """Return a function that computes grad^T @ x."""


class UnquantizedGemms:
    """GEMMs in the dtype of their operands."""

    is_quantized = False

    def output(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight^T, in `dtype` or that of x."""
        y = F.linear(x, weight)
        return y if dtype is None else y.to(dtype)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return grad @ weight."""
        return grad @ weight

    def make_wgrad_fn(self, grad: Tensor, x: Tensor) -> WgradFn:
        """Return a function that computes grad^T @ x."""
        return functools.partial(multiply, grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


@dataclass(frozen=True)
class LMHeadGemms:
    """GEMMs of the output layer, with a separate dtype of logits (--output-logit-dtype).

    A wider dtype than that of the operands retains the fp32 accumulation; a narrower one rounds it.

    Args:
        dtype: of the logits; None for that of the weight.
        quantized: GEMMs with quantized operands.
    """

    dtype: torch.dtype | None = None
    quantized: LinearGemms | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the operands are quantized."""
        return self.quantized is not None

    def logit_dtype(self, weight: Tensor) -> torch.dtype:
        """Return the dtype of the logits."""
        return weight.dtype if self.dtype is None else self.dtype

    def output(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits [..., V], in `dtype` or `logit_dtype`."""
        dtype = dtype or self.logit_dtype(weight)
        if self.quantized is not None:
            return self.quantized.output(x, weight, dtype)
        if torch.finfo(dtype).bits <= torch.finfo(weight.dtype).bits:
            return (x @ weight.t()).to(dtype)
        if not x.is_cuda:
            return x.to(dtype) @ weight.to(dtype).t()
        logits_TV = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=dtype)
        return logits_TV.view(*x.shape[:-1], -1)

    def cast_grad(self, grad: Tensor, operand: Tensor) -> Tensor:
        """Cast the gradient of the logits to the dtype of the operand it is multiplied by."""
        return grad.to(operand.dtype)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return grad @ weight."""
        grad = self.cast_grad(grad, weight)
        return grad @ weight if self.quantized is None else self.quantized.input_grad(grad, weight)

    def make_wgrad_fn(self, grad: Tensor, x: Tensor) -> WgradFn:
        """Return a function that computes grad^T @ x."""
        gemms = UnquantizedGemms() if self.quantized is None else self.quantized
        return gemms.make_wgrad_fn(self.cast_grad(grad, x), x)
