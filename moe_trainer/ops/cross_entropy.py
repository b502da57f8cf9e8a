"""Output projection and cross entropy in one function, so that only one [T, V] tensor ever exists, in the dtype of the
weights, or in that of --output-logit-dtype (logits.py).

The matmul's result is read in row blocks that fit a cache; only a block is ever widened to fp32. The forward replaces
the logits, in place, by their softmax: the backward then needs one multiplication per element, by the token's incoming
gradient, to turn the same storage into the gradient of the logits for the two matmuls. The label's column is set from
the loss itself, exp(-loss) - 1, so that rounding of the stored values cannot spoil it where the prediction is nearly
certain. The loss is log-sum-exp - logit(label), with the log-sum-exp found as max(logits) - log(max(softmax)): torch's
softmax is one fused pass over the block, and the largest probability is at least 1/V. log_softmax + nll_loss hold three
such tensors in fp32 and take the exponential twice. The price: the backward consumes what the forward kept, and can run
once only; asking again is an error.

Where the weights of the tokens in the loss are known beforehand (a loss mask), not even that tensor is needed: chunks of tokens go
through both passes in the forward, each chunk's gradient at once into those of x and weight, and the backward multiplies these by the one
number that was missing. No product is computed twice; what it costs is the weight's gradient in fp32 from forward to backward. Products
in 8 bits notice how large a gradient is, so they wait for that number, with the logits whole.

Where the vocabulary is cut over ranks (layers/vocab.py) the same two passes run on each rank's columns: the forward stores
the softmax over them alone, and the factor that makes it the softmax over all, exp(own log-sum-exp - that of all), joins
the token's incoming gradient.

Shapes: T tokens, H hidden, V vocabulary, or this rank's columns of it (padded columns take part in the softmax, as in Megatron-LM).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.logits import LogitProducts
from moe_trainer.ops.main_grad import sum_for, weight_grad

BLOCK_NUMEL = 1 << 18  # fp32 elements widened at a time: 1 MB, a core's L2
CHUNK_BYTES = 1 << 26  # of logits held at once, where they are not held whole
MIN_CHUNK_ROWS = 256  # fewer rows would starve the products
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


class LossSteps(NamedTuple):
    """The two passes over the logits: the functions above, or kernels of their signatures."""

    softmax: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_in_place
    gradient: Callable[..., None] = gradient_in_place

    def scaled_by(self, multiplier: float) -> "LossSteps":
        """The passes that take logits times a number; what the second one leaves is the gradient of the logits before that."""
        def softmax(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
            return self.softmax(logits_TV.mul_(multiplier), labels_T)

        def gradient(probs_TV: Tensor, labels_T: Tensor, factor_T: Tensor, at_label_T: Tensor, *rest: Tensor) -> None:
            self.gradient(probs_TV, labels_T, factor_T * multiplier, at_label_T * multiplier, *rest)

        return LossSteps(softmax, gradient)


PLAIN = LossSteps()


class ConsumedError(RuntimeError):
    """A second backward through a loss whose first one has used up what the forward kept."""

    def __init__(self):
        super().__init__("linear_cross_entropy: its logits were consumed by an earlier backward; it can run once")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T, steps, products):
        probs_TV = products.output(x_TH, weight_VH)
        log_sum_exp_T, target_T = steps.softmax(probs_TV, labels_T)
        loss_T = log_sum_exp_T.sub_(target_T)
        ctx.save_for_backward(x_TH, weight_VH, labels_T, loss_T)
        ctx.probs_TV, ctx.steps, ctx.products, ctx.weight = probs_TV, steps, products, weight_VH
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        x_TH, weight_VH, labels_T, loss_T = ctx.saved_tensors
        grad_TV, ctx.probs_TV = ctx.probs_TV, None
        if grad_TV is None:
            raise ConsumedError
        ctx.steps.gradient(grad_TV, labels_T, grad_T, torch.expm1(-loss_T).mul_(grad_T))
        grad_TV = ctx.products.narrowed(grad_TV, weight_VH)
        grad_x = ctx.products.input_grad(grad_TV, weight_VH) if ctx.needs_input_grad[0] else None
        grad_weight = weight_grad(ctx.weight, grad_TV, x_TH, ctx.products) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


def chunk_rows(rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device, logits: torch.dtype | None = None) -> int:
    """How many tokens' logits to hold at once; all of them where holding fewer would not save memory.

    dtype: of the weight. logits: theirs, where it is another.

    In chunks, the gradient of the weight is added up in fp32 from the forward on; held whole, the logits wait for the backward, which then
    makes that gradient in the weight's dtype. fp16 is never cut: its small gradients need the loss scale, which only the backward knows.
    """
    size, each = torch.finfo(dtype).bits // 8, torch.finfo(logits or dtype).bits // 8
    step = max(MIN_CHUNK_ROWS, (CHUNK_BYTES if device.type == "cpu" else 4 * CHUNK_BYTES) // (columns * each))
    whole, chunked = (rows * each + width * size) * columns, (step * each + width * (4 if size == 4 else 4 + size)) * columns
    # adding up a narrower format in fp32 is a pass of its own: it has to pay
    saves = whole > (1 if size >= 4 else 2) * chunked
    return step if saves and step < rows and dtype != torch.float16 else rows


def factor_of(grad_T: Tensor, weights_T: Tensor) -> Tensor:
    """The number c with which grad = c * weights, a scalar on their device; 0 where all weights are.

    That it is so was promised to `linear_cross_entropy`; that it is not is an error (on CUDA when the device gets there).
    """
    at = weights_T.abs().argmax()
    c = torch.where(weights_T[at] == 0, 0.0, grad_T[at] / weights_T[at])
    within = (grad_T - c * weights_T).abs() <= 1e-5 * (c * weights_T[at]).abs()
    torch._assert_async(within.all(), "the gradient of the token losses is not their announced weights times one factor")
    return c


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of tokens: possible where the tokens' weights in the loss are known beforehand."""

    @staticmethod
    def forward(ctx, x_TH, weight_VH, labels_T, weights_T, step, with_grads, steps, products):
        loss_T = torch.empty(len(x_TH), dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)
        grads = Gradients(x_TH, weight_VH) if with_grads else None
        weights_T = weights_T.to(loss_T.dtype)
        for start in range(0, len(x_TH), step):
            here = slice(start, start + step)
            probs_TV = products.output(x_TH[here], weight_VH)
            log_sum_exp_T, target_T = steps.softmax(probs_TV, labels_T[here])
            torch.sub(log_sum_exp_T, target_T, out=loss_T[here])
            if with_grads:
                weights = weights_T[here]
                steps.gradient(probs_TV, labels_T[here], weights, torch.expm1(-loss_T[here]).mul_(weights))
                grads.add(here, probs_TV)
        ctx.grads = grads
        ctx.save_for_backward(weights_T)
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise ConsumedError
        factor = factor_of(grad_T, *ctx.saved_tensors)
        return grads.of_x(factor), grads.of_weight(factor), None, None, None, None, None, None


