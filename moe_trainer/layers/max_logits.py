"""What one attention notes of its largest logits, for --qk-clip and --log-max-attention-logit."""

import torch
from torch import Tensor

from arguments.layer_pattern import left_window, uses_chunks
from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.ops.block_attention import BlockMask, PositionRange
from moe_trainer.ops.max_logits import max_logits_per_head
from moe_trainer.parallel.sequence import SequenceShard, zigzag_ranges
from moe_trainer.parallel.state import ContextGroups


class MaxLogitTracker:
    """Largest logit of every local head since `reset`, over the local queries; does nothing unless `enabled`.

    Under context parallelism the keys are gathered once more, whatever --cp-comm-type does.
    """

    def __init__(self, model: ModelArgs, layer_number: int, scale: float, groups: ContextGroups):
        self.enabled = False
        self._scale, self._sequence = scale, SequenceShard.over(groups)
        left = left_window(model, layer_number)
        self._left = -1 if left is None else left
        self._chunk = model.attention_chunk_size or 0 if uses_chunks(model, layer_number) else 0
        self._max_N: Tensor | None = None

    def reset(self) -> None:
        """Forget the maxima, at the beginning of an iteration."""
        self._max_N = None

    @torch.no_grad()
    def update(self, q_SBND: Tensor, k_SBGD: Tensor, visible: AttentionMask | None) -> None:
        """Include the scores of a microbatch. Collective over the context-parallel ranks."""
        if not self.enabled:
            return
        shard = self._sequence if visible is None else self._sequence.of(visible.lengths, visible.cp_size)
        keys, cp = shard.full(k_SBGD, 0), shard.cp
        mine = [PositionRange(*ends) for ends in zigzag_ranges(cp.rank, cp.size, keys.shape[0], shard.lengths)]
        mask, documents = (None, None) if visible is None else (visible.mask, visible.documents)
        block_mask = BlockMask(left=self._left, chunk=self._chunk, documents=documents)
        new_N = max_logits_per_head(q_SBND, keys, self._scale, block_mask, mine, mask)
        self._max_N = new_N if self._max_N is None else torch.maximum(self._max_N, new_N)

    def value(self, num_heads: int, device: torch.device) -> Tensor:
        """Return the maxima, fp32 [N]; -inf if there were no updates."""
        return torch.full((num_heads,), float("-inf"), device=device) if self._max_N is None else self._max_N
