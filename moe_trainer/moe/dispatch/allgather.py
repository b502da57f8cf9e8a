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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.host_read import HostReads
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Once, TokenDispatcher, at_once, ep_ranks
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import all_gather_flat, all_gather_rows, all_to_all, reduce_scatter_rows
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _Gathered:
    """What the phases of one dispatch tell each other.

    routing: before the exchange this rank's [T, E] map, after it the [G, e] map of the local experts. work: of the exchange of counts;
    counts: tokens of every rank and rows of the local experts, on their way to the host; both None as long as they are not exchanged.
    sizes: tokens of every rank, on the host. routes: the local permutation.
    """

    routing: Tensor
    work: Any = None
    counts: Callable[[], list[int]] | None = None
    sizes: tuple[int, ...] = ()
    routes: Any = None


class AllGatherDispatcher(TokenDispatcher):
    """Gather all tokens of the group of experts, keep the rows of the local experts, reduce-scatter the results."""

    takes_known = True

    def __init__(self, ps: ParallelState, permutation: Permutation):
        self.permutation = permutation
        self.group = ps.tp_ep
        self.num_parts = ps.ep.size
        self.part_of = ep_ranks(ps)
        self._reads = HostReads()

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Tell every rank how many tokens it will get (they may differ, in an evaluation's last batch for one), and how many rows each
        expert takes of them; unless that is known, or a graph captures this."""
        known, gathered = hints.known, _Gathered(routing_TE)
        if known is not None and known.per_expert is not None:
            counts_e = [known.per_expert * self.group.size] * (routing_TE.shape[1] // self.num_parts)
            return Dispatched(x_TH, probs_TE, counts_e, replace(gathered, sizes=(x_TH.shape[0],) * self.group.size))
        return Dispatched(x_TH, probs_TE, [], gathered if hints.captured else self._announced(gathered))

    def _announced(self, gathered: _Gathered) -> _Gathered:
        own = torch.cat([gathered.routing.new_full((1,), gathered.routing.shape[0], dtype=torch.int64), gathered.routing.sum(0)])
        table_SN = own.new_empty(self.group.size, own.shape[0])
        work = all_gather_flat(table_SN.view(-1), own, self.group, async_op=True)
        return replace(gathered, work=work, counts=self._reads.start(self._sizes, table_SN, work=work))

    def _sizes(self, table_SN: Tensor) -> Tensor:
        """Tokens of every rank, and rows of the local experts."""
        num_local = (table_SN.shape[1] - 1) // self.num_parts
        first = 1 + self.part_of[self.group.rank] * num_local
        return torch.cat([table_SN[:, 0], table_SN[:, first:first + num_local].sum(0)])

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """The counts reach the host here: the only wait."""
        gathered: _Gathered = sent.handle
        if gathered.sizes:
            return sent
        if gathered.counts is None:
            gathered = self._announced(gathered)
        gathered.work.wait()
        counts = once(gathered.counts)
        sizes = tuple(counts[:self.group.size])
        return replace(sent, tokens_per_expert_e=counts[self.group.size:], handle=replace(gathered, work=None, counts=None, sizes=sizes))

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Gather the tokens, and the columns of the local experts."""
        gathered: _Gathered = sent.handle
        sizes = gathered.sizes
        x_GH = all_gather_rows(sent.x_RH, sizes, self.group)
        send, receive = [sent.x_RH.shape[0]] * self.group.size, sizes
        probs_Ge, = all_to_all(self.group, send, receive, self._columns(sent.probs_R))
        routing_Ge, = all_to_all(self.group, send, receive, self._columns(gathered.routing.to(torch.uint8)))
        return replace(sent, x_RH=x_GH, probs_R=probs_Ge, handle=replace(gathered, routing=routing_Ge.bool()))

    def _columns(self, table_TE: Tensor) -> Tensor:
        """[T, E] -> [S * T, e]: for each rank the columns of its experts."""
        num_tokens, num_experts = table_TE.shape
        num_local = num_experts // self.num_parts
        columns_PTe = table_TE.view(num_tokens, self.num_parts, num_local).transpose(0, 1)
        if self.num_parts < self.group.size:
            columns_PTe = torch.stack([columns_PTe[part] for part in self.part_of])
        return columns_PTe.reshape(-1, num_local)

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Copy the tokens of each local expert into its rows."""
        gathered: _Gathered = sent.handle
        x_RH, probs_R, routes = self.permutation.permute(sent.x_RH, sent.probs_R, gathered.routing, num_rows=sum(sent.tokens_per_expert_e))
        return Dispatched(x_RH, probs_R, sent.tokens_per_expert_e, replace(gathered, routes=routes))

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum the local experts' rows of every token of the group. Returns y_GH in the dtype that ranks are summed in."""
        return self.permutation.unpermute(y_RH, sent.handle.routes).to(torch.promote_types(y_RH.dtype, sent.probs_R.dtype))

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Sum over ranks; every rank keeps its own tokens."""
        return reduce_scatter_rows(y_RH, sent.handle.sizes, self.group)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Back to the dtype of the rows."""
        return y_RH.to(sent.x_RH.dtype)
