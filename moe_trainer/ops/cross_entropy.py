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

Where the vocabulary is cut over ranks (layers/vocab.py) the same two passes run on each rank's columns: the forward stores
the softmax over them alone, and the factor that makes it the softmax over all, exp(own log-sum-exp - that of all), joins
the token's incoming gradient.

Shapes: T tokens, H hidden, V vocabulary, or this rank's columns of it (padded columns take part in the softmax, as in Megatron-LM).
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


def softmax_in_place(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits by their softmax over V (times FP16_GAIN in fp16). Returns: log-sum-exp and the label's logit.

    Shapes: labels int64 in [0, V); both results [T], fp32 or wider.
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    log_sum_exp_T = torch.empty(logits_TV.shape[0], dtype=wide, device=logits_TV.device)
    target_T = torch.empty_like(log_sum_exp_T)
    for start, stop in _row_blocks(*logits_TV.shape, logits_TV.device):
        kept = logits_TV[start:stop]
        logits = kept.to(wide)
        probs = torch.softmax(logits, dim=1)
        torch.sub(logits.amax(dim=1), probs.amax(dim=1).log_(), out=log_sum_exp_T[start:stop])
        torch.gather(logits, 1, labels_T[start:stop, None], out=target_T[start:stop, None])
        kept.copy_(probs.mul_(FP16_GAIN) if kept.dtype == torch.float16 else probs)
    return log_sum_exp_T, target_T


def gradient_in_place(probs_TV: Tensor, labels_T: Tensor, factor_T: Tensor, at_label_T: Tensor,
                      mine_T: Tensor | None = None) -> None:
    """Turn what softmax_in_place left into the gradient of the logits.

    factor_T: of every probability. at_label_T: the label's element. mine_T: bool, tokens whose label is one of these columns;
    None means all.
    """
    factor_T1 = (factor_T / FP16_GAIN if probs_TV.dtype == torch.float16 else factor_T).unsqueeze(1)
    for start, stop in _row_blocks(*probs_TV.shape, probs_TV.device):
        block = probs_TV[start:stop]
        if block.dtype == factor_T1.dtype:
            block.mul_(factor_T1[start:stop])
        else:
            block.copy_(block.to(factor_T1.dtype).mul_(factor_T1[start:stop]))
    at_label_T = at_label_T.to(probs_TV.dtype)
    # not scatter_: it copies a half-precision tensor whole, twice
    place = torch.arange(len(labels_T), device=labels_T.device), labels_T
    probs_TV[place] = at_label_T if mine_T is None else torch.where(mine_T, at_label_T, probs_TV[place])


class ConsumedError(RuntimeError):
    """A second backward through a loss whose first one has used up what the forward kept."""

    def __init__(self):
        super().__init__("linear_cross_entropy: its logits were consumed by an earlier backward; it can run once")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T):
        probs_TV = x_TH @ weight_VH.t()
        log_sum_exp_T, target_T = softmax_in_place(probs_TV, labels_T)
        loss_T = log_sum_exp_T.sub_(target_T)
        ctx.save_for_backward(x_TH, weight_VH, labels_T, loss_T)
        ctx.probs_TV = probs_TV
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TH, weight_VH, labels_T, loss_T = ctx.saved_tensors
        grad_TV, ctx.probs_TV = ctx.probs_TV, None
        if grad_TV is None:
            raise ConsumedError
        gradient_in_place(grad_TV, labels_T, grad_T, torch.expm1(-loss_T).mul_(grad_T))
        grad_x = grad_TV @ weight_VH if ctx.needs_input_grad[0] else None
        grad_weight = grad_TV.t() @ x_TH if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def linear_cross_entropy(x: Tensor, weight_VH: Tensor, labels: Tensor) -> Tensor:
    """Per-token loss -log softmax(x @ weight.T)[label], fp32, of the same leading shape as the labels.

    Shapes: x [..., H]; weight [V, H]; labels [...] int64 in [0, V). Differentiable once.
    """
    loss_T = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight_VH, labels.reshape(-1))
    return loss_T.view(labels.shape)
