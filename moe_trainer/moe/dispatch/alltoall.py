"""Dispatch by all-to-all: every row travels once to the rank that holds its expert, and once back.

Design: the local rows are sorted by expert. Expert-parallel rank r holds experts [r*e, (r+1)*e), so the rows sorted by expert are
sorted by destination as well, and what arrives are blocks [source][local expert]. Split sizes must be known on the host before rows
can travel: the counts are exchanged first (E integers a rank, started before the local sort and waited for after it), and reach the
host in one copy. Rows and their probabilities go in one call. Results go back the same way in reverse, so the sum over a token's
experts is taken at home, in ascending expert order: the numbers are those of one process that holds all experts.

Cost per layer and microbatch: 2 * T * k rows of H through the all-to-all in forward, as many in backward; with etp > 1 that
times etp - 1 more through the gather and the reduce-scatter.

Shape letters: T local tokens, E experts, e local experts, S sources (ranks of ep; after the gather of etp and ep), R rows, H hidden.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_trainer.ops.permute import (
    PermuteMap,
    block_order,
    make_permute_map,
    permute,
    permute_probs,
    reorder,
    unpermute,
)
from moe_trainer.parallel.collectives import (
    all_gather_flat,
    all_gather_rows,
    all_to_all,
    all_to_all_flat,
    reduce_scatter_rows,
)
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _Journey:
    """What the phases of one dispatch tell each other.

    routes: the local sort. arrived_Se: rows that come from each source for each local expert; work: the exchange of these counts.
    On the host: send, receive: rows to and from each rank of ep; gathered: rows that each rank of etp has received.
    order_R, inverse_R: between blocks [source][expert] and [expert][source]; None if these are the same.
    """

    routes: PermuteMap
    arrived_Se: Tensor
    work: Any
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None


class AllToAllDispatcher(TokenDispatcher):
    """Sort by expert, exchange rows over ep, gather them over etp, sort what arrived by local expert."""

    def __init__(self, ps: ParallelState):
        self.ep, self.etp = ps.ep, ps.etp

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> Dispatched:
        """Order the local tokens by expert; meanwhile tell every rank how many rows it will get."""
        routes = make_permute_map(routing_TE)
        arrived_Se = torch.empty_like(routes.counts_E).view(self.ep.size, -1)
        work = all_to_all_flat(arrived_Se.view(-1), routes.counts_E, self.ep, async_op=True)
        return Dispatched(permute(x_TH, routes), permute_probs(probs_TE, routes), [], _Journey(routes, arrived_Se, work))

    def exchange(self, sent: Dispatched) -> Dispatched:
        """Send the rows. The counts reach the host here (one synchronisation on a GPU)."""
        journey, counts_e = self._counted(sent.handle)
        x_RH, probs_R = all_to_all(self.ep, journey.send, journey.receive, sent.x_RH, sent.probs_R)
        x_RH = all_gather_rows(x_RH, journey.gathered, self.etp)
        probs_R = all_gather_rows(probs_R, journey.gathered, self.etp)
        return Dispatched(x_RH, probs_R, counts_e, journey)

    def _counted(self, journey: _Journey) -> tuple[_Journey, list[int]]:
        """Wait for the counts; read the split sizes and the rows of each local expert."""
        journey.work.wait()
        arrived_Se = journey.arrived_Se
        if self.etp.size > 1:
            arrived_Se = arrived_Se.new_empty(self.etp.size * self.ep.size, arrived_Se.shape[1])
            all_gather_flat(arrived_Se.view(-1), journey.arrived_Se.view(-1), self.etp)
        leaving_S = journey.routes.counts_E.view(self.ep.size, -1).sum(1)
        counts = torch.cat([leaving_S, arrived_Se.flatten()]).tolist()
        send, arrived = counts[:self.ep.size], counts[self.ep.size:]
        num_local = arrived_Se.shape[1]
        by_source = [arrived[start:start + num_local] for start in range(0, len(arrived), num_local)]
        rows = [sum(source) for source in by_source]
        of_member = [rows[start:start + self.ep.size] for start in range(0, len(rows), self.ep.size)]
        journey = replace(journey, work=None, arrived_Se=arrived_Se, send=tuple(send), receive=tuple(of_member[self.etp.rank]),
                          gathered=tuple(sum(member) for member in of_member))
        return journey, [sum(column) for column in zip(*by_source)]

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Sort received rows by local expert. With one local expert they are."""
        journey: _Journey = sent.handle
        if len(sent.tokens_per_expert_e) == 1:
            return sent
        num_rows = sum(journey.gathered)
        order_R = block_order(journey.arrived_Se, num_rows)
        inverse_R = block_order(journey.arrived_Se.t(), num_rows)
        x_RH, probs_R = reorder(order_R, inverse_R, sent.x_RH, sent.probs_R)
        return replace(sent, x_RH=x_RH, probs_R=probs_R, handle=replace(journey, order_R=order_R, inverse_R=inverse_R))

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sort the results by the rank they return to."""
        journey: _Journey = sent.handle
        return y_RH if journey.order_R is None else reorder(journey.inverse_R, journey.order_R, y_RH)[0]

    def exchange_back(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum the partial results over etp; send the rows home."""
        journey: _Journey = sent.handle
        y_RH = reduce_scatter_rows(y_RH, journey.gathered, self.etp)
        return all_to_all(self.ep, journey.receive, journey.send, y_RH)[0]

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return unpermute(y_RH, sent.handle.routes)
