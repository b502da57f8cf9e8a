"""Give an auxiliary loss its gradient without carrying the loss to the end of the model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Balancing:
    """Kernels of the balancing losses and of attaching their gradient: see ops/triton_router.py."""

    count: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor]]
    attach: Callable[..., Tensor]


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss) * ctx.scale, None


def attach_loss(x: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return x; its backward also starts that of `loss`, every element weighted by `scale`.

    Source: the auxiliary-loss autograd hook of Megatron-Core, with the scale passed in instead of saved in a class.
    """
    return _AttachLoss.apply(x, loss, scale)


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, *pairs):
        ctx.save_for_backward(*pairs[1::2])
        ctx.scale, ctx.dtypes = scale, [tensor.dtype for tensor in pairs[::2]]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grads = []
        for known, dtype in zip(ctx.saved_tensors, ctx.dtypes):
            grads += [(known * ctx.scale).to(dtype), None]
        return grad, None, *grads


def attach_gradients(x: Tensor, scale: float | Tensor, *pairs: Tensor) -> Tensor:
    """Return x; its backward gives tensors the gradients that are known already, each times `scale`.

    pairs: a tensor and its gradient, the next tensor and its gradient, and so on.
    """
    return _AttachGradients.apply(x, scale, *pairs)
