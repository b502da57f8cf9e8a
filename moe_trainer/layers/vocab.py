"""Everything sized by the vocabulary: token embedding, output projection with its loss.

Shapes: S sequence, B microbatch, H hidden, V padded vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.layers.init import Init, make_parameter
from moe_trainer.ops.cross_entropy import linear_cross_entropy
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group


class VocabParallelEmbedding(nn.Module):
    """Rows of a [V, H] table, cut over the group along V. tied, copy: see ParamInfo."""

    def __init__(self, num_rows: int, hidden_size: int, *, name: str, group: Group, init: Init, tied: bool = False,
                 copy: bool = False):
        super().__init__()
        if group.size > 1:
            raise ValueError(f"{name}: a {group.name} group of {group.size} ranks; tensor parallelism is not built yet")
        self.weight = make_parameter((num_rows, hidden_size), ParamInfo(
            (f"{name}.weight",), sharded_dim=0, init=init.kind, init_std=init.std, tied=tied, copy=copy))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., H]."""
        return F.embedding(ids, self.weight)


class OutputHead(nn.Module):
    """Logits and per-token loss of hidden states, with its own [V, H] weight or the embedding's.

    The weight is an argument of both methods when it is the embedding's (tied head).
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, name: str, group: Group, init: Init, tied: bool):
        super().__init__()
        if group.size > 1:
            raise ValueError(f"{name}: a {group.name} group of {group.size} ranks; tensor parallelism is not built yet")
        self.weight = None if tied else make_parameter((vocab_size, hidden_size), ParamInfo(
            (f"{name}.weight",), sharded_dim=0, init=init.kind, init_std=init.std))

    def loss_BS(self, x_SBH: Tensor, labels_BS: Tensor, tied_weight: Parameter | None = None) -> Tensor:
        """Cross entropy of every token, fp32 [B, S]."""
        weight = self.weight if tied_weight is None else tied_weight
        return linear_cross_entropy(x_SBH, weight, labels_BS.t()).t().contiguous()

    def logits_BSV(self, x_SBH: Tensor, tied_weight: Parameter | None = None) -> Tensor:
        """Unnormalized log-probabilities in the dtype of the weight."""
        weight = self.weight if tied_weight is None else tied_weight
        return F.linear(x_SBH.transpose(0, 1).contiguous(), weight)
