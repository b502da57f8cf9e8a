"""Output projection and cross entropy in one function, with a single [T, V] tensor.

Forward replaces the logits in place by their softmax, in row blocks that fit a cache; backward turns the same storage
into the gradient of the logits, so it can run only once. If the tokens' loss weights are known beforehand, chunks of
tokens go through both passes in forward and no [T, V] tensor exists. With a sharded vocabulary (layers/vocab.py) each
rank does this for its columns. Design and numerics: docs/design/cross_entropy.md.

Shapes: T tokens, H hidden, V vocabulary or this rank's columns (padded columns take part in the softmax, as in
Megatron-LM).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.gemms import LMHeadGemms
from moe_trainer.ops.logit_chunks import logit_chunk_size
from moe_trainer.ops.main_grad import MainGradSum, add_to_main_grad, can_accumulate_gemm, weight_grad_fn

BLOCK_NUMEL = 1 << 18  # fp32 elements widened at a time: 1 MB, a core's L2
FP16_GAIN = 2.0**15  # fp16 stores probabilities times this, to keep the small ones; bf16 and fp32 have the range


def _row_blocks(table_TV: Tensor) -> list[tuple[int, int]]:
    """Return row ranges of about BLOCK_NUMEL elements, 64 times that on accelerators, where launches dominate."""
    rows, columns = table_TV.shape
    numel = BLOCK_NUMEL if table_TV.device.type == "cpu" else 64 * BLOCK_NUMEL
    step = max(1, numel // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def softmax_in_place(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits by their softmax over V (times FP16_GAIN in fp16).

    Returns:
        Log-sum-exp and the label's logit, both [T], fp32 or wider.

    Shapes: labels int64 in [0, V).
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    log_sum_exp_T = torch.empty(logits_TV.shape[0], dtype=wide, device=logits_TV.device)
    target_T = torch.empty_like(log_sum_exp_T)
    for start, stop in _row_blocks(logits_TV):
        kept = logits_TV[start:stop]
        logits = kept.to(wide)
        probs = torch.softmax(logits, dim=1)
        torch.sub(logits.amax(dim=1), probs.amax(dim=1).log_(), out=log_sum_exp_T[start:stop])
        torch.gather(logits, 1, labels_T[start:stop, None], out=target_T[start:stop, None])
        kept.copy_(probs.mul_(FP16_GAIN) if kept.dtype == torch.float16 else probs)
    return log_sum_exp_T, target_T


def gradient_in_place(
    probs_TV: Tensor, labels_T: Tensor, factor_T: Tensor, at_label_T: Tensor, mine_T: Tensor | None = None
) -> None:
    """Turn the result of softmax_in_place into the gradient of the logits.

    Args:
        factor_T: of every probability.
        at_label_T: gradient at the label.
        mine_T: bool, tokens whose label is among these columns; None for all.
    """
    factor_T1 = (factor_T / FP16_GAIN if probs_TV.dtype == torch.float16 else factor_T).unsqueeze(1)
    for start, stop in _row_blocks(probs_TV):
        block = probs_TV[start:stop]
        if block.dtype == factor_T1.dtype:
            block.mul_(factor_T1[start:stop])
        else:
            block.copy_(block.to(factor_T1.dtype).mul_(factor_T1[start:stop]))
    at_label_T = at_label_T.to(probs_TV.dtype)
    # not scatter_: it copies a half-precision tensor full, twice
    place = torch.arange(len(labels_T), device=labels_T.device), labels_T
    probs_TV[place] = at_label_T if mine_T is None else torch.where(mine_T, at_label_T, probs_TV[place])


class LogitKernels(NamedTuple):
    """The two passes over the logits: the functions above, or kernels with their signatures."""

    softmax: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_in_place
    gradient: Callable[..., None] = gradient_in_place

    def with_logit_scale(self, multiplier: float) -> "LogitKernels":
        """Return passes over logits times `multiplier`; the gradient is that of the unscaled logits."""

        def softmax(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
            return self.softmax(logits_TV.mul_(multiplier), labels_T)

        def gradient(probs_TV: Tensor, labels_T: Tensor, factor_T: Tensor, at_label_T: Tensor, *rest: Tensor) -> None:
            self.gradient(probs_TV, labels_T, factor_T * multiplier, at_label_T * multiplier, *rest)

        return LogitKernels(softmax, gradient)


TORCH_LOGIT_KERNELS = LogitKernels()


class BackwardTwiceError(RuntimeError):
    """A second backward through a loss whose saved logits the first one consumed."""

    def __init__(self):
        super().__init__("linear_cross_entropy: its logits were consumed by an earlier backward; it can run once")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T, kernels, gemms):
        probs_TV = gemms.output(x_TH, weight_VH)
        log_sum_exp_T, target_T = kernels.softmax(probs_TV, labels_T)
        loss_T = log_sum_exp_T.sub_(target_T)
        ctx.save_for_backward(x_TH, weight_VH, labels_T, loss_T)
        ctx.probs_TV, ctx.kernels, ctx.gemms, ctx.weight = probs_TV, kernels, gemms, weight_VH
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TH, weight_VH, labels_T, loss_T = ctx.saved_tensors
        grad_TV, ctx.probs_TV = ctx.probs_TV, None
        if grad_TV is None:
            raise BackwardTwiceError
        ctx.kernels.gradient(grad_TV, labels_T, grad_T, torch.expm1(-loss_T).mul_(grad_T))
        grad_TV = ctx.gemms.cast_grad(grad_TV, weight_VH)
        grad_x = ctx.gemms.input_grad(grad_TV, weight_VH) if ctx.needs_input_grad[0] else None
        grad_weight = weight_grad_fn(ctx.weight, grad_TV, x_TH, ctx.gemms)() if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


def tokens_per_chunk(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device, logits: torch.dtype | None = None
) -> int:
    """Return the number of tokens whose logits exist at once; all if chunks would not save memory.

    fp16 is never chunked: its small gradients need the loss scale, which only backward knows.

    Args:
        dtype: of the weight.
        logits: dtype of the logits, if it differs.
    """
    if dtype == torch.float16:
        return rows
    sizes = {"weight_bytes": dtype.itemsize, "logit_bytes": (logits or dtype).itemsize}
    return logit_chunk_size(rows, columns, width, **sizes, on_cpu=device.type == "cpu")


def common_factor(grad_T: Tensor, weights_T: Tensor) -> Tensor:
    """Return the scalar c with grad = c * weights; 0 if all weights are 0.

    `linear_cross_entropy` was promised such a factor; otherwise this is an error (on CUDA asynchronously).
    """
    at = weights_T.abs().argmax()
    c = torch.where(weights_T[at] == 0, 0.0, grad_T[at] / weights_T[at])
    within = (grad_T - c * weights_T).abs() <= 1e-5 * (c * weights_T[at]).abs()
    torch._assert_async(
        within.all(), "the gradient of the token losses is not their announced weights times one factor"
    )
    return c


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of tokens with known loss weights."""

    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T, weights_T, step, with_grads, kernels, gemms):
        loss_T = torch.empty(len(x_TH), dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)
        grads = LinearLossGrads(x_TH, weight_VH) if with_grads else None
        weights_T = weights_T.to(loss_T.dtype)
        for start in range(0, len(x_TH), step):
            here = slice(start, start + step)
            probs_TV = gemms.output(x_TH[here], weight_VH)
            log_sum_exp_T, target_T = kernels.softmax(probs_TV, labels_T[here])
            torch.sub(log_sum_exp_T, target_T, out=loss_T[here])
            if grads is not None:
                weights = weights_T[here]
                kernels.gradient(probs_TV, labels_T[here], weights, torch.expm1(-loss_T[here]).mul_(weights))
                grads.add(here, x_TH[here], probs_TV)
        ctx.grads = grads
        ctx.save_for_backward(weights_T)
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise BackwardTwiceError
        factor = common_factor(grad_T, *ctx.saved_tensors)
        return grads.take_x_grad(factor), grads.take_weight_grad(factor), None, None, None, None, None, None


