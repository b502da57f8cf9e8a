"""What the layers of a chunk read in a forward pass besides hidden states.

The chunk makes it once of the microbatch and its `SequenceBorders`; layers get that one value, and each reads what it
uses.

Shapes: T this rank's tokens that a router reads, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.rotary import Tables
from moe_trainer.ops.packed_sequences import Packed, ValidTokens


@dataclass(frozen=True)
class PassInputs:
    """What the layers of one rank read in a pass.

    Captured parts of layers (memory/cuda_graph.py) read these tensors without having them as inputs: they are in the
    same memory in every pass. What is drawn for a layer (`forced_TE`) is an input of its parts.

    Attributes:
        ropes: cos and sin of every layer of the chunk, then of multi-token prediction.
        visible: see CoreAttention.
        grad_scale: factor of the auxiliary (balancing, z, indexer, MTP) losses in the gradient.
        valid: tokens that are no padding; padding is routed but counts in no loss or bias, and in no expert's capacity.
            None for all.
        token_ids_T: ids of the tokens, which hash routing reads.
        packed: lengths of packed sequences.
        forced_TE: logits that replace those of a layer's router (TopKRouter.draw_forced_logits).
    """

    ropes: tuple[Tables | None, ...] = ()
    visible: AttentionMask | None = None
    grad_scale: float | Tensor = 1.0
    valid: ValidTokens | None = None
    token_ids_T: Tensor | None = None
    packed: Packed | None = None
    forced_TE: Tensor | None = None


PLAIN_PASS = PassInputs()
"""Those of rows without padding, whose tokens' ids no router reads."""
