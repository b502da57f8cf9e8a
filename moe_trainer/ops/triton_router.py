"""Top-k routing as one Triton kernel each way, and the scores and counts of the balancing losses as another.

The torch version (moe/router.py: score_topk) is a dozen small operations over [T, E]: for 8 to 512 experts their launches cost
more than their memory. Here a program holds all scores of a few tokens in registers; k rounds of arg-max choose, lower indices first
among equal scores. Groups are scored the same way, group by group. Backward recomputes the scores from the logits and needs only the
routing map besides.

Rounding: scores, choice and weights are in fp32 (fp64 for fp64 logits), as in the torch version, so that both choose alike; weights are
rounded once, at the end. On exactly equal scores torch.topk may choose another expert.

`balance` gives what the balancing losses read: normalised scores, their slope, and per sequence the sums of scores and the counts of
chosen experts. A program stays inside one sequence and writes its own sums; torch adds them: no atomics.

Shapes: T tokens (= S * B, token s * B + b), E experts, K top-k, G groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_trainer.ops.triton_blocks import block_of, wide

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


@triton.jit
def _choose(keys, expert, K: tl.constexpr):
    """The K largest keys of each row, by K rounds of arg-max. Returns a bool tile."""
    chosen = tl.zeros_like(keys) > 0
    for _ in tl.static_range(K):
        best = tl.argmax(tl.where(chosen, float("-inf"), keys), 1)
        chosen = chosen | (expert[None, :] == best[:, None])
    return chosen


@triton.jit
def _in_best_groups(keys, expert, inside, NUM_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PER_GROUP: tl.constexpr,
                    SCORED: tl.constexpr, GROUP_TOPK: tl.constexpr):
    """Experts in the GROUP_TOPK groups with the largest sums of their SCORED best keys."""
    group = tl.arange(0, PADDED_GROUPS)
    scores = tl.zeros_like(tl.sum(keys, 1))[:, None] + tl.where(group < NUM_GROUPS, 0.0, float("-inf"))[None, :]
    for number in tl.static_range(NUM_GROUPS):
        member = (expert // PER_GROUP == number)[None, :] & inside
        taken = _choose(tl.where(member, keys, float("-inf")), expert, SCORED)
        total = tl.sum(tl.where(taken, keys, 0.0), 1)
        scores = tl.where((group == number)[None, :], total[:, None], scores)
    best = _choose(scores, group, GROUP_TOPK).to(tl.int32)
    allowed = tl.zeros_like(keys) > 0
    for number in tl.static_range(NUM_GROUPS):
        is_best = tl.sum(tl.where((group == number)[None, :], best, 0), 1) > 0
        allowed = allowed | ((expert // PER_GROUP == number)[None, :] & is_best[:, None])
    return allowed & inside


@triton.jit
def choose_kernel(logits, bias, probs, routing, num_tokens, num_experts, stride, scaling, K: tl.constexpr, SCORE: tl.constexpr,
                  PRE_SOFTMAX: tl.constexpr, BIASED: tl.constexpr, NUM_GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
                  PER_GROUP: tl.constexpr, SCORED: tl.constexpr, GROUP_TOPK: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
                  EXPERTS: tl.constexpr):
    """Scores, choice and weights of TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    real = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    inside = (token >= 0)[:, None] & (expert < num_experts)[None, :]
    value = tl.load(logits + token[:, None] * stride + expert[None, :], mask=real, other=0.0).to(WIDE)
    scores = value
    if SCORE == "softmax":
        if PRE_SOFTMAX:
            scores = _softmax(value, inside)
    else:
        scores = _raw_scores(value, SCORE)
    keys = tl.where(inside, scores, float("-inf"))
    if BIASED:
        keys = keys + tl.load(bias + expert, mask=expert < num_experts, other=0.0).to(WIDE)[None, :]
    if GROUP_TOPK > 0:
        allowed = _in_best_groups(keys, expert, inside, NUM_GROUPS, PADDED_GROUPS, PER_GROUP, SCORED, GROUP_TOPK)
        keys = tl.where(allowed, keys, float("-inf"))
    chosen = _choose(keys, expert, K)
    if SCORE == "softmax" and not PRE_SOFTMAX:
        weights = _softmax(value, chosen)
    else:
        weights = tl.where(chosen, scores, 0.0)
        if SCORE != "softmax" and K > 1:
            weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    at = token[:, None] * num_experts + expert[None, :]
    tl.store(probs + at, (weights * scaling).to(probs.dtype.element_ty), mask=real)
    tl.store(routing + at, chosen.to(tl.uint8), mask=real)


