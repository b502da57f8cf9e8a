"""Scores, top-k selection and weights of experts, as functions of tensors; capacity and token drop.

Numerics as Megatron-Core since 0.18: scores, selection and normalization in fp32 (fp64 for fp64 logits), weights
rounded to the dtype of the logits at the end; ties as torch.topk breaks them.

Shape letters: T tokens, E experts, K top-k.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from arguments.moe import ExpertGrid
from moe_trainer.moe.dispatch.base import CacheFn, no_cache
from moe_trainer.moe.finermoe import choose_slices
from moe_trainer.moe.routing_margin import mask_to_best_groups


@torch.no_grad()
def _select(
    scores_TE: Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    group_score_topk: int | None,
    grid: ExpertGrid | None,
) -> Tensor:
    if grid is not None:
        return choose_slices(scores_TE, grid, topk)
    if group_topk:
        scores_TE = mask_to_best_groups(scores_TE, num_groups, group_topk, group_score_topk or topk // group_topk)[1]
    return scores_TE.topk(topk, dim=-1)[1]


@torch.no_grad()
def order_given_experts(given_TK: Tensor, chosen_TK: Tensor, scores_TE: Tensor) -> Tensor:
    """Return given experts, best first, as top-k returns them: sums over K then round alike.

    Args:
        given_TK: experts in any order; -1 in the rows of tokens whose experts are not given.
        chosen_TK: experts of those tokens.
        scores_TE: scores that top-k orders.
    """
    order_TK = scores_TE.gather(1, given_TK.clamp(min=0)).argsort(dim=1, descending=True, stable=True)
    return torch.where(given_TK[:, :1] < 0, chosen_TK, given_TK.gather(1, order_TK))


def score_topk(
    logits_TE: Tensor,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias_E: Tensor | None = None,
    cache_fn: CacheFn = no_cache,
    grid: ExpertGrid | None = None,
    chosen_TK: Tensor | None = None,
    routing_TE: Tensor | None = None,
    given_TK: Tensor | None = None,
    sparsemixer_jitter: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Select top-k experts per token and compute their weights.

    Args:
        logits_TE: router logits.
        topk: experts per token.
        score_function: softmax, sigmoid or sqrtsoftplus.
        pre_softmax: softmax over all experts before selection.
        num_groups: number of expert groups.
        group_topk: groups per token.
        group_score_topk: experts whose scores sum to that of their group; None: topk // group_topk.
        scaling_factor: factor of the weights.
        expert_bias_E: bias of the selection; weights come from unbiased scores.
        cache_fn: wraps the selection.
        grid: FineRMoE's, which selects by logits.
        chosen_TK: experts that the caller has selected.
        routing_TE: their map.
        given_TK: experts from outside; see order_given_experts.
        sparsemixer_jitter: weigh as SparseMixer does; see sparsemixer_weights.

    Returns:
        probs_TE in the dtype of the logits, zero if not selected; routing_TE bool.
    """
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    biased_TE = scores_TE = logits_TE
    if score_function != "softmax":
        raw_TE = logits_TE.to(wide)
        scores_TE = torch.sigmoid(raw_TE) if score_function == "sigmoid" else F.softplus(raw_TE).sqrt()
        biased_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
    elif pre_softmax:
        biased_TE = scores_TE = torch.softmax(logits_TE, dim=-1, dtype=wide)
    if score_function == "softmax" and expert_bias_E is not None:
        # FineRMoE's grid adds logits; elsewhere (ERNIE-4.5) the bias is one of shares
        summed_TE = logits_TE.to(wide) if grid is not None else torch.softmax(logits_TE.detach(), dim=-1, dtype=wide)
        biased_TE = summed_TE + expert_bias_E
    if chosen_TK is None:
        chosen_TK = cache_fn(lambda: _select(biased_TE, topk, num_groups, group_topk, group_score_topk, grid))
    if given_TK is not None:
        own_TK, routing_TE = chosen_TK, None
        chosen_TK = cache_fn(lambda: order_given_experts(given_TK, own_TK, biased_TE))
    if routing_TE is None:
        routing_TE = to_routing_map(chosen_TK, logits_TE)
    if sparsemixer_jitter is not None:
        weights_TK = sparsemixer_weights(logits_TE, chosen_TK, sparsemixer_jitter) * (scaling_factor or 1.0)
        return torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK.to(logits_TE.dtype)), routing_TE
    shared = score_function == "sigmoid" and topk > 1
    if logits_TE.is_cuda and (shared or score_function == "softmax" and not pre_softmax):
        # a pass over all experts is fewer kernels than gather and scatter of the selected ones
        return _NormalizeSelected.apply(
            logits_TE, scores_TE.detach() if shared else None, routing_TE, scaling_factor or 1.0
        ), routing_TE
    weights_TK = scores_TE.gather(1, chosen_TK)
    if score_function == "softmax" and not pre_softmax:
        weights_TK = torch.softmax(weights_TK, dim=-1, dtype=wide)
    elif score_function != "softmax" and topk > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor:
        weights_TK = weights_TK * scaling_factor
    return torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK.to(logits_TE.dtype)), routing_TE


