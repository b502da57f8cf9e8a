"""The parameter-free heart of attention: scores, mask, softmax, values."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from arguments.model import ModelArgs
from moe_trainer.layers.init import hidden_std, make_parameter
from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.ops.attention import attention, pads_values, sliding_window_mask
from moe_trainer.ops.block_attention import Documents, Rule
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group
from moe_trainer.shape.layers import uses_window


@dataclass(frozen=True)
class Visible:
    """What a query may attend to, beside the causal rule and the layer's window.

    mask: bool [B or 1, 1, S, S], True = may be attended to; replaces the causal rule.
    documents: of the whole sequence; a query sees its own one only. No [S, S] mask is ever made of them.
    """

    mask: Tensor | None = None
    documents: Documents | None = None

    @staticmethod
    def of(attention_mask: Tensor | None, document_ids_BS: Tensor | None, device: torch.device | None = None) -> "Visible | None":
        """attention_mask: True = hidden (Megatron's convention). document_ids_BS: of every position of the whole sequence; see Documents.of.

        Returns: None when there is the causal rule only. Raises: ValueError for both, or decreasing ids.
        """
        if attention_mask is not None and document_ids_BS is not None:
            raise ValueError("give an attention mask or document ids, not both")
        if document_ids_BS is not None:
            return Visible(documents=Documents.of(document_ids_BS, device))
        return None if attention_mask is None else Visible(mask=~attention_mask)


def make_sinks(model: ModelArgs, name: str, tp: Group) -> Parameter | None:
    """The learned sinks (--softmax-type learnable) of this rank's query heads, [N / tp]; None without. name: of the attention."""
    if model.softmax_type != "learnable":
        return None
    return make_parameter((model.num_attention_heads // tp.size,), ParamInfo(
        (f"{name}.core_attention.softmax_offset",), sharded_dim=0, shard_rank=tp.rank, shard_count=tp.size, init="normal",
        init_std=hidden_std(model)))


class CoreAttention(nn.Module):
    """Causal attention of one layer over the whole sequence, with an optional sliding window, an explicit mask or packed
    documents, and dropout.

    With sinks (--softmax-type) every head has one key more, whose value is zero: scores may then go nowhere.
    The softmax is taken in fp32 whatever the activations' dtype, so --attention-softmax-in-fp32 and
    --apply-query-key-layer-scaling (which only guards fp16 scores against overflow) change nothing here.
    """

    def __init__(self, model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None):
        """head_dim: width of a key. scale: of the scores; None means 1/sqrt(head_dim)."""
        super().__init__()
        self.has_sinks, self.one_more = model.softmax_type != "vanilla", model.softmax_type == "off-by-one"
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.dropout_p = model.attention_dropout
        self.saves_inputs = False  # instead of what is made of them: where inputs are not kept
        self.value_width: int | None = None  # of values that may come padded; see pads_values
        self.window = model.window_size[0] if uses_window(model, layer_number) else None

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, visible: Visible | None = None,
                sink_N: Tensor | None = None) -> Tensor:
        """visible: None for the causal rule only. sink_N: learned ones. Returns: [S, B, N * E].

        Raises: ValueError for sinks with an explicit mask.
        """
        if self._goes_by_blocks(visible):
            rule = self.rule(visible, q_SBND.device)
            return ring_attention(q_SBND, k_SBGD, v_SBGE, self.scale, rule, Group.single("one rank"), self.sinks(q_SBND, sink_N))
        dropout_p = self.dropout_p if self.training else 0.0
        mask = None if visible is None else visible.mask
        if self._window_cuts(q_SBND.shape[0]):
            window = sliding_window_mask(q_SBND.shape[0], self.window, q_SBND.device)
            mask = window if mask is None else mask & window
        return attention(q_SBND, k_SBGD, v_SBGE, self.scale, mask, dropout_p, self.saves_inputs, self.value_width)

    def sinks(self, q_SBND: Tensor, learned_N: Tensor | None) -> Tensor | None:
        """The score of one key more for every head, fp32 or wider: zero adds one to the denominator (--softmax-type off-by-one)."""
        wide = torch.promote_types(q_SBND.dtype, torch.float32)
        if self.one_more:
            return torch.zeros(q_SBND.shape[2], dtype=wide, device=q_SBND.device)
        return None if learned_N is None else learned_N.to(wide)

    def _goes_by_blocks(self, visible: Visible | None) -> bool:
        if self.has_sinks and visible is not None and visible.mask is not None:
            raise ValueError("attention sinks (--softmax-type) are not built for explicit attention masks; give document ids")
        return self.has_sinks or (visible is not None and visible.documents is not None)

    def pads_values(self, length: int, visible: Visible | None, device: torch.device) -> bool:
        """Will values be brought to the width of keys? Then they may come so."""
        if self._goes_by_blocks(visible):
            return False
        masked = visible is not None or self._window_cuts(length)
        return pads_values(length, masked, self.dropout_p if self.training else 0.0, device)

    def _window_cuts(self, length: int) -> bool:
        return self.window is not None and 0 <= self.window < length

    def rule(self, visible: Visible | None, device: torch.device) -> Rule:
        """What blockwise attention is told. With dropout a seed is drawn from the device's global generator."""
        dropout_p = self.dropout_p if self.training else 0.0
        return Rule(
            left=-1 if self.window is None else self.window,
            documents=None if visible is None else visible.documents,
            dropout_p=dropout_p,
            seed=int(torch.randint(1 << 62, (), device=device)) if dropout_p > 0.0 else 0)
