"""Experts' MLP as one autograd function: fc1 -> activation * probability -> fc2, tokens sorted by expert.

Saved for backward: x, fc1's output and the probabilities; the activation is recomputed. The probability multiplies the
activation, so fc2's output is not needed for its gradient. Elementwise work runs on blocks of tokens that stay in the
cache. Weight gradients can be deferred (a queue) or accumulated in the main gradient (main_grad.py). Half precision on
CPU computes on token buckets. `ActivationFns` are `forward(h, p) -> a` and `backward(h, p, grad_a) -> (a, grad_h,
grad_p)` with a = activation * probability. See docs/design/expert_mlp.md.

Shape letters: R tokens sorted by expert, e experts, H hidden, F expert FFN width, G fc1 output width (2F when gated).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.ops.grouped_gemm import (
    GROUPED_MM,
    GroupedGemms,
    GroupedWeightGrad,
    can_read_offsets_on_device,
    check_token_counts,
    expert_ranges,
    prefer_grouped,
    token_offsets,
)
from moe_trainer.ops.main_grad import MainGradSum, add_to_main_grad, get_main_grad_sum, gradient_dtype
from moe_trainer.ops.pointwise import Activation

BLOCK_TOKENS = 256  # of an elementwise block in the grouped form on CPU


class ActivationFns(NamedTuple):
    """Forward and backward of an activation times probability; see the module docstring."""

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def _scale_by_probs(z: Tensor, p: Tensor | None) -> Tensor:
    """Multiply z by the tokens' probabilities in place; fp32 probabilities of bf16 tokens round once."""
    if p is None:
        return z
    return z.mul_(p.unsqueeze(1))


