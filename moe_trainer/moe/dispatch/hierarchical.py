"""Dispatch in two steps (--moe-flex-dispatcher-backend hierarchical): a token is sent once to every node that needs it.

1. Between nodes: each token goes once to every node that holds one of its experts, to the rank of ep there with this
   rank's position in its node. What goes with it are its probabilities and routing for the experts of that node.
2. Inside the node: that rank sends the token once to every rank that holds one of its experts.

Results return the same way: each rank sums its experts' results of a token, step 2 backwards sums those of a node's
ranks, and step 1 backwards those of the nodes. Experts read the tokens of the all-to-all in its order, bit for bit.
Sums over experts are grouped by rank and node, always in ascending order, so results and gradients of tokens equal the
all-to-all's up to rounding, and every run gives the same bits.

Communication over ep_inter and ep_intra (parallel/state.py), by plain all-to-alls. Of a token with k experts on d nodes
the network carries d rows in each direction, less the one that stays, instead of k. Step 1 is asynchronous and can be
overlapped; step 2 is not. The host waits once, for the counts of both steps; they are exchanged before the local sort.

Shape letters: T local tokens, E experts, P ranks of ep, D nodes, L ranks of ep in a node, e local experts, C rows sent
between nodes (token, node), M rows received by that, I rows sent inside the node (token, rank), N tokens received (each
once), R routed tokens, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import HIERARCHICAL
from moe_trainer.memory.host_read import AsyncHostReader
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    TokenDispatcher,
    no_cache,
    permute_received,
)
from moe_trainer.moe.dispatch.flex import DispatcherSettings
from moe_trainer.ops.permute import (
    Permutation,
    PermuteMap,
    block_permutation,
    make_permute_map,
    permute,
    permute_rows,
    reorder,
    unpermute,
)
from moe_trainer.parallel.collectives import (
    AllToAllExchange,
    CollectiveWork,
    PendingAllToAll,
    all_gather_flat,
    all_gather_rows,
    all_to_all,
    all_to_all_flat,
    finish_exchange,
    reduce_scatter_rows,
    start_exchange,
)
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _Sizes:
    """Numbers of rows on the host.

    Attributes:
        to_nodes, from_nodes: step 1.
        to_ranks, from_ranks: step 2.
        gathered: tokens received by each rank of etp.
    """

    to_nodes: tuple[int, ...]
    from_nodes: tuple[int, ...]
    to_ranks: tuple[int, ...]
    from_ranks: tuple[int, ...]
    gathered: tuple[int, ...]


class _Works:
    """Work objects of collectives that are waited for together."""

    def __init__(self, *works: CollectiveWork):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _CountExchange:
    """The exchange of counts, in flight.

    Attributes:
        from_gateways: rows that each rank of ep_inter received from each node and for which local ranks: [D, 1 + L].
        from_sources: [P, 1 + e]: for each source the tokens that this rank receives, and for each local expert.
        work: its handle.
        counts: pending host read of the sizes. None with etp > 1, whose ranks gather first.
    """

    from_gateways: Tensor
    from_sources: Tensor
    work: CollectiveWork
    counts: Callable[[], list[int]] | None


@dataclass(frozen=True)
class _CountedState:
    """State of one dispatch before token_dispatch.

    Attributes:
        routing_TE: which experts take a token.
        needs_TP: whether a rank holds an expert of a token.
        exchange: of counts, if it has started.
    """

    routing_TE: Tensor
    needs_TP: Tensor
    exchange: _CountExchange | None


@dataclass(frozen=True)
class _NodeStep:
    """Step 2 of a dispatch.

    Attributes:
        to_ranks: which row is a copy of which token.
        order_N, inverse_N: permutation between blocks [position][node] and [node][position] of received tokens.
    """

    to_ranks: PermuteMap
    order_N: Tensor
    inverse_N: Tensor


@dataclass(frozen=True)
class _SentState:
    """State of one dispatch while tokens are sent to the nodes.

    Attributes:
        sizes: of what is sent.
        from_sources: see _CountExchange.
        to_nodes: which row is a copy of which token, in step 1.
        work: the exchange of tokens and probabilities.
        routing: the exchange of the routing of the node's experts, [M, L * e].
    """

    sizes: _Sizes
    from_sources: Tensor
    to_nodes: PermuteMap
    work: AllToAllExchange
    routing: PendingAllToAll


@dataclass(frozen=True)
class _ReceivedState:
    """State of one dispatch when this rank has its tokens.

    Attributes:
        sizes, to_nodes: see _SentState.
        step: inside the node; None for one rank per node.
        routing_Ne: which local experts take a token.
        routes: the permutation to them.
    """

    sizes: _Sizes
    to_nodes: PermuteMap
    step: _NodeStep | None
    routing_Ne: Tensor
    routes: Any = None


class HierarchicalDispatcher(TokenDispatcher):
    """Send each token once to each node of its experts, then inside the node to each rank of them."""

    declaration = HIERARCHICAL

    def __init__(self, ps: ParallelState, permutation: Permutation):
        self.ep, self.etp, self.inter, self.intra = ps.ep, ps.etp, ps.ep_inter, ps.ep_intra
        self.permutation = permutation
        self._reader = AsyncHostReader()

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Find the ranks that each token needs and start to exchange the counts, unless a graph captures this."""
        needs_TP = routing_TE.unflatten(1, (self.ep.size, -1)).any(2)
        exchange = None if hints.is_captured else self._start_count_exchange(routing_TE, needs_TP)
        return DispatchState(x_TH, probs_TE, [], _CountedState(routing_TE, needs_TP, exchange))

    def _start_count_exchange(self, routing_TE: Tensor, needs_TP: Tensor) -> _CountExchange:
        nodes, per_node = self.inter.size, self.intra.size
        rank_counts_P, node_counts_D = needs_TP.sum(0), self._needs_nodes(needs_TP).sum(0)
        expert_counts = routing_TE.sum(0).view(self.ep.size, -1)
        to_ranks = torch.cat([rank_counts_P.unsqueeze(1), expert_counts], 1)
        to_gateways = torch.cat([node_counts_D.unsqueeze(1), rank_counts_P.view(nodes, per_node)], 1)
        from_sources, from_gateways = torch.empty_like(to_ranks), torch.empty_like(to_gateways)
        work = _Works(
            all_to_all_flat(from_sources.view(-1), to_ranks.view(-1), self.ep, async_op=True),
            all_to_all_flat(from_gateways.view(-1), to_gateways.view(-1), self.inter, async_op=True),
        )
        counts = None
        if self.etp.size == 1:
            counts = self._reader.start(self._numbers, node_counts_D, from_gateways, from_sources, work=work)
        return _CountExchange(from_gateways, from_sources, work, counts)

    def _needs_nodes(self, needs_TP: Tensor) -> Tensor:
        """Return [T, D]: whether a node holds an expert of a token."""
        return needs_TP.unflatten(1, (self.inter.size, self.intra.size)).any(2)

    def _numbers(
        self, node_counts_D: Tensor, from_gateways: Tensor, from_sources: Tensor, totals: Tensor | None = None
    ) -> Tensor:
        """Return the fields of _Sizes in order, then the tokens of each local expert; `totals` of the ranks of etp."""
        if totals is None:
            totals = from_sources.sum(0, keepdim=True)
        from_positions = from_sources[:, 0].view(self.inter.size, self.intra.size).sum(0)
        return torch.cat(
            [
                node_counts_D,
                from_gateways[:, 0],
                from_gateways[:, 1:].sum(0),
                from_positions,
                totals[:, 0],
                totals[:, 1:].sum(0),
            ]
        )

    def _resolve_sizes(self, exchange: _CountExchange, needs_TP: Tensor, cache_fn: CacheFn) -> tuple[_Sizes, list[int]]:
        """Wait for the counts; return the sizes and the tokens of each local expert."""
        exchange.work.wait()
        counts, from_sources = exchange.counts, exchange.from_sources
        if counts is None:
            totals = from_sources.sum(0)
            table = totals.new_empty(self.etp.size, totals.shape[0])
            all_gather_flat(table.view(-1), totals, self.etp)
            node_counts_D = self._needs_nodes(needs_TP).sum(0)
            counts = self._reader.start(self._numbers, node_counts_D, exchange.from_gateways, from_sources, table)
        numbers = cache_fn(counts)
        lengths = (self.inter.size, self.inter.size, self.intra.size, self.intra.size, self.etp.size)
        parts, start = [], 0
        for length in lengths:
            parts.append(tuple(numbers[start : start + length]))
            start += length
        return _Sizes(*parts), numbers[start:]

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Wait for the counts, the only wait for the device, and start to send tokens to the nodes."""
        plan: _CountedState = state.handle
        counted = plan.exchange or self._start_count_exchange(plan.routing_TE, plan.needs_TP)
        sizes, counts_e = self._resolve_sizes(counted, plan.needs_TP, cache_fn)
        to_nodes = make_permute_map(self._needs_nodes(plan.needs_TP), sum(sizes.to_nodes))
        routing_CX = permute_rows(plan.routing_TE.to(torch.uint8), to_nodes, self.inter.size)
        pending = PendingAllToAll([routing_CX], sizes.to_nodes, sizes.from_nodes, self.inter)
        x_CH, probs_CX = permute(state.x_RH, to_nodes), permute_rows(state.probs_R, to_nodes, self.inter.size)
        exchange = AllToAllExchange(self.inter, sizes.to_nodes, sizes.from_nodes)
        x_MH, probs_MX = start_exchange(exchange, x_CH, probs_CX)
        sent = _SentState(sizes, counted.from_sources, to_nodes, exchange, pending)
        return DispatchState(x_MH, probs_MX, counts_e, sent)

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens, distribute them inside the node, and gather those of the other etp ranks."""
        sent: _SentState = state.handle
        x_NH, probs_Ne = finish_exchange(sent.work, (state.x_RH, state.probs_R))
        (routing_Ne,), sizes, step = sent.routing.wait(), sent.sizes, None
        if self.intra.size > 1:
            needs_ML = routing_Ne.unflatten(1, (self.intra.size, -1)).any(2)
            to_ranks = make_permute_map(needs_ML, sum(sizes.to_ranks))
            x_IH, probs_Ie, routing_Ie = (
                permute(x_NH, to_ranks),
                permute_rows(probs_Ne, to_ranks, self.intra.size),
                permute_rows(routing_Ne, to_ranks, self.intra.size),
            )
            split = sizes.to_ranks, sizes.from_ranks
            (routing_Ne,) = all_to_all(self.intra, *split, routing_Ie)
            x_NH, probs_Ne = all_to_all(self.intra, *split, x_IH, probs_Ie)
            # blocks [position][node] arrive; the all-to-all's order of sources is [node][position]
            counts_DL = sent.from_sources[:, 0].view(self.inter.size, self.intra.size)
            num_received = sum(sizes.from_ranks)
            order_N = block_permutation(counts_DL.t(), num_received)
            inverse_N = block_permutation(counts_DL, num_received)
            x_NH, probs_Ne = reorder(order_N, inverse_N, x_NH, probs_Ne)
            routing_Ne = routing_Ne.index_select(0, order_N)
            step = _NodeStep(to_ranks, order_N, inverse_N)
        x_NH, probs_Ne, routing_Ne = (
            all_gather_rows(table, sizes.gathered, self.etp) for table in (x_NH, probs_Ne, routing_Ne)
        )
        received = _ReceivedState(sizes, sent.to_nodes, step, routing_Ne.bool())
        return replace(state, x_RH=x_NH, probs_R=probs_Ne, handle=received)

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Copy every token for each of its local experts."""
        return permute_received(self.permutation, state, state.handle.routing_Ne)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the local experts' results of every received token."""
        return self.permutation.unpermute(y_RH, state.handle.routes)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Sum over etp and over the ranks of the node; start to return the sums to the tokens' nodes."""
        received: _ReceivedState = state.handle
        sizes, step = received.sizes, received.step
        y_NH = reduce_scatter_rows(y_RH, sizes.gathered, self.etp)
        if step is not None:
            (y_NH,) = reorder(step.inverse_N, step.order_N, y_NH)
            (y_IH,) = all_to_all(self.intra, sizes.from_ranks, sizes.to_ranks, y_NH)
            y_NH = unpermute(y_IH, step.to_ranks)
        exchange = AllToAllExchange(self.inter, sizes.from_nodes, sizes.to_nodes)
        (y_CH,) = start_exchange(exchange, y_NH)
        return y_CH, exchange

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum each token's results of the nodes."""
        return unpermute(y_RH, state.handle.to_nodes)


def make_dispatcher(settings: DispatcherSettings) -> HierarchicalDispatcher:
    return HierarchicalDispatcher(settings.ps, settings.permutation)
