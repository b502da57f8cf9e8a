"""Dispatch by all-to-all: every row travels once to the rank that holds its expert, and once back.

Design: the local rows are sorted by expert. Expert-parallel rank r holds experts [r*e, (r+1)*e), so the rows sorted by expert are
sorted by destination as well, and what arrives are blocks [source][local expert]. Split sizes must be known on the host before rows
can travel: the counts are exchanged first (E integers a rank, started before the local sort and waited for after it), and reach the
host in one copy. Rows and their probabilities go in one call. Results go back the same way in reverse, so the sum over a token's
experts is taken at home, in ascending expert order: the numbers are those of one process that holds all experts.

Cost per layer and microbatch: 2 * T * k rows of H through the all-to-all in forward, as many in backward; with etp > 1 that
times etp - 1 more through the gather and the reduce-scatter. Rows may travel in 8 bits (eight_bits.py).

Shape letters: T local tokens, E experts, e local experts, S sources (ranks of ep; after the gather of etp and ep), R rows, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.host_read import HostReads, integers
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Known, Once, TokenDispatcher, at_once
from moe_trainer.moe.dispatch.eight_bits import EightBits, finish_rows, gather_rows, scatter_rows, start_rows
from moe_trainer.ops.permute import Permutation, block_order, reorder
from moe_trainer.parallel.collectives import all_gather_flat, all_gather_rows, all_to_all_flat
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _Trip:
    """What the phases of one dispatch tell each other.

    routes: the local sort; None as long as it is not known how many rows there are. counts_E: this rank's rows for each expert. expert_E: as in
    Hints. routing_TE: what is still to be sorted. arrived_Se: rows that come from each source for each local expert; work: what is under way, these counts
    first, then the rows. Both None as long as the counts are not exchanged. known: of Hints. counts: rows
    that leave for each rank, then arrived_Se, on their way to the host; None where etp > 1, whose ranks tell each other first.
    On the host: send, receive: rows to and from each rank of ep; gathered: rows that each rank of etp has received.
    order_R, inverse_R: between blocks [source][expert] and [expert][source]; None if these are the same.
    """

    routes: Any
    counts_E: Tensor
    expert_E: Tensor | None = None
    routing_TE: Tensor | None = None
    arrived_Se: Tensor | None = None
    work: Any = None
    known: Known | None = None
    counts: Callable[[], list[int]] | None = None
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None


class AllToAllDispatcher(TokenDispatcher):
    """Sort by expert, exchange rows over ep, gather them over etp, sort what arrived by local expert."""

    takes_known = True

    def __init__(self, ps: ParallelState, permutation: Permutation, eight_bits: EightBits = EightBits()):
        self.ep, self.etp, self.permutation, self.eight_bits = ps.ep, ps.etp, permutation, eight_bits
        self._reads = HostReads()

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Order the local tokens by expert; meanwhile tell every rank how many rows it will get (later, while a graph captures this: then
        nothing is under way when this returns). Where it is not known how many rows there are, they are counted here and ordered when
        the counts are on the host. Fused kernels sum a token's rows in the order of the columns."""
        known = hints.known
        if known is None:
            trip = _Trip(None, routing_TE.sum(0), hints.expert_E, routing_TE)
            return Dispatched(x_TH, probs_TE, [], trip if hints.captured else self._announced(trip))
        x_RH, probs_R, routes = self._sorted(x_TH, probs_TE, routing_TE, hints.expert_E, known.num_rows)
        trip = _Trip(routes, routes.counts_E, known=known)
        told = known.per_expert is not None or known.by_rank is not None
        return Dispatched(x_RH, probs_R, [], trip if hints.captured or told else self._announced(trip))

    def _sorted(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, expert_E: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor, Any]:
        order = {"expert_E": expert_E} if expert_E is not None and self.permutation.takes_order else {}
        return self.permutation.permute(x_TH, probs_TE, routing_TE, num_rows=num_rows, **order)

    def _announced(self, trip: _Trip) -> _Trip:
        counts_E = trip.counts_E
        arrived_Se = torch.empty_like(counts_E).view(self.ep.size, -1)
        work = all_to_all_flat(arrived_Se.view(-1), counts_E, self.ep, async_op=True)
        counts = self._reads.start(self._sizes, counts_E, arrived_Se, work=work) if self.etp.size == 1 else None
        return replace(trip, arrived_Se=arrived_Se, work=work, counts=counts)

    def _sizes(self, counts_E: Tensor, arrived_Se: Tensor) -> Tensor:
        return torch.cat([counts_E.view(self.ep.size, -1).sum(1), arrived_Se.flatten()])

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """Send the rows off. The counts reach the host here: the only wait."""
        trip, counts_e = self._counted(sent.handle, once)
        x_RH, probs_R = sent.x_RH, sent.probs_R
        if trip.routes is None:
            x_RH, probs_R, routes = self._sorted(x_RH, probs_R, trip.routing_TE, trip.expert_E, sum(trip.send))
            trip = replace(trip, routes=routes, routing_TE=None)
        under_way, (x_RH, probs_R) = start_rows(self.ep, trip.send, trip.receive, x_RH, probs_R, forward=self.eight_bits.dispatch)
        return Dispatched(x_RH, probs_R, counts_e, replace(trip, work=under_way))

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Receive the rows, those of the other etp ranks too."""
        trip: _Trip = sent.handle
        x_RH, probs_R = finish_rows(trip.work, (sent.x_RH, sent.probs_R))
        x_RH = gather_rows(x_RH, trip.gathered, self.etp, self.eight_bits.dispatch)
        probs_R = all_gather_rows(probs_R, trip.gathered, self.etp)
        return replace(sent, x_RH=x_RH, probs_R=probs_R, handle=replace(trip, work=None))

    def _counted(self, trip: _Trip, once: Once) -> tuple[_Trip, list[int]]:
        """Wait for the counts; read the split sizes and the rows of each local expert."""
        if trip.known is not None and trip.known.per_expert is not None:
            return self._even(trip, trip.known.per_expert)
        if trip.known is not None and trip.known.by_rank is not None:
            return self._told(trip, trip.known.by_rank)
        if trip.work is None:
            trip = self._announced(trip)
        trip.work.wait()
        arrived_Se = trip.arrived_Se
        if self.etp.size > 1:
            arrived_Se = arrived_Se.new_empty(self.etp.size * self.ep.size, arrived_Se.shape[1])
            all_gather_flat(arrived_Se.view(-1), trip.arrived_Se.view(-1), self.etp)
        counts = once(trip.counts or self._reads.start(self._sizes, trip.counts_E, arrived_Se))
        send, arrived = counts[:self.ep.size], counts[self.ep.size:]
        num_local = arrived_Se.shape[1]
        by_source = [arrived[start:start + num_local] for start in range(0, len(arrived), num_local)]
        rows = [sum(source) for source in by_source]
        of_member = [rows[start:start + self.ep.size] for start in range(0, len(rows), self.ep.size)]
        trip = replace(trip, work=None, counts=None, arrived_Se=arrived_Se, send=tuple(send), receive=tuple(of_member[self.etp.rank]),
                          gathered=tuple(sum(member) for member in of_member))
        return trip, [sum(column) for column in zip(*by_source)]

    def _even(self, trip: _Trip, per_expert: int) -> tuple[_Trip, list[int]]:
        """The same where every expert takes as many rows from every rank: without asking."""
        counts_E, sources = trip.counts_E, self.etp.size * self.ep.size
        num_local = counts_E.shape[0] // self.ep.size
        sizes = (num_local * per_expert,) * self.ep.size
        trip = replace(trip, arrived_Se=counts_E.new_full((sources, num_local), per_expert), send=sizes, receive=sizes,
                       gathered=(sum(sizes),) * self.etp.size)
        return trip, [sources * per_expert] * num_local

    def _told(self, trip: _Trip, by_rank: Sequence[Sequence[int]]) -> tuple[_Trip, list[int]]:
        """The same where all ranks' counts are on the host already."""
        num_local = len(by_rank[0]) // self.ep.size
        blocks = [slice(first, first + num_local) for first in range(0, len(by_rank[0]), num_local)]
        by_source = [counts[blocks[self.ep.rank]] for counts in by_rank]
        receive = tuple(sum(source) for source in by_source)
        arrived_Se = integers([count for source in by_source for count in source], trip.counts_E.device).view(self.ep.size, num_local)
        trip = replace(trip, arrived_Se=arrived_Se, send=tuple(sum(by_rank[self.ep.rank][block]) for block in blocks), receive=receive,
                       gathered=(sum(receive),))
        return trip, [sum(column) for column in zip(*by_source)]

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Sort received rows by local expert. With one local expert they are."""
        trip: _Trip = sent.handle
        if len(sent.tokens_per_expert_e) == 1:
            return sent
        num_rows = sum(trip.gathered)
        order_R = block_order(trip.arrived_Se, num_rows)
        inverse_R = block_order(trip.arrived_Se.t(), num_rows)
        x_RH, probs_R = reorder(order_R, inverse_R, sent.x_RH, sent.probs_R)
        return replace(sent, x_RH=x_RH, probs_R=probs_R, handle=replace(trip, order_R=order_R, inverse_R=inverse_R))

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sort the results by the rank they return to."""
        trip: _Trip = sent.handle
        return y_RH if trip.order_R is None else reorder(trip.inverse_R, trip.order_R, y_RH)[0]

    def start_exchange_back(self, y_RH: Tensor, sent: Dispatched) -> tuple[Tensor, Any]:
        """Sum the partial results over etp; send the rows off to where they came from."""
        trip: _Trip = sent.handle
        y_RH = scatter_rows(y_RH, trip.gathered, self.etp, self.eight_bits.gradients)
        under_way, (y_RH,) = start_rows(self.ep, trip.receive, trip.send, y_RH, backward=self.eight_bits.gradients)
        return y_RH, under_way

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Receive the rows."""
        return finish_rows(under_way, (y_RH,))[0]

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return self.permutation.unpermute(y_RH, sent.handle.routes)
