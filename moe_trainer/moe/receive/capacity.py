"""The capacity of experts: which tokens are dropped beyond it, and what it fixes of the counts before routing.

Shape letters: T tokens, E experts.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from arguments.moe import MoEArgs, is_padded_to_capacity
from moe_trainer.moe.dispatch.base import CacheFn, KnownCounts, no_cache

CountsFn = Callable[[int], KnownCounts | None]
"""From the number of a rank's tokens to what the host knows of their counts before it reads the routing."""


def unknown_counts(num_tokens: int) -> None:
    """Know nothing."""


def counts_before_routing(moe: MoEArgs, topk: int, num_experts: int) -> CountsFn:
    """Return what is known if the experts get the tokens that the router sends, and no others."""
    factor = moe.moe_expert_capacity_factor
    if factor is None or factor < 0:
        return lambda num_tokens: KnownCounts(num_tokens * topk)
    if not is_padded_to_capacity(moe):
        return unknown_counts

    def padded(num_tokens: int) -> KnownCounts:
        per_expert = expert_capacity(num_tokens, topk, num_experts, factor)
        return KnownCounts(per_expert * num_experts, per_expert)

    return padded


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
