"""Cross entropy in Triton kernels: what ops/cross_entropy.py does to the logits.

A program owns a token. It walks over the columns once for the maximum and the sum of exponentials, and again to replace
the logits by their softmax, mostly from the L2 cache. Backward is one pass. With a sharded vocabulary every rank runs
the same kernels on its columns; `vocabulary_pieces` returns maximum, sum and the label's logit for callers that merge
these and keep the logits.

Shapes: T tokens, V vocabulary or this rank's columns of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.cross_entropy import LogitKernels
from moe_trainer.ops.triton_blocks import block_size, wide

FP16_GAIN = 2.0**15  # as ops/cross_entropy.py stores fp16 probabilities


@triton.jit
def _online(logits, columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum of a row and the sum of exp(logit - maximum), in one walk."""
    largest = tl.full([BLOCK], float("-inf"), WIDE)
    total = tl.zeros([BLOCK], WIDE)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(WIDE)
        higher = tl.maximum(largest, value)
        # lanes that have met nothing but -inf would compute -inf - -inf
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = higher
    top = tl.max(largest, 0)
    return top, tl.sum(total * tl.exp(largest - top), 0)


@triton.jit
def _label_logit(logits, label, columns):
    """The label's logit; NaN for a label that is none of the columns, which must not be read."""
    return tl.load(logits + label, mask=(label >= 0) & (label < columns), other=float("nan"))


@triton.jit
def pieces_kernel(logits, labels, largest, total, target, columns, stride, BLOCK: tl.constexpr):
    """Maximum, sum of exponentials and the label's logit of one token."""
    WIDE: tl.constexpr = wide(logits.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top, amount = _online(start, columns, WIDE, BLOCK)
    tl.store(largest + row, top)
    tl.store(total + row, amount)
    tl.store(target + row, _label_logit(start, tl.load(labels + row), columns).to(WIDE))


@triton.jit
def softmax_kernel(logits, labels, log_sum_exp, target, columns, stride, gain, BLOCK: tl.constexpr):
    """The same of one token, then its logits become gain times their softmax."""
    WIDE: tl.constexpr = wide(logits.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    tl.store(target + row, _label_logit(start, tl.load(labels + row), columns).to(WIDE))
    tl.debug_barrier()  # the label's logit has been read before anyone overwrites it
    top, amount = _online(start, columns, WIDE, BLOCK)
    tl.store(log_sum_exp + row, top + tl.log(amount))
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < columns, other=float("-inf")).to(WIDE)
        value = tl.exp(value - top) / amount * gain
        tl.store(start + column, value.to(logits.dtype.element_ty), mask=column < columns)


@triton.jit
def gradient_kernel(probs, labels, factor, at_label, mine, columns, stride, gain, BLOCK: tl.constexpr):
    """One token, one block of columns: probabilities times the factor; the label's column is given, where `mine`."""
    WIDE: tl.constexpr = wide(probs.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = probs + row * stride + column
    value = tl.load(at, mask=column < columns, other=0.0).to(WIDE) * (tl.load(factor + row).to(WIDE) / gain)
    is_label = column == tl.load(labels + row)
    if mine is not None:
        is_label = is_label & (tl.load(mine + row) != 0)
    value = tl.where(is_label, tl.load(at_label + row).to(WIDE), value)
    tl.store(at, value.to(probs.dtype.element_ty), mask=column < columns)


def _gain(dtype: torch.dtype) -> float:
    return FP16_GAIN if dtype == torch.float16 else 1.0


def _launch(kernel, logits_TV: Tensor, labels_T: Tensor, num_results: int, *gain: float) -> Tensor:
    """Run a kernel that takes full rows; return what it writes of every token, [results, T]."""
    num_tokens, columns = logits_TV.shape
    results = logits_TV.new_empty(num_results, num_tokens, dtype=torch.promote_types(logits_TV.dtype, torch.float32))
    if num_tokens:
        block, labels_T = block_size(columns, 4096), labels_T.contiguous()
        options = {"BLOCK": block, "num_warps": 4 if block <= 1024 else 8}
        kernel[(num_tokens,)](logits_TV, labels_T, *results, columns, logits_TV.stride(0), *gain, **options)
    return results


def vocabulary_pieces(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and the label's logit of every token. The logits stay as they are.

    Shapes: logits [T, V] with elements of a row side by side; labels int64 in [0, V), any other gives NaN; results [T],
    fp32 or wider.
    """
    largest_T, total_T, target_T = _launch(pieces_kernel, logits_TV, labels_T, 3).unbind()
    return largest_T, total_T, target_T


def softmax_in_place(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Replace logits by their softmax over V (times FP16_GAIN in fp16). Returns: log-sum-exp and the label's logit.

    Shapes: labels int64 in [0, V); both results [T], fp32 or wider. As ops/cross_entropy.py: softmax_in_place.
    """
    log_sum_exp_T, target_T = _launch(softmax_kernel, logits_TV, labels_T, 2, _gain(logits_TV.dtype)).unbind()
    return log_sum_exp_T, target_T


def gradient_in_place(
    probs_TV: Tensor, labels_T: Tensor, factor_T: Tensor, at_label_T: Tensor, mine_T: Tensor | None = None
) -> None:
    """Turn what softmax_in_place left into the gradient of the logits.

    factor_T: of every probability. at_label_T: the label's element. mine_T: bool, tokens whose label is one of these
    columns; None means all. As ops/cross_entropy.py: gradient_in_place.
    """
    num_tokens, columns = probs_TV.shape
    if num_tokens:
        block, mine_T = block_size(columns, 2048), None if mine_T is None else mine_T.view(torch.uint8)
        of_tokens = (x.contiguous() for x in (labels_T, factor_T, at_label_T))
        gradient_kernel[(num_tokens, triton.cdiv(columns, block))](
            probs_TV, *of_tokens, mine_T, columns, probs_TV.stride(0), _gain(probs_TV.dtype), BLOCK=block
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, labels_T):
        largest_T, total_T, target_T = vocabulary_pieces(logits_TV, labels_T)
        loss_T = largest_T.add_(total_T.log_()).sub_(target_T)
        ctx.save_for_backward(logits_TV, labels_T, loss_T)
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        logits_TV, labels_T, loss_T = ctx.saved_tensors
        grad_TV = logits_TV.clone()
        softmax_in_place(grad_TV, labels_T)
        gradient_in_place(grad_TV, labels_T, grad_T, torch.expm1(-loss_T).mul_(grad_T))
        return grad_TV, None


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Per-token loss -log softmax(logits)[label], fp32 or wider [T], differentiable any number of times.

    The logits are saved.
    """
    return _CrossEntropy.apply(logits_TV if logits_TV.stride(-1) == 1 else logits_TV.contiguous(), labels_T)


LOGIT_KERNELS = LogitKernels(softmax_in_place, gradient_in_place)
