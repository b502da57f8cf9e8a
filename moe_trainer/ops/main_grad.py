"""A weight's gradient, added by the product that computes it to where gradients add up (--gradient-accumulation-fusion).

Without that a product writes a gradient of its own, and another pass reads it and adds it: one kernel and three passes over the weight more,
and in half precision a rounding. torch's own product does it, the one that NVIDIA apex's and TransformerEngine's kernels call.

Whoever adds gradients up gives a weight the attribute `main_grad_sum`; functions that compute its gradient ask `sum_for`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Products(Protocol):
    """What computes a weight's gradient. plain: it is grad^T x in the dtype of these two."""

    plain: bool

    def weight_grad_later(self, grad: Tensor, x: Tensor) -> Callable[[], Tensor]:
        """The gradient over all leading dimensions, when it is called."""


class MainGradSum(NamedTuple):
    """Where a gradient is added: total = beta * total + alpha * gradient. With beta 0 whatever is there is overwritten."""

    total: Tensor
    beta: float
    alpha: float

    def add(self, left_NR: Tensor, right_RK: Tensor) -> None:
        """Add left @ right."""
        total = self.total
        if total.dtype == left_NR.dtype:
            torch.addmm(total, left_NR, right_RK, beta=self.beta, alpha=self.alpha, out=total)
        else:
            torch.addmm(total, left_NR, right_RK, out_dtype=total.dtype, beta=self.beta, alpha=self.alpha, out=total)

    def add_gradient(self, grad: Tensor) -> None:
        """Add one that is computed already."""
        if self.beta:
            self.total.add_(grad, alpha=self.alpha)
        elif self.alpha == 1.0:
            self.total.copy_(grad)
        elif grad.dtype == self.total.dtype:
            torch.mul(grad, self.alpha, out=self.total)
        else:
            self.total.copy_(grad).mul_(self.alpha)  # a product in the gradient's own, coarser dtype would round twice

    def slice(self, index: int) -> "MainGradSum":
        """The sum of one of several weights that are stacked."""
        return self._replace(total=self.total[index])

    def clear(self) -> None:
        """Add nothing."""
        if self.beta == 0.0:
            self.total.zero_()


def adds_products(total: Tensor, operand: Tensor) -> bool:
    """Whether a product of tensors like `operand` can be added to `total`.

    On a CPU in fp32 and fp64: half precision has code generated for every shape it has not met. Half precision into fp32: see `widens`.
    """
    if not operand.is_cuda:
        return total.dtype == operand.dtype and operand.dtype not in HALF_DTYPES
    if total.dtype == operand.dtype:
        return True
    return total.dtype == torch.float32 and widens(operand)


def widens(operand: Tensor) -> bool:
    """Whether torch multiplies matrices like this one in half precision into fp32, without copies."""
    if not operand.is_cuda or operand.dtype not in HALF_DTYPES or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(operand.device) >= (8, 0)


def sum_for(weight: Tensor, operand: Tensor) -> MainGradSum | None:
    """Where the gradient of a weight, a product of tensors like `operand`, is to be added, once; None where it is to be returned."""
    opens = getattr(weight, "main_grad_sum", None)
    return None if opens is None else opens(operand)


def weight_grad(weight: Tensor, grad: Tensor, x: Tensor, products: Products) -> Tensor | None:
    """grad^T x over all leading dimensions, the gradient of a weight; None where it is added to the main gradient."""
    total = sum_for(weight, grad) if products.plain and grad.dtype == x.dtype else None
    if total is None:
        return products.weight_grad_later(grad, x)()
    total.add(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
    return None