class Gradients:
    """The gradients of x @ weight.T, added up from those of chunks of rows."""

    def __init__(self, x_TH: Tensor, weight_VH: Tensor):
        self._x, self._weight = x_TH, weight_VH
        self._of_x = torch.empty_like(x_TH)
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self._of_weight = torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device)

    def add(self, rows: slice, grad_TV: Tensor) -> None:
        """Take in the gradient of some rows of the product."""
        grad_TV = grad_TV.to(self._weight.dtype)
        torch.mm(grad_TV, self._weight, out=self._of_x[rows])
        if grad_TV.dtype == self._of_weight.dtype:
            self._of_weight.addmm_(grad_TV.t(), self._x[rows])
        else:
            self._of_weight.add_(grad_TV.t() @ self._x[rows])

    def of_x(self, factor: Tensor) -> Tensor:
        """That of x times a number; consumes it."""
        return self._of_x.mul_(factor)

    def of_weight(self, factor: Tensor) -> Tensor | None:
        """That of the weight times a number, in the weight's format; None where it is added to the main gradient. Consumes it."""
        grad = self._of_weight.mul_(factor)
        total = sum_for(self._weight, grad)
        if total is None:
            return grad.to(self._weight.dtype)
        total.add_gradient(grad)
        return None


def linear_cross_entropy(x: Tensor, weight_VH: Tensor, labels: Tensor, weights: Tensor | None = None,
                         steps: LossSteps = PLAIN, products: LogitProducts = LogitProducts()) -> Tensor:
    """Per-token loss -log softmax(x @ weight.T)[label], fp32, of the same leading shape as the labels.

    Shapes: x [..., H]; weight [V, H]; labels [...] int64 in [0, V); weights [...]: a promise that the gradient of the result will be
    these times one number (a loss mask), with which the logits need never be whole. steps: what runs on the logits. products: what makes
    them. Differentiable once.
    """
    x_TH, labels_T = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    step = len(x_TH)
    if weights is not None and products.quantized is None:
        step = chunk_rows(step, *weight_VH.shape, weight_VH.dtype, x.device, products.format(weight_VH))
    if step < len(x_TH):
        loss_T = _ChunkedLinearCrossEntropy.apply(x_TH, weight_VH, labels_T, weights.reshape(-1), step, wants_grads(x, weight_VH), steps,
                                                  products)
    else:
        loss_T = _LinearCrossEntropy.apply(x_TH, weight_VH, labels_T, steps, products)
    return loss_T.view(labels.shape)


def wants_grads(*tensors: Tensor) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
