"""Top-k routing as one Triton kernel each way, and the balancing losses with their gradient as three.

The torch version (moe/selections/topk.py: score_topk) is a dozen small operations whose launches cost more than their
memory. A program holds all scores of a few tokens in registers; k rounds of arg-max choose, lower indices first among
ties (torch.topk may differ on exact ties). Every token gets k experts, whatever its logits: NaN is the largest score,
as for torch.topk. Backward recomputes scores from the logits. Scores, choice and weights are fp32
(fp64 for fp64); weights are rounded once. Balancing losses (moe/balancing.py) take two steps, between which counts may
be reduced over ranks: `count_choices`, then `balancing_gradient`. A program stays inside one sequence and writes
partial sums, which a second kernel adds: no atomics.

Shapes: T tokens (= S * B, token s * B + b), B sequences, E experts, K top-k, G groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.triton_blocks import block_size, choose_largest, sum_partials, wide

TILE = 2048  # scores that a program holds


@triton.jit
def _raw_scores(logits, SCORE: tl.constexpr):
    """Sigmoid, or the root of softplus, of logits."""
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.sqrt(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    return scores


@triton.jit
def _raw_slope(logits, scores, SCORE: tl.constexpr):
    """Derivative of _raw_scores."""
    if SCORE == "sigmoid":
        slope = scores * (1.0 - scores)
    else:
        slope = 1.0 / (1.0 + tl.exp(-logits)) / (2.0 * scores)
    return slope


@triton.jit
def _softmax(values, inside):
    """Softmax over the columns inside; 0 elsewhere."""
    values = tl.where(inside, values, float("-inf"))
    top = tl.max(values, 1)[:, None]
    powers = tl.where(inside, tl.exp(values - top), 0.0)
    return powers / tl.sum(powers, 1)[:, None]


@triton.constexpr_function
def _padded(num_groups):
    """Return the power of two that covers the groups, at least 2."""
    return max(2, 1 << (num_groups - 1).bit_length())


@triton.jit
def _in_best_groups(
    keys,
    expert,
    inside,
    NUM_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SCORED: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
):
    """Experts in the GROUP_TOPK groups with the largest sums of their SCORED best keys."""
    group = tl.arange(0, _padded(NUM_GROUPS))
    scores = tl.zeros([keys.shape[0], group.shape[0]], keys.dtype)
    for number in tl.static_range(NUM_GROUPS):
        member = (expert // PER_GROUP == number)[None, :] & inside
        taken = choose_largest(keys, member, expert, SCORED)
        total = tl.sum(tl.where(taken, keys, 0.0), 1)
        scores = tl.where((group == number)[None, :], total[:, None], scores)
    best = choose_largest(scores, (group < NUM_GROUPS)[None, :], group, GROUP_TOPK).to(tl.int32)
    allowed = tl.zeros_like(keys) > 0
    for number in tl.static_range(NUM_GROUPS):
        is_best = tl.sum(tl.where((group == number)[None, :], best, 0), 1) > 0
        allowed = allowed | ((expert // PER_GROUP == number)[None, :] & is_best[:, None])
    return allowed & inside


@triton.jit
def _cells(num_tokens, num_experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Of this program: tokens, experts, which pairs of them there are, and which columns."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    real = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    return token, expert, real, (token >= 0)[:, None] & (expert < num_experts)[None, :]


@triton.jit
def choose_kernel(
    logits,
    bias,
    probs,
    routing,
    num_tokens,
    num_experts,
    stride,
    scaling,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    SCORED: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Scores, choice and weights of TOKENS tokens."""
    WIDE: tl.constexpr = wide(logits.dtype.element_ty)
    token, expert, real, inside = _cells(num_tokens, num_experts, TOKENS, EXPERTS)
    value = tl.load(logits + token[:, None] * stride + expert[None, :], mask=real, other=0.0).to(WIDE)
    scores = value
    if SCORE == "softmax":
        if PRE_SOFTMAX:
            scores = _softmax(value, inside)
    else:
        scores = _raw_scores(value, SCORE)
    keys = scores
    if bias is not None:
        if SCORE == "softmax" and not PRE_SOFTMAX:
            keys = _softmax(value, inside)
        keys = keys + tl.load(bias + expert, mask=expert < num_experts, other=0.0).to(WIDE)[None, :]
    allowed = inside
    if GROUP_TOPK > 0:
        allowed = _in_best_groups(keys, expert, inside, NUM_GROUPS, PER_GROUP, SCORED, GROUP_TOPK)
    chosen = choose_largest(keys, allowed, expert, K)
    weights = scores
    if SCORE == "softmax" and not PRE_SOFTMAX:
        weights = _softmax(value, chosen)
    if SCORE != "softmax" and K > 1:
        weights = scores / (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]
    weights = tl.where(chosen, weights, 0.0)  # also if their sum is NaN
    at = token[:, None] * num_experts + expert[None, :]
    tl.store(probs + at, (weights * scaling).to(probs.dtype.element_ty), mask=real)
    tl.store(routing + at, chosen.to(tl.uint8), mask=real)