class LinearLossGrads:
    """Gradients of x @ weight.T, accumulated over chunks of tokens."""

    def __init__(self, x_TH: Tensor, weight_VH: Tensor):
        self._weight = weight_VH
        self._x_grad = torch.empty_like(x_TH)
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self._weight_grad = torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device)

    def add(self, rows: slice, x_TH: Tensor, grad_TV: Tensor) -> None:
        """Accumulate the gradients of the logits of some tokens, with their inputs."""
        grad_TV = grad_TV.to(self._weight.dtype)
        torch.mm(grad_TV, self._weight, out=self._x_grad[rows])
        if can_accumulate_gemm(self._weight_grad, grad_TV):
            MainGradSum(self._weight_grad, beta=1.0, alpha=1.0).add(grad_TV.t(), x_TH)
        else:
            self._weight_grad.add_(grad_TV.t() @ x_TH)

    def take_x_grad(self, factor: Tensor) -> Tensor:
        """Return the gradient of x times `factor`, in place."""
        return self._x_grad.mul_(factor)

    def take_weight_grad(self, factor: Tensor) -> Tensor | None:
        """Return the weight gradient times `factor` in the weight's dtype; None if the main gradient takes it."""
        grad = add_to_main_grad(self._weight, self._weight_grad.mul_(factor))
        return None if grad is None else grad.to(self._weight.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight_VH: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    kernels: LogitKernels = TORCH_LOGIT_KERNELS,
    gemms: LMHeadGemms = LMHeadGemms(),
) -> Tensor:
    """Return the per-token loss -log softmax(x @ weight.T)[label], fp32. Differentiable once.

    Args:
        x: [..., H].
        weight_VH: [V, H].
        labels: [...] int64 in [0, V).
        weights: [...], a promise that the gradient of the result will be these times one number (a loss mask); then the
            full logits never exist.
        kernels: passes over the logits.
        gemms: of the logits.
    """
    x_TH, labels_T = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    step = len(x_TH)
    if weights is not None and gemms.quantized is None:
        vocabulary, hidden = weight_VH.shape
        step = tokens_per_chunk(step, vocabulary, hidden, weight_VH.dtype, x.device, gemms.logit_dtype(weight_VH))
    if weights is not None and step < len(x_TH):
        loss_T = _ChunkedLinearCrossEntropy.apply(
            x_TH, weight_VH, labels_T, weights.reshape(-1), step, needs_grad(x, weight_VH), kernels, gemms
        )
    else:
        loss_T = _LinearCrossEntropy.apply(x_TH, weight_VH, labels_T, kernels, gemms)
    return loss_T.view(labels.shape)


def needs_grad(*tensors: Tensor) -> bool:
    """Return whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
