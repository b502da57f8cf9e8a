"""Experts' MLP with quantized GEMMs: ops/expert_mlp.py with the GEMMs of quantization/gemms.py.

The tokens of every expert are quantized separately, like its weights. A scale for a full tensor covers one expert's
tokens (with delayed scaling: the layer's). Activations between the GEMMs stay in high precision. Tokens are saved for
backward as the weight gradient reads them, quantized (saved_input.py). The GEMMs of all
experts are requested as one sequence, which runs one by one or in a single call of the device (scaled_grouped.py).
Weight gradients are computed expert by expert. With counts on the device every GEMM is one call (grouped.py).

Shape letters: R tokens sorted by expert, e experts, H hidden, F expert FFN width, G fc1 output width (2F when gated).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_trainer.ops.expert_mlp import (
    TORCH_MLP_KERNELS,
    ActivationFns,
    ExpertMLPKernels,
    ExpertWeights,
    compute_or_defer,
    get_activation_fns,
    grad_owner,
    owner_dtype,
)
from moe_trainer.ops.gemms import WgradFn
from moe_trainer.ops.grouped_gemm import GROUPED_MM, check_token_counts, expert_ranges
from moe_trainer.ops.pointwise import Activation
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.grouped import TokenGroups, make_token_groups
from moe_trainer.quantization.saved_input import SavedInput, SavedTokens, StackedInputs


@dataclass(frozen=True)
class _QuantizedMLPOptions:
    """What one call computes with besides tensors.

    Attributes:
        gemms: of fc1 and fc2.
        queue: takes weight gradients.
        saves_quantized: save quantized tokens.
    """

    activation: ActivationFns
    gemms: tuple[QuantizedGemms, QuantizedGemms]
    queue: Any
    saves_quantized: bool = False


def _token_ranges(counts: tuple[int, ...]) -> list[tuple[int, slice]]:
    """Return the tokens of every expert that has some."""
    return [(expert, slice(start, stop)) for expert, start, stop, _ in expert_ranges(counts)]


class _QuantizedExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RH, probs_R, w1, b1, w2, b2, counts: tuple[int, ...], options: _QuantizedMLPOptions):
        (fc1, fc2), activation, ranges = options.gemms, options.activation, _token_ranges(counts)
        h_RG, y_RH = x_RH.new_empty(x_RH.shape[0], w1.shape[1]), x_RH.new_zeros(x_RH.shape[0], w2.shape[1])

        def activated():
            pairs = ((x_RH[rows], fc1.expert_weight(w1, expert)) for expert, rows in ranges)
            for (expert, rows), h in zip(ranges, fc1.outputs(pairs)):
                h_RG[rows] = h
                if b1 is not None:
                    h_RG[rows] += b1[expert]
                yield (
                    activation.forward(h_RG[rows], None if probs_R is None else probs_R[rows]),
                    fc2.expert_weight(w2, expert),
                )

        for (expert, rows), y in zip(ranges, fc2.outputs(activated())):
            p = None if probs_R is None else probs_R[rows]
            y_RH[rows] = y
            if b2 is not None:
                y_RH[rows] += b2[expert] if p is None else torch.outer(p.to(b2.dtype), b2[expert])
        inputs = (fc1.saved_input(x_RH[rows]) for _, rows in ranges) if options.saves_quantized else ()
        quantized = [each for each in inputs if each is not None]  # of all experts or of none
        stack = SavedInput.stack(quantized) if quantized else None
        ctx.save_for_backward(*((x_RH, None) if stack is None else stack[:2]), probs_R, h_RG, w1, w2, b2)
        ctx.counts, ctx.options = counts, options
        ctx.owners, ctx.has_b1 = (grad_owner(w1), grad_owner(w2)), b1 is not None
        ctx.shape, ctx.stacked = x_RH.shape, None if stack is None else stack[2:]
        return y_RH

    @staticmethod
    def backward(ctx, grad_RH):
        x, inverse, probs_R, h_RG, w1, w2, b2 = ctx.saved_tensors
        (fc1, fc2), ranges = ctx.options.gemms, _token_ranges(ctx.counts)
        grad_x, grad_p = grad_RH.new_zeros(ctx.shape), None if probs_R is None else torch.zeros_like(probs_R)
        grad_b1 = w1.new_zeros(w1.shape[:2]) if ctx.has_b1 else None
        grad_b2 = None if b2 is None else torch.zeros_like(b2)
        of_w1: dict[int, WgradFn] = {}
        of_w2: dict[int, WgradFn] = {}
        grad_RH = grad_RH.contiguous()
        inputs: Iterator[Tensor | SavedInput]
        if ctx.stacked is None:
            inputs = (x[rows] for _, rows in ranges)
        else:
            inputs = StackedInputs(x, inverse, *ctx.stacked).parts()

        def through_activation():
            pairs = ((grad_RH[rows], fc2.expert_weight(w2, expert)) for expert, rows in ranges)
            for (expert, rows), x_of_expert, grad_a in zip(ranges, inputs, fc2.input_grads(pairs)):
                p, grad_y = None if probs_R is None else probs_R[rows], grad_RH[rows]
                a, grad_h, block_grad_p = ctx.options.activation.backward(h_RG[rows], p, grad_a)
                of_w2[expert] = fc2.make_wgrad_fn(grad_y, a)
                of_w1[expert] = fc1.make_wgrad_fn(grad_h, x_of_expert)
                if grad_b1 is not None:
                    torch.sum(grad_h, 0, out=grad_b1[expert])
                if grad_b2 is not None:
                    grad_b2[expert] = grad_y.sum(0) if p is None else grad_y.t() @ p.to(grad_y.dtype)
                if grad_p is not None:
                    grad_p[rows] = block_grad_p
                    if b2 is not None:
                        grad_p[rows] += grad_y @ b2[expert]
                yield grad_h, fc1.expert_weight(w1, expert)

        for (_, rows), part in zip(ranges, fc1.input_grads(through_activation())):
            grad_x[rows] = part
        stacked = (functools.partial(_stacked, w.shape, w.new_empty(0), of_w) for w, of_w in ((w1, of_w1), (w2, of_w2)))
        grad_w1, grad_w2 = _weight_grads(ctx, *stacked)
        return grad_x, grad_p, grad_w1, grad_b1, grad_w2, grad_b2, None, None


class _BufferMLP(torch.autograd.Function):
    """The same with counts on the device: each GEMM is one call for all experts (grouped.py)."""

    @staticmethod
    def forward(ctx, x_CH, probs_C, w1, b1, w2, b2, groups: TokenGroups, options: _QuantizedMLPOptions):
        fc1, fc2 = options.gemms
        both = fc1.quantize_both(x_CH, is_grad=False) if options.saves_quantized else None
        h_CG = fc1.grouped_output(x_CH, w1, groups, both)
        if b1 is not None:
            h_CG = h_CG + _per_token(b1, groups)
        y_CH = fc2.grouped_output(options.activation.forward(h_CG, probs_C), w2, groups)
        if b2 is not None:
            bias_CH = _per_token(b2, groups)
            y_CH = y_CH + (bias_CH if probs_C is None else (bias_CH * probs_C.unsqueeze(1)).to(y_CH.dtype))
        saved = fc1.saved_tokens(x_CH, groups, both) if options.saves_quantized else None
        tables = (x_CH, None, None) if saved is None else saved[:3]
        ctx.save_for_backward(*tables, probs_C, h_CG, w1, w2, b2)
        ctx.scaling = None if saved is None else saved.scaling
        ctx.groups, ctx.options = groups, options
        ctx.owners, ctx.has_b1 = (grad_owner(w1), grad_owner(w2)), b1 is not None
        return y_CH

    @staticmethod
    def backward(ctx, grad_CH):
        values, blocks, scale_e, probs_C, h_CG, w1, w2, b2 = ctx.saved_tensors
        (fc1, fc2), groups = ctx.options.gemms, ctx.groups
        x = values if ctx.scaling is None else SavedTokens(values, blocks, scale_e, ctx.scaling)
        # what offload and recompute return is not the parameter, of which casts are cached
        w1, w2 = (
            own if gemms.cached_weights is not None and isinstance(own, nn.Parameter) else w
            for w, own, gemms in zip((w1, w2), ctx.owners, (fc1, fc2))
        )
        grad_CH = grad_CH.contiguous()
        both = fc2.quantize_both(grad_CH, is_grad=True) if ctx.needs_input_grad[4] else None
        grad_a = fc2.grouped_input_grad(grad_CH, w2, groups, both)
        a_CF, grad_h, grad_p = ctx.options.activation.backward(h_CG, probs_C, grad_a)
        grad_b1 = groups.gemms.sum_tokens(grad_h, groups.offsets_e) if ctx.has_b1 else None
        grad_b2 = None
        if b2 is not None:
            weighed = grad_CH if probs_C is None else (grad_CH * probs_C.unsqueeze(1)).to(grad_CH.dtype)
            grad_b2 = groups.gemms.sum_tokens(weighed, groups.offsets_e)
            if grad_p is not None:
                grad_p = grad_p + (grad_CH * _per_token(b2, groups)).sum(-1)
        of_w2 = fc2.make_grouped_wgrad_fn(grad_CH, a_CF, groups, both)
        both = fc1.quantize_both(grad_h, is_grad=True) if ctx.needs_input_grad[2] else None
        of_w1 = fc1.make_grouped_wgrad_fn(grad_h, x, groups, both)
        grad_x = fc1.grouped_input_grad(grad_h, w1, groups, both)
        grad_w1, grad_w2 = _weight_grads(ctx, of_w1, of_w2)
        return grad_x, grad_p, grad_w1, grad_b1, grad_w2, grad_b2, None, None


def _weight_grads(ctx, of_w1: WgradFn, of_w2: WgradFn) -> tuple[Tensor | None, ...]:
    """Compute or defer the gradients that autograd needs, in the dtype of the main gradient."""
    needed = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
    return tuple(
        compute_or_defer(
            ctx.options.queue, owner, functools.partial(compute, owner_dtype(owner)) if is_needed else None
        )
        for owner, compute, is_needed in zip(ctx.owners, (of_w1, of_w2), needed)
    )


def _per_token(bias_eN: Tensor, groups: TokenGroups) -> Tensor:
    return bias_eN[groups.expert_C.clamp(max=len(bias_eN) - 1)]


def _stacked(shape: torch.Size, none: Tensor, parts: dict[int, WgradFn], dtype: torch.dtype) -> Tensor:
    """Stack the experts' weight gradients, on the device of `none`; experts without tokens get zeros."""
    grad_eNK = none.new_zeros(shape, dtype=dtype)
    for expert, part in parts.items():
        grad_eNK[expert] = part(dtype)
    return grad_eNK