@triton.jit
def backward_kernel(
    grad,
    logits,
    routing,
    grad_logits,
    num_tokens,
    num_experts,
    stride,
    grad_stride,
    scaling,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    PRE_SOFTMAX: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Gradient of the logits of TOKENS tokens."""
    WIDE: tl.constexpr = wide(logits.dtype.element_ty)
    token, expert, real, inside = _cells(num_tokens, num_experts, TOKENS, EXPERTS)
    at = token[:, None] * num_experts + expert[None, :]
    value = tl.load(logits + token[:, None] * stride + expert[None, :], mask=real, other=0.0).to(WIDE)
    chosen = tl.load(routing + at, mask=real, other=0) != 0
    g = tl.load(grad + token[:, None] * grad_stride + expert[None, :], mask=real, other=0.0).to(WIDE) * scaling
    g = tl.where(chosen, g, 0.0)
    if SCORE == "softmax":
        among = chosen
        if PRE_SOFTMAX:
            among = inside
        # a row beyond the last token has nothing chosen: keep its softmax finite
        weights = _softmax(value, among | (token >= num_tokens)[:, None])
        result = tl.where(among, weights * (g - tl.sum(weights * g, 1)[:, None]), 0.0)
    else:
        scores = _raw_scores(value, SCORE)
        if K > 1:
            total = (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]
            g = tl.where(chosen, (g - tl.sum(g * scores, 1)[:, None] / total) / total, 0.0)
        result = g * _raw_slope(value, scores, SCORE)
    tl.store(grad_logits + at, result.to(grad_logits.dtype.element_ty), mask=real)


@triton.jit
def _cells_of_sequence(length, num_experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """The same of one sequence's tokens, with their places in the [T, E] map instead of the tokens."""
    place, expert, real, inside = _cells(length, num_experts, TOKENS, EXPERTS)
    token = place[:, None] * tl.num_programs(1) + tl.program_id(1)
    return token * num_experts + expert[None, :], expert, real, inside


@triton.jit
def _log_sum(values, inside):
    """Logarithm of the sum of exponentials over the columns inside."""
    values = tl.where(inside, values, float("-inf"))
    top = tl.max(values, 1)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)  # inf - inf would be NaN
    return top + tl.log(tl.sum(tl.where(inside, tl.exp(values - top[:, None]), 0.0), 1))


@triton.jit
def _normalised(value, inside, SCORE: tl.constexpr):
    """Scores that sum to one over the experts, and the slope of their unnormalised form over its sum."""
    if SCORE == "softmax":
        scores = _softmax(value, inside)
        slope = scores
    else:
        raw = _raw_scores(value, SCORE)
        total = (tl.sum(tl.where(inside, raw, 0.0), 1) + 1e-20)[:, None]
        scores = raw / total
        slope = _raw_slope(value, raw, SCORE) / total
    return scores, slope


