"""The products of the output layer: logits of hidden states, and from the logits' gradient those of both operands."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.ops.fp8 import QuantizedProducts


@dataclass(frozen=True)
class LogitProducts:
    """Logits in `dtype` (None: that of the operands), their gradient in the weight's; quantized: products in fewer bits.

    A wider dtype than that of the operands keeps what the product has summed up in fp32; a narrower one rounds it.
    Shapes: x [..., H], weight [V, H], logits and their gradient [..., V].
    """

    dtype: torch.dtype | None = None
    quantized: QuantizedProducts | None = None

    @property
    def plain(self) -> bool:
        """Whether the weight's gradient is grad^T x of narrowed operands."""
        return self.quantized is None

    def format(self, weight: Tensor) -> torch.dtype:
        """Of the logits."""
        return weight.dtype if self.dtype is None else self.dtype

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight^T."""
        dtype = self.format(weight)
        if self.quantized is not None:
            return self.quantized.output(x, weight, dtype)
        if torch.finfo(dtype).bits <= torch.finfo(weight.dtype).bits:
            return (x @ weight.t()).to(dtype)
        if not x.is_cuda:
            return x.to(dtype) @ weight.to(dtype).t()
        logits_TV = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=dtype)
        return logits_TV.view(*x.shape[:-1], -1)

    def narrowed(self, grad: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the logits in the format of the products that take it."""
        return grad.to(weight.dtype)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad @ weight."""
        grad = self.narrowed(grad, weight)
        return grad @ weight if self.quantized is None else self.quantized.input_grad(grad, weight)

    def weight_grad_later(self, grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        """grad^T @ x over all leading dimensions, when it is called."""
        grad = self.narrowed(grad, x)
        if self.quantized is not None:
            return self.quantized.weight_grad_later(grad, x)
        return lambda: grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