def sparsemixer_weights(logits_TE: Tensor, chosen_TK: Tensor, jitter: float) -> Tensor:
    """Return the weights of the chosen experts, the best first, [T, 2] in fp32 or wider.

    An expert's weight is its share of a softmax over the experts that are left, the better one being taken away, and
    whose logits l are near its own logit m: (m - l) / max(|l|, m) <= 2 * jitter.

    Source: "GRIN: GRadient-INformed MoE", section 2 (arXiv 2409.12136), in the form without sampling, which
    `transformers` computes in evaluation. Sampling and its estimate of the gradient are not here: the choice of experts
    has no gradient, as with a softmax.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    weights, is_left_TE = [], torch.ones_like(logits_TE, dtype=torch.bool)
    for chosen_T1 in chosen_TK.split(1, dim=1):
        with torch.no_grad():  # in the dtype of the logits, as the library decides it
            best_T1 = logits_TE.gather(1, chosen_T1)
            distance_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
            is_near_TE = is_left_TE & ~(distance_TE > 2 * jitter)  # 0 / 0 is near
            is_left_TE = is_left_TE.scatter(1, chosen_T1, False)
        weights.append(torch.softmax(wide_TE.masked_fill(~is_near_TE, float("-inf")), dim=-1).gather(1, chosen_T1))
    return torch.cat(weights, dim=1)


def to_routing_map(chosen_TK: Tensor, logits_TE: Tensor) -> Tensor:
    """Return the selected experts as bool [T, E]."""
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)


class _NormalizeSelected(torch.autograd.Function):
    """Softmax or normalized sigmoid over the selected experts, times a factor; 0 for the others."""

    @staticmethod
    def forward(ctx, logits_TE: Tensor, sigmoid_TE: Tensor | None, routing_TE: Tensor, factor: float) -> Tensor:
        if sigmoid_TE is None:
            wide = torch.promote_types(logits_TE.dtype, torch.float32)
            share_TE = torch.where(routing_TE, logits_TE, float("-inf")).softmax(-1, dtype=wide)
        else:
            share_TE = sigmoid_TE * routing_TE
            share_TE /= share_TE.sum(-1, keepdim=True).add_(1e-20)
        ctx.save_for_backward(sigmoid_TE, share_TE)
        ctx.factor, ctx.dtype = factor, logits_TE.dtype
        return share_TE.to(ctx.dtype) if factor == 1.0 else torch.mul(share_TE, factor, out=torch.empty_like(logits_TE))

    @staticmethod
    def backward(ctx, grad_TE: Tensor):
        sigmoid_TE, share_TE = ctx.saved_tensors
        grad_TE = (
            grad_TE.to(share_TE.dtype)
            if ctx.factor == 1.0
            else torch.mul(grad_TE, ctx.factor, out=torch.empty_like(share_TE))
        )
        # both have softmax's gradient in the logarithm of the score; that of log(sigmoid) is 1 - sigmoid
        grad_TE = torch._softmax_backward_data(
            grad_TE, share_TE, -1, share_TE.dtype
        )  # CUDA's writes no bf16 of an fp32 gradient
        return (grad_TE if sigmoid_TE is None else grad_TE * (1.0 - sigmoid_TE)).to(ctx.dtype), None, None, None


def expert_capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the tokens that an expert accepts: ceil(tokens * topk / experts * factor), at most all tokens."""
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def drop_beyond_capacity(
    probs_TE: Tensor, routing_TE: Tensor, capacity: int, policy: str, pad: bool, cache_fn: CacheFn = no_cache
) -> tuple[Tensor, Tensor]:
    """Drop tokens beyond each expert's capacity, those of smallest probability (policy probs) or the last (position).

    Probabilities are not renormalized. With pad, experts below capacity take further tokens with probability 0.

    Args:
        probs_TE: routing probabilities.
        routing_TE: routing map.
        capacity: tokens per expert.
        policy: probs or position.
        pad: fill up to capacity.
        cache_fn: wraps the decision.

    Returns:
        probs_TE and routing_TE of the remaining tokens.
    """
    remaining_TE = cache_fn(lambda: _within_capacity(probs_TE.detach(), routing_TE, capacity, policy, pad))
    return probs_TE * remaining_TE, remaining_TE


def _within_capacity(probs_TE: Tensor, routing_TE: Tensor, capacity: int, policy: str, pad: bool) -> Tensor:
    # tokens of the expert first, then the candidates for padding; equal keys retain token order
    key_TE = routing_TE.to(torch.float64)
    if policy == "probs":
        key_TE = key_TE * 2 + probs_TE
    order_TE = key_TE.argsort(dim=0, descending=True, stable=True)[:capacity]
    remaining_TE = torch.zeros_like(routing_TE).scatter_(0, order_TE, True)
    return remaining_TE if pad else remaining_TE & routing_TE