@triton.jit
def count_kernel(
    logits,
    partial,
    length,
    num_experts,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Of TOKENS tokens of one sequence: per expert sums of scores and counts of the plain top-k; squared log-sums.

    partial: [programs, B, 2 * E + 1].
    """
    WIDE: tl.constexpr = partial.dtype.element_ty
    at, expert, real, inside = _cells_of_sequence(length, num_experts, TOKENS, EXPERTS)
    value = tl.load(logits + at, mask=real, other=0.0).to(WIDE)
    scores, _ = _normalised(value, inside, SCORE)
    chosen = choose_largest(scores, inside, expert, K)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    mine = partial + program * (2 * num_experts + 1)
    tl.store(mine + expert, tl.sum(tl.where(real, scores, 0.0), 0), mask=expert < num_experts)
    tl.store(mine + num_experts + expert, tl.sum((chosen & real).to(WIDE), 0), mask=expert < num_experts)
    log_sum = _log_sum(value, inside)
    tl.store(mine + 2 * num_experts, tl.sum(tl.where(tl.sum(real.to(tl.int32), 1) > 0, log_sum * log_sum, 0.0), 0))


@triton.jit
def gradient_kernel(
    logits,
    sums,
    counts,
    running,
    steps,
    grad,
    values,
    length,
    num_experts,
    count_stride,
    of_all,
    of_each,
    of_running,
    coeff_all,
    coeff_each,
    coeff_running,
    coeff_z,
    factor,
    SCORE: tl.constexpr,
    LOSSES: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """The losses' gradient for TOKENS tokens of one sequence; the first program writes the losses' values.

    of_all, of_each, of_running: what counts are multiplied with in the three losses, 0 where a loss is not wanted;
    coeff_*: of the losses, coeff_z with all that belongs to the gradient of the z-loss, None without that loss.
    """
    WIDE: tl.constexpr = grad.dtype.element_ty
    sequence, num_sequences = tl.program_id(1), tl.num_programs(1)
    at, expert, real, inside = _cells_of_sequence(length, num_experts, TOKENS, EXPERTS)
    known = expert < num_experts
    value = tl.load(logits + at, mask=real, other=0.0).to(WIDE)
    result = tl.zeros([TOKENS, EXPERTS], WIDE)
    if LOSSES:
        whole = tl.zeros([EXPERTS], WIDE)
        for other in range(num_sequences):
            whole += tl.load(counts + other * count_stride + expert, mask=known, other=0.0)
        mean = tl.zeros([EXPERTS], WIDE)
        if running is not None:
            mean = tl.load(running + expert, mask=known, other=0.0).to(WIDE) / tl.load(steps).to(WIDE)
        own = tl.load(counts + sequence * count_stride + expert, mask=known, other=0.0)
        weight = (coeff_all * of_all * whole + coeff_each * of_each * own + coeff_running * of_running * mean)[None, :]
        scores, slope = _normalised(value, inside, SCORE)
        result = slope * (weight - tl.sum(tl.where(inside, scores * weight, 0.0), 1)[:, None])
        if tl.program_id(0) + sequence == 0:
            scored = tl.zeros([EXPERTS], WIDE)
            each = tl.zeros([EXPERTS], WIDE)
            for other in range(num_sequences):
                score = tl.load(sums + other * (2 * num_experts + 1) + expert, mask=known, other=0.0)
                scored += score
                each += score * tl.load(counts + other * count_stride + expert, mask=known, other=0.0)
            tl.store(values, (tl.sum(scored * whole, 0) * of_all).to(tl.float32))
            tl.store(values + 1, (tl.sum(each, 0) * of_each).to(tl.float32))
            tl.store(values + 2, (tl.sum(scored * mean, 0) * of_running).to(tl.float32))
    elif tl.program_id(0) + sequence == 0:
        for name in tl.static_range(3):
            tl.store(values + name, 0.0)
    squares = 0.0
    if coeff_z is not None:
        result += _softmax(value, inside) * (_log_sum(value, inside) * coeff_z)[:, None]
        if tl.program_id(0) + sequence == 0:
            for other in range(num_sequences):
                squares += tl.load(sums + other * (2 * num_experts + 1) + 2 * num_experts).to(tl.float32)
    if tl.program_id(0) + sequence == 0:
        tl.store(values + 3, squares / tl.maximum(length * num_sequences, 1))
    tl.store(grad + at, result * factor, mask=real)


@triton.jit
def attach_kernel(grad, more, scale, out, numel, factor, BLOCK: tl.constexpr):
    """Write grad + more * factor; the factor is the number at `scale` if there is one."""
    WIDE: tl.constexpr = more.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    if scale is not None:
        factor = tl.load(scale).to(WIDE)
    total = tl.load(grad + place, mask=inside, other=0.0).to(WIDE)
    total += tl.load(more + place, mask=inside, other=0.0) * factor
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def _tile(num_experts: int, num_tokens: int) -> tuple[int, int]:
    experts = block_size(num_experts, 1 << 16, 2)
    return block_size(num_tokens, max(1, TILE // experts), 1), experts


class _ScoreTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, topk, score, pre_softmax, groups, scaling, bias_E):
        num_tokens, num_experts = logits_TE.shape
        logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
        num_groups, group_topk, scored = groups if groups[1] else (1, 0, 0)
        probs_TE = logits_TE.new_empty(num_tokens, num_experts)
        routing_TE = torch.empty(num_tokens, num_experts, dtype=torch.bool, device=logits_TE.device)
        if num_tokens:
            tokens, experts = _tile(num_experts, num_tokens)
            choose_kernel[(triton.cdiv(num_tokens, tokens),)](
                logits_TE,
                bias_E,
                probs_TE,
                routing_TE.view(torch.uint8),
                num_tokens,
                num_experts,
                logits_TE.stride(0),
                scaling,
                K=topk,
                SCORE=score,
                PRE_SOFTMAX=pre_softmax,
                NUM_GROUPS=num_groups,
                PER_GROUP=num_experts // num_groups,
                GROUP_TOPK=group_topk,
                SCORED=scored or topk // max(group_topk, 1),
                TOKENS=tokens,
                EXPERTS=experts,
            )
        ctx.save_for_backward(logits_TE, routing_TE)
        ctx.set_materialize_grads(False)
        ctx.plan = topk, score, pre_softmax, scaling
        ctx.mark_non_differentiable(routing_TE)
        return probs_TE, routing_TE

    @staticmethod
    def backward(ctx, grad_TE, _):
        logits_TE, routing_TE = ctx.saved_tensors
        if grad_TE is None:
            return (None,) * 7
        topk, score, pre_softmax, scaling = ctx.plan
        num_tokens, num_experts = logits_TE.shape
        grad_TE = grad_TE if grad_TE.stride(1) == 1 else grad_TE.contiguous()
        grad_logits = logits_TE.new_empty(num_tokens, num_experts)
        if num_tokens:
            tokens, experts = _tile(num_experts, num_tokens)
            backward_kernel[(triton.cdiv(num_tokens, tokens),)](
                grad_TE,
                logits_TE,
                routing_TE.view(torch.uint8),
                grad_logits,
                num_tokens,
                num_experts,
                logits_TE.stride(0),
                grad_TE.stride(0),
                scaling,
                K=topk,
                SCORE=score,
                PRE_SOFTMAX=pre_softmax,
                TOKENS=tokens,
                EXPERTS=experts,
            )
        return grad_logits, None, None, None, None, None, None


def fused_topk(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose top-k experts per token and weigh them; as moe/selections/topk.py: score_topk, with the arguments of TE.

    The bias takes part in the choice only. Returns: probs_TE, routing_TE bool.
    """
    return _ScoreTopK.apply(
        logits,
        topk,
        score_function,
        bool(use_pre_softmax),
        (num_groups, group_topk or 0, group_score_topk or 0),
        float(scaling_factor or 1.0),
        expert_bias,
    )


class Counted(NamedTuple):
    """Per sequence: sums of scores, counts of the plain top-k, sum of squared log-sums; views of one tensor."""

    sums_BE: Tensor
    counts_BE: Tensor
    squares_B: Tensor


def count_choices(logits_TE: Tensor, topk: int, score_function: str, num_sequences: int) -> Counted:
    """What the balancing losses read of a microbatch; fp32 or wider."""
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    logits_TE = logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    length = num_tokens // num_sequences
    tokens, experts = _tile(num_experts, length)
    programs, size = triton.cdiv(length, tokens), num_sequences * (2 * num_experts + 1)
    partial, sums = (
        torch.empty(shape, dtype=dtype, device=logits_TE.device)
        for shape in ((programs, size), (num_sequences, 2 * num_experts + 1))
    )
    if num_tokens:
        count_kernel[(programs, num_sequences)](
            logits_TE, partial, length, num_experts, K=topk, SCORE=score_function, TOKENS=tokens, EXPERTS=experts
        )
    sum_partials(partial, sums)
    sums_BE, counts_BE, _ = sums.split([num_experts, num_experts, 1], 1)
    return Counted(sums_BE, counts_BE, sums[:, -1])


def balancing_gradient(
    logits_TE: Tensor,
    counted: Counted,
    counts_BE: Tensor,
    running: tuple[Tensor, Tensor] | None,
    scales: Sequence[float],
    coefficients: Sequence[float],
    score_function: str,
    z_coefficient: float | None,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Return the losses, fp32 [4], and `factor` times the gradient of their weighted sum.

    Args:
        counts_BE: token counts over all ranks whose tokens count; rows are contiguous.
        running: counts [E] summed over microbatches, and the number of microbatches.
        scales: factors of the counts: over all sequences, per sequence, of the running mean; 0 leaves a loss out.
        coefficients: of these three losses.
        z_coefficient: of the z-loss, a mean over this rank's tokens, and 2 / (number of tokens); None without it.
    """
    logits_TE = logits_TE.contiguous()
    (num_tokens, num_experts), num_sequences = logits_TE.shape, counted.sums_BE.shape[0]
    length = num_tokens // num_sequences
    grad_TE = torch.empty(logits_TE.shape, dtype=counted.sums_BE.dtype, device=logits_TE.device)
    values = torch.empty(4, dtype=torch.float32, device=logits_TE.device)
    tokens, experts = _tile(num_experts, length)
    gradient_kernel[(max(1, triton.cdiv(length, tokens)), num_sequences)](
        logits_TE,
        counted.sums_BE,
        counts_BE,
        *(running or (None, None)),
        grad_TE,
        values,
        length,
        num_experts,
        counts_BE.stride(0),
        *scales,
        *coefficients,
        z_coefficient,
        factor,
        SCORE=score_function,
        LOSSES=any(scales),
        TOKENS=tokens,
        EXPERTS=experts,
    )
    return values, grad_TE


class _AttachGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, grad_TE, grad_scale):
        ctx.grad_TE, ctx.grad_scale = grad_TE, grad_scale
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx, grad_TE):
        more_TE, scale = ctx.grad_TE, ctx.grad_scale
        scale, factor = (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)
        grad_TE = grad_TE.contiguous()
        out = torch.empty_like(grad_TE)
        if out.numel():
            grid = (triton.cdiv(out.numel(), 1024),)
            attach_kernel[grid](grad_TE, more_TE, scale, out, out.numel(), factor, BLOCK=1024)
        return out, None, None


def attach_gradient(logits_TE: Tensor, grad_TE: Tensor, grad_scale: float | Tensor) -> Tensor:
    """As moe/balancing.py: attach_gradient."""
    return _AttachGradient.apply(logits_TE, grad_TE, grad_scale)


BALANCING = Balancing(count_choices, balancing_gradient, attach_gradient)
