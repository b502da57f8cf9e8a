"""The parameter-free heart of attention: scores, mask, softmax, values."""

import math

from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.ops.attention import attention, sliding_window_mask


def uses_window(model: ModelArgs, layer_number: int) -> bool:
    """Whether this layer (counted from 1) attends to a window only: --window-size, --window-attn-skip-freq.

    An integer frequency N makes every N-th layer a full one; a list holds one flag per layer.
    """
    freq = model.window_attn_skip_freq
    if model.window_size is None:
        return False
    if freq is None:
        return True
    if isinstance(freq, int):
        return layer_number % freq != 0
    return bool(freq[layer_number - 1])


class CoreAttention(nn.Module):
    """Causal attention of one layer, with an optional sliding window, an explicit mask, and dropout.

    The softmax is taken in fp32 whatever the activations' dtype, so --attention-softmax-in-fp32 and
    --apply-query-key-layer-scaling (which only guards fp16 scores against overflow) change nothing here.
    """

    def __init__(self, model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None):
        """head_dim: width of a key. scale: of the scores; None means 1/sqrt(head_dim)."""
        super().__init__()
        if model.softmax_type != "vanilla":
            raise ValueError(f"--softmax-type {model.softmax_type}: attention sinks are not built yet; use vanilla")
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.dropout_p = model.attention_dropout
        self.window = model.window_size[0] if uses_window(model, layer_number) else None

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, visible: Tensor | None) -> Tensor:
        """visible: None for causal, else a bool mask [B or 1, 1, S, S], True = may be attended to.

        Returns: [S, B, N * E].
        """
        if self.window is not None and 0 <= self.window < q_SBND.shape[0]:
            window = sliding_window_mask(q_SBND.shape[0], self.window, q_SBND.device)
            visible = window if visible is None else visible & window
        dropout_p = self.dropout_p if self.training else 0.0
        return attention(q_SBND, k_SBGD, v_SBGE, self.scale, visible, dropout_p)
