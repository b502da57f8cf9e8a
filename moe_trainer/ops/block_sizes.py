"""Sizes that determine what a step allocates, for the model and for memory plans, which have no torch."""

import math

BLOCKED_MAX_LENGTH = 512
"""Maximum positions of causal attention in blocks on a CPU (attention.py)."""
QUERY_BLOCK = 64
"""Queries of a block there, and of sparse attention on a CPU."""
SPARSE_QUERY_BLOCK_CUDA, SPARSE_ELEMENTS_CUDA = 512, 1 << 27
"""Maximum queries of a block of sparse attention on a GPU, and elements of [heads, block, keys]."""
DELTA_CHUNK, DELTA_SEGMENT = 64, 16
"""Positions of a chunk, and chunks of a segment, of the gated delta rule (gated_delta_rule.py)."""
MAMBA_CONV_WIDTH = 4
"""Positions of the convolution of a Mamba layer; Megatron-Core has no flag for it."""


def expert_buffer_tokens(even: int, factor: float) -> int:
    """Return the tokens of the experts' buffers with --moe-expert-rank-capacity-factor.

    `even` is their number if every rank receives as many as it sends.
    """
    return math.ceil(round(even * factor, 6))  # 100 * 1.1 is a little more than 110
