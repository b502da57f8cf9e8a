"""Output projection and cross entropy in one function, so that only one [T, V] tensor ever exists, in the dtype of the
weights.

The matmul's result is read in row blocks that fit a cache; only a block is ever widened to fp32. The forward replaces
the logits, in place, by their softmax: the backward then needs one multiplication per element, by the token's incoming
gradient, to turn the same storage into the gradient of the logits for the two matmuls. The label's column is set from
the loss itself, exp(-loss) - 1, so that rounding of the stored values cannot spoil it where the prediction is nearly
certain. The loss is log-sum-exp - logit(label), with the log-sum-exp found as max(logits) - log(max(softmax)): torch's
softmax is one fused pass over the block, and the largest probability is at least 1/V. log_softmax + nll_loss hold three
such tensors in fp32 and take the exponential twice. The price: the backward consumes what the forward kept, and can run
once only; asking again is an error.

Shapes: T tokens, H hidden, V vocabulary (padded columns take part in the softmax, as in Megatron-LM).
"""

import torch
from torch import Tensor

BLOCK_NUMEL = 1 << 18  # fp32 elements widened at a time: 1 MB, a core's L2
FP16_GAIN = 2.0**15  # fp16 stores probabilities times this, to keep the small ones; bf16 and fp32 have the range


def _row_blocks(rows: int, columns: int, device: torch.device) -> list[tuple[int, int]]:
    """Row ranges of about BLOCK_NUMEL elements (64 times that on accelerators: launches cost more than caches)."""
    numel = BLOCK_NUMEL if device.type == "cpu" else 64 * BLOCK_NUMEL
    step = max(1, numel // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T):
        probs_TV = x_TH @ weight_VH.t()
        wide = torch.promote_types(probs_TV.dtype, torch.float32)
        loss_T = torch.empty(probs_TV.shape[0], dtype=wide, device=x_TH.device)
        for start, stop in _row_blocks(*probs_TV.shape, x_TH.device):
            kept = probs_TV[start:stop]
            logits = kept.to(wide)
            probs = torch.softmax(logits, dim=1)
            log_sum_exp = logits.amax(dim=1).sub_(probs.amax(dim=1).log_())
            target = logits.gather(1, labels_T[start:stop, None]).squeeze(1)
            torch.sub(log_sum_exp, target, out=loss_T[start:stop])
            kept.copy_(probs.mul_(FP16_GAIN) if kept.dtype == torch.float16 else probs)
        ctx.save_for_backward(x_TH, weight_VH, labels_T, loss_T)
        ctx.probs_TV = probs_TV
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TH, weight_VH, labels_T, loss_T = ctx.saved_tensors
        grad_TV, ctx.probs_TV = ctx.probs_TV, None
        if grad_TV is None:
            raise RuntimeError("linear_cross_entropy: its logits were consumed by an earlier backward; it can run once")
        factor_T1 = (grad_T / FP16_GAIN if grad_TV.dtype == torch.float16 else grad_T).unsqueeze(1)
        for start, stop in _row_blocks(*grad_TV.shape, grad_TV.device):
            block = grad_TV[start:stop]
            if block.dtype == factor_T1.dtype:
                block.mul_(factor_T1[start:stop])
            else:
                block.copy_(block.to(factor_T1.dtype).mul_(factor_T1[start:stop]))
        at_label_T = torch.expm1(-loss_T).mul_(grad_T).to(grad_TV.dtype)
        # not scatter_: it copies a half-precision tensor whole, twice
        grad_TV[torch.arange(len(labels_T), device=labels_T.device), labels_T] = at_label_T
        grad_x = grad_TV @ weight_VH if ctx.needs_input_grad[0] else None
        grad_weight = grad_TV.t() @ x_TH if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def linear_cross_entropy(x: Tensor, weight_VH: Tensor, labels: Tensor) -> Tensor:
    """Per-token loss -log softmax(x @ weight.T)[label], fp32, of the same leading shape as the labels.

    Shapes: x [..., H]; weight [V, H]; labels [...] int64 in [0, V). Differentiable once.
    """
    loss_T = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight_VH, labels.reshape(-1))
    return loss_T.view(labels.shape)
