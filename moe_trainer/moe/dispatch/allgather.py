"""Dispatch by all-gather: every rank gets all tokens and keeps those of its own experts; the results are reduce-scattered.

Design: the group's tokens are concatenated in rank order, which makes the rows of an expert sorted by source rank and then by token
without further work. Of the routing a rank needs the columns of its own experts only, so probabilities and map go by all-to-all, each
rank's columns to it, instead of being gathered whole. Every rank sums the rows of its experts per token, and the sums over ranks
are taken by the reduce-scatter: in fp32 the result differs from the all-to-all's in the last bits, since a token's experts are added in
another order. The sum over ranks is taken in the wider of the dtypes of rows and probabilities, as in Megatron-Core.

With expert tensor parallelism the group is tp_ep (etp x ep): the ranks of etp ask for the same columns, and the reduce-scatter adds
their partial results with all others.

Cost per layer and microbatch: T * H gathered and T * H reduce-scattered over S ranks, in forward and again in backward, whatever
k is; better than the all-to-all where k is near S, or where a few tokens make its synchronisation the larger part.

Shape letters: T local tokens, G tokens of the group, E experts, e local experts, S ranks, R rows, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.moe.dispatch.base import Dispatched, Hints, TokenDispatcher, ep_ranks
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import all_gather_flat, all_gather_rows, all_to_all, reduce_scatter_rows
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _Gathered:
    """What the phases of one dispatch tell each other.

    sizes_S: tokens of every rank; work: their exchange. sizes: the same on the host. routing: before the exchange this rank's
    [T, E] map, after it the [G, e] map of the local experts. routes: the local permutation.
    """

    sizes_S: Tensor
    work: Any
    routing: Tensor
    sizes: tuple[int, ...] = ()
    routes: Any = None


class AllGatherDispatcher(TokenDispatcher):
    """Gather all tokens of the group of experts, keep the rows of the local experts, reduce-scatter the results."""

    def __init__(self, ps: ParallelState, permutation: Permutation):
        self.permutation = permutation
        self.group = ps.tp_ep
        self.num_parts = ps.ep.size
        self.part_of = ep_ranks(ps)

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Tell every rank how many tokens it will get: they may differ, in an evaluation's last batch for one."""
        size = torch.tensor([x_TH.shape[0]], device=x_TH.device)
        sizes_S = size.new_empty(self.group.size)
        work = all_gather_flat(sizes_S, size, self.group, async_op=True)
        return Dispatched(x_TH, probs_TE, [], _Gathered(sizes_S, work, routing_TE))

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Gather the tokens, and the columns of the local experts."""
        gathered: _Gathered = sent.handle
        gathered.work.wait()
        sizes = tuple(gathered.sizes_S.tolist())
        x_GH = all_gather_rows(sent.x_RH, sizes, self.group)
        send, receive = [sent.x_RH.shape[0]] * self.group.size, sizes
        probs_Ge, = all_to_all(self.group, send, receive, self._columns(sent.probs_R))
        routing_Ge, = all_to_all(self.group, send, receive, self._columns(gathered.routing.to(torch.uint8)))
        return Dispatched(x_GH, probs_Ge, [], replace(gathered, work=None, sizes=sizes, routing=routing_Ge.bool()))

    def _columns(self, table_TE: Tensor) -> Tensor:
        """[T, E] -> [S * T, e]: for each rank the columns of its experts."""
        num_tokens, num_experts = table_TE.shape
        num_local = num_experts // self.num_parts
        columns_PTe = table_TE.view(num_tokens, self.num_parts, num_local).transpose(0, 1)
        if self.num_parts < self.group.size:
            columns_PTe = torch.stack([columns_PTe[part] for part in self.part_of])
        return columns_PTe.reshape(-1, num_local)

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Copy the tokens of each local expert into its rows. The counts reach the host here."""
        gathered: _Gathered = sent.handle
        x_RH, probs_R, routes = self.permutation.permute(sent.x_RH, sent.probs_R, gathered.routing)
        return Dispatched(x_RH, probs_R, routes.counts_E.tolist(), replace(gathered, routes=routes))

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum the local experts' rows of every token of the group. Returns y_GH in the dtype that ranks are summed in."""
        return self.permutation.unpermute(y_RH, sent.handle.routes).to(torch.promote_types(y_RH.dtype, sent.probs_R.dtype))

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Sum over ranks; every rank keeps its own tokens."""
        return reduce_scatter_rows(y_RH, sent.handle.sizes, self.group)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Back to the dtype of the rows."""
        return y_RH.to(sent.x_RH.dtype)
