"""Where the sequences of a microbatch are: what a chunk is given besides tokens, positions and labels.

Shapes: S the full sequence, B microbatch, T tokens of a packed row.
"""

from dataclasses import dataclass

from torch import Tensor

from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.ops.packed_sequences import Packed
from moe_trainer.parallel.sequence import SequenceShard


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


def shard_of(sequence: SequenceShard, packed: Packed | None) -> SequenceShard:
    """Return the shard of a microbatch, which may be packed."""
    return sequence if packed is None else sequence.of(packed.padded_lengths, packed.cp_size)
