"""Rows of experts in multiples that quantised products take (--moe-router-padding-for-quantization)."""

import torch
from torch import Tensor


@torch.no_grad()
def pad_routing(routing_TE: Tensor, multiple: int) -> Tensor:
    """Send further tokens to every expert until it gets a multiple of tokens of this rank, or all of them: the first ones that it
    does not have yet. Their probability stays zero, so they add nothing to a result or to a gradient.

    They do take part in maxima of quantised blocks that lie along the rows, as in Megatron-Core.
    """
    missing_E = -routing_TE.sum(0) % multiple
    free_TE = ~routing_TE
    return routing_TE | (free_TE & (free_TE.cumsum(0) <= missing_E))
