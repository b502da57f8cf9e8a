"""What one attention notes of its largest logits, for --qk-clip and --log-max-attention-logit."""

import torch
from torch import Tensor

from arguments.model import ModelArgs
from moe_trainer.layers.core_attention import Visible
from moe_trainer.ops.block_attention import Rule, Run
from moe_trainer.ops.logit_peaks import largest_logits
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group
from moe_trainer.shape.layers import uses_window


class LogitPeaks:
    """The largest logit of every head of this rank since `forget`, over its own queries; nothing unless `watched`.

    Under context parallelism the keys are gathered once more: which rank meets which keys depends on --cp-comm-type, this does not.
    """

    def __init__(self, model: ModelArgs, layer_number: int, scale: float, cp: Group):
        self.watched = False
        self._scale, self._sequence = scale, SequenceShard(cp)
        self._left = model.window_size[0] if uses_window(model, layer_number) else -1
        self._peaks_N: Tensor | None = None

    def forget(self) -> None:
        """Begin an iteration."""
        self._peaks_N = None

    @torch.no_grad()
    def see(self, q_SBND: Tensor, k_SBGD: Tensor, visible: Visible | None) -> None:
        """Look at the scores of a microbatch. Collective over the context-parallel ranks."""
        if not self.watched:
            return
        keys = self._sequence.full(k_SBGD, 0)
        size, length = self._sequence.cp.size, keys.shape[0]
        half = length // (2 * size)
        mine = [Run(0, length)] if size == 1 else [Run(number * half, (number + 1) * half) for number in self._sequence.chunks()]
        mask, documents = (None, None) if visible is None else (visible.mask, visible.documents)
        found_N = largest_logits(q_SBND, keys, self._scale, Rule(left=self._left, documents=documents), mine, mask)
        self._peaks_N = found_N if self._peaks_N is None else torch.maximum(self._peaks_N, found_N)

    def found(self, num_heads: int, device: torch.device) -> Tensor:
        """fp32 [N]; -inf where nothing was seen."""
        return torch.full((num_heads,), float("-inf"), device=device) if self._peaks_N is None else self._peaks_N