@triton.jit
def backward_kernel(grad, logits, routing, grad_logits, num_tokens, num_experts, stride, grad_stride, scaling, K: tl.constexpr,
                    SCORE: tl.constexpr, PRE_SOFTMAX: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Gradient of the logits of TOKENS tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    real = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    inside = (token >= 0)[:, None] & (expert < num_experts)[None, :]
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
        result = weights * (g - tl.sum(weights * g, 1)[:, None])
    else:
        scores = _raw_scores(value, SCORE)
        if K > 1:
            total = (tl.sum(tl.where(chosen, scores, 0.0), 1) + 1e-20)[:, None]
            g = tl.where(chosen, (g - tl.sum(g * scores, 1)[:, None] / total) / total, 0.0)
        result = g * _raw_slope(value, scores, SCORE)
    tl.store(grad_logits + at, result.to(grad_logits.dtype.element_ty), mask=real)


@triton.jit
def balance_kernel(logits, scores_out, slope_out, sums, counts, length, num_sequences, num_experts, K: tl.constexpr,
                   SCORE: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Normalised scores of TOKENS tokens of one sequence, and their sums and counts per expert."""
    place = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    sequence = tl.program_id(1)
    expert = tl.arange(0, EXPERTS)
    real = (place < length)[:, None] & (expert < num_experts)[None, :]
    inside = (place >= 0)[:, None] & (expert < num_experts)[None, :]
    at = (place[:, None] * num_sequences + sequence) * num_experts + expert[None, :]
    value = tl.load(logits + at, mask=real, other=0.0).to(WIDE)
    if SCORE == "softmax":
        scores = _softmax(value, inside)
        slope = scores
    else:
        raw = _raw_scores(value, SCORE)
        total = (tl.sum(tl.where(inside, raw, 0.0), 1) + 1e-20)[:, None]
        scores = raw / total
        slope = _raw_slope(value, raw, SCORE) / total
        tl.store(slope_out + at, slope, mask=real)
    tl.store(scores_out + at, scores, mask=real)
    chosen = _choose(tl.where(inside, scores, float("-inf")), expert, K)
    mine = (tl.program_id(0).to(tl.int64) * num_sequences + sequence) * num_experts + expert
    tl.store(sums + mine, tl.sum(tl.where(real, scores, 0.0), 0), mask=expert < num_experts)
    tl.store(counts + mine, tl.sum((chosen & real).to(WIDE), 0), mask=expert < num_experts)


def _tile(num_experts: int, num_tokens: int) -> tuple[int, int]:
    experts = block_of(num_experts, 1 << 16, 2)
    return block_of(num_tokens, max(1, TILE // experts), 1), experts


class _ScoreTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, topk, score, pre_softmax, groups, scaling, bias_E):
        num_tokens, num_experts = logits_TE.shape
        logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
        num_groups, group_topk = groups if groups[1] else (1, 0)
        probs_TE = logits_TE.new_empty(num_tokens, num_experts)
        routing_TE = torch.empty(num_tokens, num_experts, dtype=torch.bool, device=logits_TE.device)
        if num_tokens:
            tokens, experts = _tile(num_experts, num_tokens)
            choose_kernel[(triton.cdiv(num_tokens, tokens),)](
                logits_TE, logits_TE if bias_E is None else bias_E, probs_TE, routing_TE.view(torch.uint8), num_tokens, num_experts,
                logits_TE.stride(0), scaling, K=topk, SCORE=score, PRE_SOFTMAX=pre_softmax, BIASED=bias_E is not None,
                NUM_GROUPS=num_groups, PADDED_GROUPS=block_of(num_groups, 1 << 16, 2), PER_GROUP=num_experts // num_groups,
                SCORED=topk // group_topk if group_topk else 1, GROUP_TOPK=group_topk, WIDE=wide(logits_TE.dtype), TOKENS=tokens,
                EXPERTS=experts)
        ctx.save_for_backward(logits_TE, routing_TE)
        ctx.plan = topk, score, pre_softmax, scaling
        ctx.mark_non_differentiable(routing_TE)
        return probs_TE, routing_TE

    @staticmethod
    def backward(ctx, grad_TE, _):
        logits_TE, routing_TE = ctx.saved_tensors
        topk, score, pre_softmax, scaling = ctx.plan
        num_tokens, num_experts = logits_TE.shape
        grad_TE = grad_TE if grad_TE.stride(1) == 1 else grad_TE.contiguous()
        grad_logits = logits_TE.new_empty(num_tokens, num_experts)
        if num_tokens:
            tokens, experts = _tile(num_experts, num_tokens)
            backward_kernel[(triton.cdiv(num_tokens, tokens),)](
                grad_TE, logits_TE, routing_TE.view(torch.uint8), grad_logits, num_tokens, num_experts, logits_TE.stride(0),
                grad_TE.stride(0), scaling, K=topk, SCORE=score, PRE_SOFTMAX=pre_softmax, WIDE=wide(logits_TE.dtype), TOKENS=tokens,
                EXPERTS=experts)
        return grad_logits, None, None, None, None, None, None


def fused_topk(logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None, group_topk: int | None = None,
               scaling_factor: float | None = None, score_function: str = "softmax",
               expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose top-k experts per token and weigh them; as moe/router.py: score_topk, in the form of TopKRouter.fused_topk.

    The bias takes part in the choice only, and only of sigmoid and sqrtsoftplus scores. Returns: probs_TE, routing_TE bool.
    """
    bias_E = None if score_function == "softmax" else expert_bias
    return _ScoreTopK.apply(logits, topk, score_function, bool(use_pre_softmax), (num_groups, group_topk or 0),
                            float(scaling_factor or 1.0), bias_E)


def balance(logits_TE: Tensor, topk: int, score_function: str, num_sequences: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the balancing losses read of a microbatch, without gradient.

    Returns: scores_TE that sum to one over the experts; slope_TE, r'(logit) / sum(r) of their unnormalised form r (scores_TE itself
    for softmax); per sequence the sums of scores and the counts of the plain top-k, both [B, E]. All fp32 or wider.
    """
    dtype = torch.promote_types(logits_TE.dtype, torch.float32)
    logits_TE = logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    length = num_tokens // num_sequences
    scores_TE = torch.empty(num_tokens, num_experts, dtype=dtype, device=logits_TE.device)
    slope_TE = scores_TE if score_function == "softmax" else torch.empty_like(scores_TE)
    tokens, experts = _tile(num_experts, length)
    partial = torch.zeros(2, triton.cdiv(length, tokens), num_sequences, num_experts, dtype=dtype, device=logits_TE.device)
    if num_tokens:
        balance_kernel[(partial.shape[1], num_sequences)](
            logits_TE, scores_TE, slope_TE, partial[0], partial[1], length, num_sequences, num_experts, K=topk, SCORE=score_function,
            WIDE=wide(logits_TE.dtype), TOKENS=tokens, EXPERTS=experts)
    sums_BE, counts_BE = partial.sum(1)
    return scores_TE, slope_TE, sums_BE, counts_BE