def _backward_scale_by_probs(grad_a: Tensor, z: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of z * p for z and p, before `_scale_by_probs` overwrites z."""
    if p is None:
        return grad_a, None
    return torch.mul(grad_a, p.unsqueeze(1), out=torch.empty_like(z)), (grad_a * z).sum(-1, dtype=p.dtype)


def _swiglu_forward(h: Tensor, p: Tensor | None) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return _scale_by_probs(F.silu(gate).mul_(up), p)


def _swiglu_backward(h: Tensor, p: Tensor | None, grad_a: Tensor):
    gate, up = h.chunk(2, dim=-1)
    silu = F.silu(gate)
    z = silu * up
    grad_a, grad_p = _backward_scale_by_probs(grad_a, z, p)
    grad_h = torch.empty_like(h)
    grad_gate, grad_up = grad_h.chunk(2, dim=-1)
    torch.mul(grad_a, silu, out=grad_up)
    torch.mul(grad_a, up, out=silu)
    torch.ops.aten.silu_backward(silu, gate, grad_input=grad_gate)
    return _scale_by_probs(z, p), grad_h, grad_p


def _gelu_forward(h: Tensor, p: Tensor | None) -> Tensor:
    return _scale_by_probs(F.gelu(h), p)


def _gelu_backward(h: Tensor, p: Tensor | None, grad_a: Tensor):
    z = F.gelu(h)
    grad_a, grad_p = _backward_scale_by_probs(grad_a, z, p)
    return _scale_by_probs(z, p), torch.ops.aten.gelu_backward(grad_a, h), grad_p


def _squared_relu_forward(h: Tensor, p: Tensor | None) -> Tensor:
    return _scale_by_probs(F.relu(h).square_(), p)


def _squared_relu_backward(h: Tensor, p: Tensor | None, grad_a: Tensor):
    positive = F.relu(h)
    z = positive.square()
    grad_a, grad_p = _backward_scale_by_probs(grad_a, z, p)
    return _scale_by_probs(z, p), positive.mul_(grad_a).mul_(2), grad_p


def _by_autograd(activation: Activation) -> ActivationFns:
    def backward(h: Tensor, p: Tensor | None, grad_a: Tensor):
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            z = activation(h)
        grad_a, grad_p = _backward_scale_by_probs(grad_a, z.detach(), p)
        grad_h = torch.autograd.grad(z, h, grad_a)[0]
        return _scale_by_probs(z.detach(), p), grad_h, grad_p

    return ActivationFns(lambda h, p: _scale_by_probs(activation(h), p), backward)


def get_activation_fns(activation: Activation) -> ActivationFns:
    """Return the functions of an activation."""
    if activation == Activation("silu", gated=True):
        return ActivationFns(_swiglu_forward, _swiglu_backward)
    if activation == Activation("gelu"):
        return ActivationFns(_gelu_forward, _gelu_backward)
    if activation == Activation("squared_relu"):
        return ActivationFns(_squared_relu_forward, _squared_relu_backward)
    return _by_autograd(activation)


@dataclass(frozen=True)
class _LoopOptions:
    """What a loop over the experts computes with besides tensors.

    Attributes:
        counts: tokens per expert.
        queue: takes weight gradients.
    """

    counts: tuple[int, ...]
    activation: ActivationFns
    queue: Any


@dataclass(frozen=True)
class _GroupedOptions:
    """What grouped GEMMs of all experts compute with besides tensors.

    Attributes:
        counts: tokens per expert, on the host or the device.
        num_used: tokens that experts may have, as far as the host knows; those after them are unused.
        queue: takes weight gradients.
        add_weight_grad: the kernel of GroupedWeightGrad.
    """

    counts: tuple[int, ...] | Tensor
    num_used: int
    activation: ActivationFns
    gemms: GroupedGemms
    queue: Any
    add_weight_grad: Callable[..., None] | None

    @property
    def host_counts(self) -> tuple[int, ...] | None:
        return None if isinstance(self.counts, Tensor) else self.counts


class ExpertWeights(NamedTuple):
    """Stacked weights and biases of fc1 and fc2 of all local experts."""

    w1_eGH: Tensor
    w2_eHF: Tensor
    b1_eG: Tensor | None = None
    b2_eH: Tensor | None = None


class ExpertMLPKernels(NamedTuple):
    """Kernels of the experts' MLP; None for those of torch.

    Attributes:
        gemms: grouped GEMMs for any size.
        add_weight_grad: adds weight gradients of all experts to fp32 sums (the kernel of GroupedWeightGrad).
    """

    activation: ActivationFns | None = None
    gemms: GroupedGemms | None = None
    add_weight_grad: Callable[..., None] | None = None


TORCH_MLP_KERNELS = ExpertMLPKernels()


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RH, probs_R, w1, b1, w2, b2, options: _LoopOptions | _GroupedOptions):
        p_R = None if probs_R is None else probs_R.contiguous()
        ctx.options, ctx.offsets, ctx.has_b1 = options, None, b1 is not None
        ctx.owners = grad_owner(w1), grad_owner(w2)
        if isinstance(options, _LoopOptions):
            h_RG, y_RH = _forward_loop(x_RH, p_R, w1, b1, w2, b2, options)
        else:
            ctx.offsets = token_offsets(options.counts, x_RH.device)
            h_RG, y_RH = _forward_grouped(x_RH, p_R, w1, b1, w2, b2, options, ctx.offsets)
        ctx.save_for_backward(x_RH, p_R, h_RG, w1, w2, b2)
        return y_RH

    @staticmethod
    def backward(ctx, grad_RH):
        run = _backward_loop if isinstance(ctx.options, _LoopOptions) else _backward_grouped
        grad_x, grad_p, grad_w1, grad_b1, grad_w2, grad_b2 = run(ctx, grad_RH.contiguous(), *ctx.saved_tensors)
        grad_w1, grad_w2 = (
            compute_or_defer(ctx.options.queue, owner, grad) for owner, grad in zip(ctx.owners, (grad_w1, grad_w2))
        )
        return grad_x, grad_p, grad_w1, grad_b1, grad_w2, grad_b2, None


def _defers(queue: Any) -> bool:
    return queue is not None and queue.active


class WeightOwner(NamedTuple):
    """The parameter of which a weight is made; `convert` makes its gradient of the weight's."""

    parameter: Tensor
    convert: Callable[[Tensor], Tensor]


def grad_owner(weight: Tensor) -> Tensor | WeightOwner:
    """Return what keeps the gradient of a weight: itself, or what its attribute `grad_owner` says."""
    return getattr(weight, "grad_owner", weight)


def owner_dtype(owner: Tensor | WeightOwner) -> torch.dtype:
    """Return the dtype in which a weight's gradient is computed: wide if it is added to a wide sum at once."""
    return owner.parameter.dtype if isinstance(owner, WeightOwner) else gradient_dtype(owner)


def compute_or_defer(
    queue: Any, owner: Tensor | WeightOwner, grad: Callable[[], Tensor | None] | None
) -> Tensor | None:
    """Compute a weight gradient in backward.

    Returns None if it is not needed, if the queue takes it, or if it was added to the main gradient. The latter happens
    at once, so that gradients of several weights are never allocated together.
    """
    if grad is None:
        return None
    if not _defers(queue):
        return _add_or_return(owner, grad)
    # outside backward gradients would be recorded
    if isinstance(owner, WeightOwner):
        queue.defer(owner.parameter, torch.no_grad()(lambda: _add_converted(owner, grad)))
    else:
        queue.defer(owner, torch.no_grad()(lambda: _add_or_return(owner, grad)))
    return None


def _add_converted(owner: WeightOwner, grad: Callable[[], Tensor | None]) -> Tensor | None:
    computed = grad()
    return None if computed is None else add_to_main_grad(owner.parameter, owner.convert(computed))


def _add_or_return(owner: Tensor | WeightOwner, grad: Callable[[], Tensor | None]) -> Tensor | None:
    if isinstance(owner, WeightOwner):
        return grad()  # autograd converts it
    if not isinstance(grad, GroupedWeightGrad):
        computed = grad()
        return None if computed is None else add_to_main_grad(owner, computed)
    total = get_main_grad_sum(owner, grad.x_RK)
    if total is None:
        return grad()
    grad.add_to(total)
    return None


class _StackGrad:
    """Gradient of a stacked weight, computed expert by expert: on `add`, or all when called.

    Attributes:
        total: the main gradient, if that takes it; else grad_eNK does.
    """

    total: MainGradSum | None
    grad_eNK: Tensor  # noqa: N815 - has the shape of the weight

    def __init__(self, weight_eNK: Tensor, experts: Sequence[int], owner: Tensor | WeightOwner, later: bool):
        """Allocate the gradient, unless it is added to the main gradient.

        Args:
            experts: those with tokens.
            later: store the operands and compute when called.
        """
        self.later, self.owner = later, owner
        self.none, self.shape = weight_eNK.new_empty(0), weight_eNK.shape  # not the weight, which may be dropped
        self.others = set(range(len(weight_eNK))).difference(experts)
        self.pieces: list[tuple[int, Tensor, Tensor]] = []
        if not later:
            self._open()

    def _open(self) -> None:
        # autograd converts the gradient of a weight that is made of a parameter
        self.total = None if isinstance(self.owner, WeightOwner) else get_main_grad_sum(self.owner, self.none)
        if self.total is None:
            self.grad_eNK = self.none.new_zeros(self.shape) if self.others else self.none.new_empty(self.shape)
        else:
            for expert in self.others:
                self.total.slice(expert).clear()

    def add(self, expert: int, grad_RN: Tensor, x_RK: Tensor) -> None:
        if self.later:
            self.pieces.append((expert, grad_RN, x_RK))
        elif self.total is not None:
            self.total.slice(expert).add(grad_RN.t(), x_RK)
        else:
            torch.mm(grad_RN.t(), x_RK, out=self.grad_eNK[expert])

    def __call__(self) -> Tensor | None:
        if self.later:
            self.later = False
            self._open()
            for piece in self.pieces:
                self.add(*piece)
            self.pieces.clear()
        return self.grad_eNK if self.total is None else None


def _linear(x: Tensor, w_t: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, w_t, out=out) if bias is None else torch.addmm(bias, x, w_t, out=out)


def _window(x: Tensor, start: int, stop: int, size: int) -> Tensor:
    """Return `size` tokens of x from `start`; those from `stop` on belong to the next experts, or are zeros."""
    if start + size <= x.shape[0]:
        return x[start : start + size]
    padded = x.new_zeros(size, *x.shape[1:])
    padded[: stop - start] = x[start:stop]
    return padded


def _forward_loop(x_RH, p_R, w1, b1, w2, b2, options: _LoopOptions):
    ranges = expert_ranges(options.counts, x_RH)
    slack = max((start + size for _, start, _, size in ranges), default=0)
    # an expert's surplus tokens overwrite the start of the next one's, which come later and are written then
    h_RG = x_RH.new_empty(max(slack, x_RH.shape[0]), w1.shape[1])
    y_RH = x_RH.new_empty(h_RG.shape[0], w2.shape[1])
    for expert, start, stop, size in ranges:
        p = None if p_R is None else _window(p_R, start, stop, size)
        rows = slice(start, start + size)
        x = _window(x_RH, start, stop, size)
        h = _linear(x, w1[expert].t(), None if b1 is None else b1[expert], h_RG[rows])
        y = torch.mm(options.activation.forward(h, p), w2[expert].t(), out=y_RH[rows])
        if b2 is not None:
            y += b2[expert] if p is None else torch.outer(p.to(b2.dtype), b2[expert])
    return h_RG, y_RH[: x_RH.shape[0]]


def _backward_loop(ctx, grad_RH, x_RH, p_R, h_RG, w1, w2, b2):
    needs_x, needs_w = ctx.needs_input_grad[0], ctx.needs_input_grad[2] or ctx.needs_input_grad[4]
    options: _LoopOptions = ctx.options
    ranges = expert_ranges(options.counts, x_RH)
    grad_x = x_RH.new_empty(h_RG.shape[0], x_RH.shape[1]) if needs_x else None
    grad_p = None if p_R is None else torch.empty_like(p_R)
    grad_w1 = grad_w2 = None
    if needs_w:
        experts, later = [expert for expert, *_ in ranges], _defers(options.queue)
        grad_w1, grad_w2 = (_StackGrad(w, experts, owner, later) for w, owner in zip((w1, w2), ctx.owners))
    grad_b1 = w1.new_zeros(w1.shape[:2]) if ctx.has_b1 else None
    grad_b2 = None if b2 is None else torch.zeros_like(b2)
    for expert, start, stop, size in ranges:
        p, grad_y = None if p_R is None else _window(p_R, start, stop, size), _window(grad_RH, start, stop, size)
        rows, count = slice(start, start + size), stop - start
        a, grad_h, block_grad_p = options.activation.backward(h_RG[rows], p, grad_y @ w2[expert])
        if size > count:  # surplus tokens must add nothing to the weights' gradients
            a[count:].zero_()
            grad_h[count:].zero_()
        if grad_w1 is not None and grad_w2 is not None:
            grad_w2.add(expert, grad_y, a)
            grad_w1.add(expert, grad_h, _window(x_RH, start, stop, size))
        if grad_x is not None:
            torch.mm(grad_h, w1[expert], out=grad_x[rows])
        if grad_b1 is not None:
            torch.sum(grad_h, 0, out=grad_b1[expert])
        if grad_b2 is not None:
            used = grad_y[:count]
            grad_b2[expert] = used.sum(0) if p is None else used.t() @ p[:count].to(used.dtype)
        if grad_p is not None and block_grad_p is not None:
            grad_p[start:stop] = block_grad_p[:count]
            if b2 is not None:
                grad_p[start:stop] += grad_y[:count] @ b2[expert]
    return None if grad_x is None else grad_x[: x_RH.shape[0]], grad_p, grad_w1, grad_b1, grad_w2, grad_b2


def _blocks(num_tokens: int, is_cuda: bool) -> list[tuple[int, int]]:
    step = max(1, num_tokens) if is_cuda else BLOCK_TOKENS
    return [(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


def _forward_grouped(x_RH, p_R, w1, b1, w2, b2, options: _GroupedOptions, offsets):
    num_used, activation, gemms = options.num_used, options.activation, options.gemms
    h_RG = gemms.forward(x_RH, w1, offsets)
    if b1 is not None:
        h_RG[:num_used] += _bias_per_token(b1, offsets, options)
    blocks = _blocks(num_used, x_RH.is_cuda)
    if blocks == [(0, x_RH.shape[0])]:
        a_RF = activation.forward(h_RG, p_R)
    else:
        a_RF = x_RH.new_empty(x_RH.shape[0], w2.shape[2])
        for start, stop in blocks:
            a_RF[start:stop] = activation.forward(h_RG[start:stop], None if p_R is None else p_R[start:stop])
    y_RH = gemms.forward(a_RF, w2, offsets)
    if b2 is not None:
        bias_RH = _bias_per_token(b2, offsets, options)
        y_RH[:num_used] += bias_RH if p_R is None else bias_RH * p_R[:num_used].unsqueeze(1)
    return h_RG, y_RH


def _bias_per_token(bias_eN: Tensor, offsets_e: Tensor, options: _GroupedOptions) -> Tensor:
    """Return the bias of each used token's expert without synchronizing."""
    num_used = options.num_used
    if options.host_counts is not None:
        sizes_e = offsets_e.diff(prepend=offsets_e.new_zeros(1))
        return bias_eN.repeat_interleave(sizes_e, dim=0, output_size=num_used)
    token_R = torch.arange(num_used, dtype=offsets_e.dtype, device=offsets_e.device)  # some may be no expert's
    return bias_eN[torch.searchsorted(offsets_e, token_R, right=True).clamp_(max=len(bias_eN) - 1)]


def _backward_grouped(ctx, grad_RH, x_RH, p_R, h_RG, w1, w2, b2):
    options: _GroupedOptions = ctx.options
    offsets, num_used = ctx.offsets, options.num_used
    activation, gemms = options.activation, options.gemms
    grad_a = gemms.input_grad(grad_RH, w2, offsets)
    blocks = _blocks(num_used, x_RH.is_cuda)
    if blocks == [(0, x_RH.shape[0])]:
        grad_a, grad_h, grad_p = activation.backward(h_RG, p_R, grad_a)  # the first is a from here on
    else:
        grad_p = None if p_R is None else torch.empty_like(p_R)
        grad_h = torch.empty_like(h_RG)
        for start, stop in blocks:
            p = None if p_R is None else p_R[start:stop]
            a, block_grad_h, block_grad_p = activation.backward(h_RG[start:stop], p, grad_a[start:stop])
            grad_a[start:stop] = a  # from here on the buffer holds a: the block's grad_a has been used
            grad_h[start:stop] = block_grad_h
            if grad_p is not None and block_grad_p is not None:
                grad_p[start:stop] = block_grad_p
    grad_w1 = grad_w2 = None
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[4]:
        how = offsets, options.host_counts, options.add_weight_grad
        grad_w1 = GroupedWeightGrad(gemms, grad_h, x_RH, *how)
        grad_w2 = GroupedWeightGrad(gemms, grad_RH, grad_a, *how)
    grad_x = gemms.input_grad(grad_h, w1, offsets) if ctx.needs_input_grad[0] else None
    grad_b1 = _sum_tokens(grad_h, options, offsets, x_RH.dtype) if ctx.has_b1 else None
    grad_b2 = None
    if b2 is not None:
        weighed_RH = grad_RH if p_R is None else grad_RH * p_R.unsqueeze(1)
        grad_b2 = _sum_tokens(weighed_RH, options, offsets, x_RH.dtype).to(b2.dtype)
        if grad_p is not None:
            grad_p[:num_used] += (grad_RH[:num_used] * _bias_per_token(b2, offsets, options)).sum(-1)
    return grad_x, grad_p, grad_w1, grad_b1, grad_w2, grad_b2


def _sum_tokens(rows_RN: Tensor, options: _GroupedOptions, offsets_e: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each expert's tokens; with counts on the device in `dtype`, that of the GEMMs."""
    counts = options.host_counts
    if counts is None:
        return options.gemms.sum_tokens(rows_RN.to(dtype), offsets_e)
    sums = rows_RN.new_zeros(len(counts), rows_RN.shape[1])
    for expert, start, stop, _ in expert_ranges(counts):
        torch.sum(rows_RN[start:stop], 0, out=sums[expert])
    return sums


def _aligned(w1_eGH: Tensor, w2_eHF: Tensor) -> bool:
    """Return whether the rows of all operands have the alignment of grouped_mm."""
    return math.gcd(*w1_eGH.shape[1:], *w2_eHF.shape[1:]) * w1_eGH.element_size() % 16 == 0


def can_read_counts_on_device(w1_eGH: Tensor, w2_eHF: Tensor, gemms: GroupedGemms | None) -> bool:
    """Return whether `expert_mlp` accepts counts on the device, with these weights and GEMMs."""
    return gemms is not None or (can_read_offsets_on_device(w1_eGH.dtype, w1_eGH.device) and _aligned(w1_eGH, w2_eHF))


def expert_mlp(
    x_RH: Tensor,
    probs_R: Tensor | None,
    weights: ExpertWeights,
    counts: Sequence[int] | Tensor,
    activation: Activation,
    *,
    kernels: ExpertMLPKernels = TORCH_MLP_KERNELS,
    allow_grouped: bool = True,
    queue: Any = None,
    unused: int = 0,
) -> Tensor:
    """Run every expert on its tokens: y = p * (act(x @ w1^T + b1) @ w2^T + b2), with p applied before fc2.

    Args:
        probs_R: any floating dtype; None for no weighting.
        counts: tokens per expert, zero allowed. A device tensor needs a grouped GEMM (`can_read_counts_on_device`);
            results for tokens beyond those it counts are undefined.
        kernels: replace the torch versions; their GEMMs have any size if grouping is allowed.
        allow_grouped: use one grouped GEMM where it is faster (grouped_gemm.prefer_grouped).
        queue: takes weight gradients while active in backward: has `active` and `defer(weight, compute)`.
        unused: number of zero tokens after the last expert's; their results are undefined.

    Raises:
        ValueError: if the counts do not add up to R, or are on the device and cannot be read there.
    """
    num_used, gemms = x_RH.shape[0] - unused, kernels.gemms
    w1_eGH, w2_eHF, b1_eG, b2_eH = weights
    fns = kernels.activation or get_activation_fns(activation)
    inputs = x_RH.contiguous(), probs_R, w1_eGH, b1_eG, w2_eHF, b2_eH
    if isinstance(counts, Tensor):
        if not allow_grouped:
            raise ValueError("expert_mlp: counts on the device need a grouped GEMM")
        gemms = gemms or GROUPED_MM
    else:
        check_token_counts("expert_mlp", counts, num_used)
        counts = tuple(counts)
        prefer = prefer_grouped(num_used, len(counts), x_RH.dtype, x_RH.device)
        if gemms is None and prefer and _aligned(w1_eGH, w2_eHF):
            gemms = GROUPED_MM
        if gemms is None or not allow_grouped or not num_used:
            return _ExpertMLP.apply(*inputs, _LoopOptions(counts, fns, queue))
    options = _GroupedOptions(counts, num_used, fns, gemms, queue, kernels.add_weight_grad)
    return _ExpertMLP.apply(*inputs, options)
