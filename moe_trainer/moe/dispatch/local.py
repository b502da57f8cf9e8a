"""Dispatch without communication: every expert is on this rank.

With expert-parallel size 1 Megatron-Core's allgather and alltoall dispatchers both reduce to this local permutation.
"""

from torch import Tensor

from moe_trainer.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_trainer.ops.permute import Permutation


class LocalDispatcher(TokenDispatcher):
    """Sort the local tokens by expert (stable); sum them back."""

    def __init__(self, permutation: Permutation):
        self.permutation = permutation

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> Dispatched:
        """Order tokens by expert. On a GPU this waits for the device: the map's sizes and the counts reach the host here."""
        x_RH, probs_R, routes = self.permutation.permute(x_TH, probs_TE, routing_TE)
        return Dispatched(x_RH, probs_R, routes.counts_E.tolist(), routes)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return self.permutation.unpermute(y_RH, sent.handle)
