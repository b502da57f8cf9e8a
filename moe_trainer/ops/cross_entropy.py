"""Output projection and cross entropy in one function, so that the logits exist once, in the dtype of the weights.

The forward keeps the logits as the matmul produced them and reads them in row blocks that fit a cache: only a block is
ever widened to fp32. The backward turns the same storage, block by block, into the gradient of the logits
(softmax - onehot, times the token's incoming gradient) and feeds it to the two matmuls. So a step holds one [T, V]
tensor where log_softmax + nll_loss hold three, in fp32. The price: the backward consumes its saved logits and can run
once only; asking again is an error.

Shapes: T tokens, H hidden, V vocabulary (padded columns take part in the softmax, as in Megatron-LM).
"""

import torch
from torch import Tensor

BLOCK_NUMEL = 1 << 18  # fp32 elements widened at a time: 1 MB, half a core's L2


def _row_blocks(rows: int, columns: int, device: torch.device) -> list[tuple[int, int]]:
    """Row ranges of about BLOCK_NUMEL elements (64 times that on accelerators, where launches cost more than caches)."""
    numel = BLOCK_NUMEL if device.type == "cpu" else 64 * BLOCK_NUMEL
    step = max(1, numel // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T):
        logits_TV = x_TH @ weight_VH.t()
        wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        lse_T = torch.empty(logits_TV.shape[0], dtype=wide, device=x_TH.device)
        for start, stop in _row_blocks(*logits_TV.shape, x_TH.device):
            block = logits_TV[start:stop].to(wide)
            torch.logsumexp(block, dim=-1, out=lse_T[start:stop])
        target_T = logits_TV.gather(1, labels_T.unsqueeze(1)).squeeze(1)
        ctx.save_for_backward(x_TH, weight_VH, labels_T, lse_T)
        ctx.logits_TV = logits_TV
        return lse_T - target_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TH, weight_VH, labels_T, lse_T = ctx.saved_tensors
        grad_TV, ctx.logits_TV = ctx.logits_TV, None
        if grad_TV is None:
            raise RuntimeError("linear_cross_entropy: the logits were consumed by an earlier backward; it can run once")
        for start, stop in _row_blocks(*grad_TV.shape, grad_TV.device):
            block = grad_TV[start:stop]
            soft = torch.sub(block, lse_T[start:stop, None], out=block) if block.dtype == lse_T.dtype else (
                block - lse_T[start:stop, None])
            soft.exp_().mul_(grad_T[start:stop, None])
            soft.scatter_add_(1, labels_T[start:stop, None], grad_T[start:stop, None].neg())
            if soft is not block:
                block.copy_(soft)
        grad_x = grad_TV @ weight_VH if ctx.needs_input_grad[0] else None
        grad_weight = grad_TV.t() @ x_TH if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def linear_cross_entropy(x: Tensor, weight_VH: Tensor, labels: Tensor) -> Tensor:
    """Per-token loss -log softmax(x @ weight.T)[label], fp32, of the same leading shape as the labels.

    Shapes: x [..., H]; weight [V, H]; labels [...] int64 in [0, V). Differentiable once.
    """
    loss_T = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight_VH, labels.reshape(-1))
    return loss_T.view(labels.shape)
