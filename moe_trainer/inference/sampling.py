"""The choice of the next token from logits.

Shapes: T sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 1e-5
"""Logits divided by a smaller one could exceed fp32."""


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: only so many of the most probable tokens; 0 for all.
        top_p: only the most probable tokens, up to the one with which their probability reaches this.
        seed: a sequence's draws depend on it and on the sequence's number only, not on batches or the mapping.

    Raises:
        ValueError: for a number that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not SMALLEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} must be 0, or finite and at least {SMALLEST_TEMPERATURE}")
        if self.top_k < 0:
            raise ValueError(f"top-k {self.top_k} must be 0 (all tokens) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top-p {self.top_p} must be above 0, and at most 1")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must be 0 or above")
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0):
            raise ValueError("top-k and top-p need a temperature above 0: without one the most probable token is taken")


def choose_tokens(logits_TV: Tensor, options: SamplingOptions, draws_T: Tensor | None) -> Tensor:
    """Return the chosen tokens, int64 [T].

    Args:
        draws_T: uniform random numbers in [0, 1); None with temperature 0.
    """
    if draws_T is None:
        return logits_TV.argmax(-1)
    values_TV, tokens_TV = (logits_TV.float() / options.temperature).sort(dim=-1, descending=True, stable=True)
    probs_TV = torch.softmax(values_TV, -1)
    if options.top_k:
        probs_TV[:, options.top_k :] = 0.0
        probs_TV /= probs_TV.sum(-1, keepdim=True)
    before_TV = probs_TV.cumsum(-1) - probs_TV
    probs_TV = probs_TV.masked_fill(before_TV >= options.top_p, 0.0)
    reached_TV = probs_TV.cumsum(-1)
    places_T = torch.searchsorted(reached_TV, (draws_T.to(reached_TV) * reached_TV[:, -1]).unsqueeze(1), right=True)
    num_kept_T = (probs_TV > 0).sum(-1, keepdim=True)
    return tokens_TV.gather(1, torch.minimum(places_T, num_kept_T - 1)).squeeze(1)
