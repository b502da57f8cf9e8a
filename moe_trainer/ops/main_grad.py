"""Weight gradients accumulated by the GEMM that computes them (--gradient-accumulation-fusion).

Otherwise a GEMM writes the gradient and another pass adds it: one more kernel, three more passes over the weight, and a
rounding in half precision. torch's own addmm does it, or the kernel of fused_library.py. GEMMs that cannot add, of
quantized operands and of other libraries, write the gradient in the dtype of the sum, and it is added without a
rounding. The owner of the gradient buffer sets `main_grad_sum` and `main_grad_sum_dtype` on a weight; functions that
compute the weight's gradient call `get_main_grad_sum`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.ops.gemms import LinearGemms

HALF_DTYPES = (torch.bfloat16, torch.float16)


def set_main_grad(weight: Tensor, total: Tensor) -> None:
    """Set `main_grad`, where the gradients of a weight are summed; TransformerEngine's GEMMs look for it too."""
    weight.main_grad = total  # type: ignore[attr-defined]  # torch's class does not declare it


def set_main_grad_sum(weight: Tensor, opens: Callable[[Tensor], "MainGradSum | None"], dtype: torch.dtype) -> None:
    """Let `get_main_grad_sum` call `opens`, for a sum of this dtype."""
    weight.main_grad_sum = opens  # type: ignore[attr-defined]  # torch's class does not declare it
    weight.main_grad_sum_dtype = dtype  # type: ignore[attr-defined]  # likewise


class MainGradSum(NamedTuple):
    """Where a gradient is accumulated: total = beta * total + alpha * gradient. beta 0 overwrites.

    Attributes:
        library: whose GEMM adds if beta and alpha are 1, the only sum that it knows; None: torch's.
    """

    total: Tensor
    beta: float
    alpha: float
    library: FusedLibrary | None = None

    def add(self, left_NR: Tensor, right_RK: Tensor) -> None:
        """Add left @ right."""
        total = self.total
        is_plain_sum = self.beta == self.alpha == 1.0
        if self.library is not None and is_plain_sum and self.library.add_product(total, left_NR, right_RK):
            return
        if total.dtype == left_NR.dtype:
            torch.addmm(total, left_NR, right_RK, beta=self.beta, alpha=self.alpha, out=total)
        else:
            torch.addmm(total, left_NR, right_RK, out_dtype=total.dtype, beta=self.beta, alpha=self.alpha, out=total)

    def add_gradient(self, grad: Tensor) -> None:
        """Add a gradient that is already computed."""
        if self.beta:
            self.total.add_(grad, alpha=self.alpha)
        elif self.alpha == 1.0:
            self.total.copy_(grad)
        elif grad.dtype == self.total.dtype:
            torch.mul(grad, self.alpha, out=self.total)
        else:
            self.total.copy_(grad).mul_(self.alpha)  # a GEMM in the gradient's own, coarser dtype would round twice

    def slice(self, index: int) -> "MainGradSum":
        """Return the sum of one of several stacked weights."""
        return self._replace(total=self.total[index])

    def clear(self) -> None:
        """Add nothing."""
        if self.beta == 0.0:
            self.total.zero_()


def can_accumulate_gemm(total: Tensor, operand: Tensor) -> bool:
    """Return whether a GEMM of tensors like `operand` can accumulate in `total`.

    On a CPU only fp32 and fp64, because half precision generates code for every new shape. Half precision into fp32:
    see `can_accumulate_in_fp32`.
    """
    if not operand.is_cuda:
        return total.dtype == operand.dtype and operand.dtype not in HALF_DTYPES
    if total.dtype == operand.dtype:
        return True
    return total.dtype == torch.float32 and can_accumulate_in_fp32(operand)


def can_accumulate_in_fp32(operand: Tensor) -> bool:
    """Return whether torch can multiply half-precision matrices like this one into fp32, without copies."""
    if not operand.is_cuda or operand.dtype not in HALF_DTYPES or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(operand.device) >= (8, 0)


def get_main_grad_sum(weight: Tensor, operand: Tensor) -> MainGradSum | None:
    """Return where to accumulate the gradient of a weight, once; None if the gradient must be returned."""
    opens = getattr(weight, "main_grad_sum", None)
    return None if opens is None else opens(operand)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a weight's gradient is kept until it is added: wider than the weight's if the sum is.

    Gradients that autograd adds are rounded to the weight's dtype in any case.
    """
    total = getattr(weight, "main_grad_sum_dtype", None)
    return weight.dtype if total is None else torch.promote_types(weight.dtype, total)


def is_sum_wider(weight: Tensor) -> bool:
    """Return whether the sum of a weight's gradients has a wider dtype than the weight."""
    return gradient_dtype(weight) != weight.dtype


def add_to_main_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Add a gradient to the main gradient and return None; return the gradient if autograd must add it."""
    total = get_main_grad_sum(weight, grad)
    if total is None:
        return grad
    total.add_gradient(grad)
    return None


def weight_grad_fn(weight: Tensor, grad: Tensor, x: Tensor, gemms: LinearGemms) -> Callable[[], Tensor | None]:
    """Return a function that returns grad^T @ x over all leading dimensions, or adds it to the main gradient."""
    if gemms.is_quantized:
        compute = gemms.make_wgrad_fn(grad, x)
        return lambda: add_to_main_grad(weight, compute(gradient_dtype(weight)))
    grad = grad.to(x.dtype)

    def multiply() -> Tensor | None:
        total = get_main_grad_sum(weight, grad)
        if total is None:
            return gemms.make_wgrad_fn(grad, x)()
        total.add(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
        return None

    return multiply
