"""Dispatch without communication: every expert is on this rank.

With expert-parallel size 1 Megatron-Core's allgather and alltoall dispatchers both reduce to this local permutation.
"""

from torch import Tensor

from moe_trainer.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_trainer.ops.permute import make_permute_map, permute, permute_probs, unpermute


class LocalDispatcher(TokenDispatcher):
    """Sort the local tokens by expert (stable); sum them back."""

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> Dispatched:
        """Order tokens by expert. On a GPU this waits for the device: the map's sizes and the counts reach the host here."""
        routes = make_permute_map(routing_TE)
        return Dispatched(permute(x_TH, routes), permute_probs(probs_TE, routes), routes.counts_E.tolist(), routes)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return unpermute(y_RH, sent.handle)