def quantized_expert_mlp(
    x_RH: Tensor,
    probs_R: Tensor | None,
    weights: ExpertWeights,
    counts: Sequence[int] | Tensor,
    activation: Activation,
    gemms: tuple[QuantizedGemms, QuantizedGemms],
    *,
    kernels: ExpertMLPKernels = TORCH_MLP_KERNELS,
    queue: Any = None,
    unused: int = 0,
    saves_quantized: bool = True,
) -> Tensor:
    """Run every expert on its tokens.

    Args:
        counts: on the device they include each expert's padding to a multiple (QuantizedGemms.token_multiple), which
            is zeros and has zero gradients.
        gemms: of fc1 and fc2.
        kernels: replace the torch versions; their GEMMs are taken for counts on the device.
        saves_quantized: save quantized tokens for backward (saved_input.py). Everything else as expert_mlp.expert_mlp.

    Raises:
        ValueError: if the counts do not add up to R.
    """
    probs_R = None if probs_R is None else probs_R.contiguous()
    w1_eGH, w2_eHF, b1_eG, b2_eH = weights
    fns = kernels.activation or get_activation_fns(activation)
    inputs = x_RH.contiguous(), probs_R, w1_eGH, b1_eG, w2_eHF, b2_eH
    saves_quantized = saves_quantized and w1_eGH.requires_grad and torch.is_grad_enabled()
    options = _QuantizedMLPOptions(fns, gemms, queue, saves_quantized)
    if isinstance(counts, Tensor):
        groups = make_token_groups(counts, x_RH.shape[0], kernels.gemms or GROUPED_MM)
        return _BufferMLP.apply(*inputs, groups, options)
    check_token_counts("quantized_expert_mlp", counts, x_RH.shape[0] - unused)
    return _QuantizedExpertMLP.apply(*inputs, tuple(counts), options)
