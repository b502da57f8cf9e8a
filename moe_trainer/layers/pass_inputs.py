"""What a forward pass of a chunk reads besides its tokens.

The caller gives `SequenceBorders`. The chunk makes the `PassInputs` of them once; its layers get that one value, and
each reads what it uses.

Shapes: S the full sequence, B microbatch, T this rank's tokens that a router reads, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.rotary import Tables
from moe_trainer.ops.packed_sequences import Packed, ValidTokens


@dataclass(frozen=True)
class SequenceBorders:
    """Where the sequences of a microbatch begin and end; without any of it every row is one sequence.

    Attributes:
        attention_mask: None for causal, else bool [B or 1, 1, S, S], True = hidden (Megatron's convention).
        document_ids_BS: packed documents, instead of a mask; on the CPU, or in a captured iteration on the device
            (see Documents).
        packed: lengths of packed sequences [1, T], instead of document ids. Rotary positions restart too, and
            padding does not count in the balancing losses.
        row_lengths: tokens of every row before its padding, which does not count either; None without padding.
        cache: of earlier positions (layers/kv_cache.py, which has the shapes of passes); of the others only row lengths
            may be given with it.
    """

    attention_mask: Tensor | None = None
    document_ids_BS: Tensor | None = None
    packed: Packed | None = None
    row_lengths: tuple[int, ...] | None = None
    cache: KVCache | None = None


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
