"""One linear of many experts as an autograd function: y[tokens of e] = x[tokens of e] @ w[e]^T.

ops/expert_mlp.py computes fc1, activation and fc2 as one function; this one serves experts with something between or
next to the linears (adapters). Saved for backward: x, if the weight has a gradient.

Shape letters: R tokens sorted by expert, e experts, N output width, K input width.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_trainer.ops.expert_mlp import compute_or_defer, grad_owner
from moe_trainer.ops.grouped_gemm import (
    GROUPED_MM,
    GroupedGemms,
    GroupedWeightGrad,
    check_token_counts,
    expert_ranges,
    prefer_grouped,
    token_offsets,
)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RK: Tensor, w_eNK: Tensor, counts: tuple[int, ...], gemms: GroupedGemms | None, add_weight_grad):
        ctx.counts, ctx.gemms, ctx.owner = counts, gemms, grad_owner(w_eNK)
        ctx.add_weight_grad = add_weight_grad
        ctx.save_for_backward(x_RK if ctx.needs_input_grad[1] else None, w_eNK)
        if gemms is not None:
            ctx.offsets = token_offsets(counts, x_RK.device)
            return gemms.forward(x_RK, w_eNK, ctx.offsets)
        y_RN = x_RK.new_empty(len(x_RK), w_eNK.shape[1])
        for expert, start, stop, _ in expert_ranges(counts):
            torch.mm(x_RK[start:stop], w_eNK[expert].t(), out=y_RN[start:stop])
        return y_RN

    @staticmethod
    def backward(ctx, grad_RN: Tensor):
        x_RK, w_eNK = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        needs_x, needs_w = ctx.needs_input_grad[:2]
        grad_x = _input_grad(ctx, grad_RN, w_eNK) if needs_x else None
        compute = _make_wgrad_fn(ctx, grad_RN, x_RK, w_eNK) if needs_w else None
        return grad_x, compute_or_defer(None, ctx.owner, compute), None, None, None


def _input_grad(ctx, grad_RN: Tensor, w_eNK: Tensor) -> Tensor:
    if ctx.gemms is not None:
        return ctx.gemms.input_grad(grad_RN, w_eNK, ctx.offsets)
    grad_x = grad_RN.new_empty(len(grad_RN), w_eNK.shape[2])
    for expert, start, stop, _ in expert_ranges(ctx.counts):
        torch.mm(grad_RN[start:stop], w_eNK[expert], out=grad_x[start:stop])
    return grad_x


def _make_wgrad_fn(ctx, grad_RN: Tensor, x_RK: Tensor, w_eNK: Tensor) -> Callable[[], Tensor]:
    if ctx.gemms is not None:
        return GroupedWeightGrad(ctx.gemms, grad_RN, x_RK, ctx.offsets, ctx.counts, ctx.add_weight_grad)

    def compute() -> Tensor:
        grad_w = torch.zeros_like(w_eNK)
        for expert, start, stop, _ in expert_ranges(ctx.counts):
            torch.mm(grad_RN[start:stop].t(), x_RK[start:stop], out=grad_w[expert])
        return grad_w

    return compute


def grouped_linear(
    x_RK: Tensor,
    w_eNK: Tensor,
    counts: Sequence[int],
    *,
    allow_grouped: bool = True,
    gemms: GroupedGemms | None = None,
    add_weight_grad: Callable[..., None] | None = None,
) -> Tensor:
    """Apply every expert's linear to its tokens; y_RN.

    Args:
        counts: tokens per expert, zero allowed.
        allow_grouped: use one grouped GEMM where it is faster (grouped_gemm.prefer_grouped).
        gemms: GEMMs for any size if grouping is allowed; None for torch's, which need rows of 16 bytes.
        add_weight_grad: see expert_mlp.

    Raises:
        ValueError: if the counts do not add up to R.
    """
    check_token_counts("grouped_linear", counts, len(x_RK))
    is_aligned = math.gcd(*w_eNK.shape[1:]) * w_eNK.element_size() % 16 == 0
    if gemms is None and is_aligned and prefer_grouped(len(x_RK), len(counts), x_RK.dtype, x_RK.device):
        gemms = GROUPED_MM
    gemms = gemms if allow_grouped and len(x_RK) else None
    return _GroupedLinear.apply(x_RK.contiguous(), w_eNK, tuple(counts), gemms, add_weight_grad)
