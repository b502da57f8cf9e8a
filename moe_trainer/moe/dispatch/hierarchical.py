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

    def __init__(self, *works: Any):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class _HierarchicalState:
    """State of one dispatch.

    Attributes:
        routing: [T, E]; after start_token_dispatch rows of nodes in flight, [M, L * e]; after the exchange [N, e].
        needs_TP: whether a rank holds an expert of a token.
        from_gateways: rows that each rank of ep_inter received from each node and for which local ranks: [D, 1 + L].
        from_sources: [P, 1 + e]: for each source the tokens that this rank receives, and for each local expert.
        work: what is in flight: the exchange of counts, later that of tokens.
        counts: pending host read of the sizes. None with etp > 1, whose ranks gather first.
        sizes: once known.
        to_nodes, to_ranks: which row is a copy of which token, in steps 1 and 2; to_ranks is None for one rank per
            node.
        order_N, inverse_N: permutation between blocks [position][node] and [node][position] of received tokens.
        routes: the permutation to the local experts.
    """

    routing: Tensor
    needs_TP: Tensor
    from_gateways: Tensor | None = None
    from_sources: Tensor | None = None
    work: Any = None
    counts: Callable[[], list[int]] | None = None
    sizes: _Sizes | None = None
    to_nodes: PermuteMap | None = None
    to_ranks: PermuteMap | None = None
    order_N: Tensor | None = None
    inverse_N: Tensor | None = None
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
        plan = _HierarchicalState(routing_TE, routing_TE.unflatten(1, (self.ep.size, -1)).any(2))
        return DispatchState(x_TH, probs_TE, [], plan if hints.is_captured else self._start_count_exchange(plan))

    def _start_count_exchange(self, plan: _HierarchicalState) -> _HierarchicalState:
        nodes, per_node = self.inter.size, self.intra.size
        rank_counts_P, node_counts_D = plan.needs_TP.sum(0), self._needs_nodes(plan).sum(0)
        expert_counts = plan.routing.sum(0).view(self.ep.size, -1)
        to_ranks = torch.cat([rank_counts_P.unsqueeze(1), expert_counts], 1)
        to_gateways = torch.cat([node_counts_D.unsqueeze(1), rank_counts_P.view(nodes, per_node)], 1)
        from_sources, from_gateways = torch.empty_like(to_ranks), torch.empty_like(to_gateways)
        work = _Works(
            all_to_all_flat(from_sources.view(-1), to_ranks.view(-1), self.ep, async_op=True),
            all_to_all_flat(from_gateways.view(-1), to_gateways.view(-1), self.inter, async_op=True),
        )
        plan = replace(plan, from_sources=from_sources, from_gateways=from_gateways, work=work)
        if self.etp.size > 1:
            return plan
        return replace(
            plan, counts=self._reader.start(self._numbers, node_counts_D, from_gateways, from_sources, work=work)
        )

    def _needs_nodes(self, plan: _HierarchicalState) -> Tensor:
        """Return [T, D]: whether a node holds an expert of a token."""
        return plan.needs_TP.unflatten(1, (self.inter.size, self.intra.size)).any(2)

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

    def _resolve_sizes(self, plan: _HierarchicalState, cache_fn: CacheFn) -> tuple[_HierarchicalState, list[int]]:
        """Wait for the counts; return the sizes and the tokens of each local expert."""
        if plan.work is None:
            plan = self._start_count_exchange(plan)
        plan.work.wait()
        counts = plan.counts
        if counts is None:
            totals = plan.from_sources.sum(0)
            table = totals.new_empty(self.etp.size, totals.shape[0])
            all_gather_flat(table.view(-1), totals, self.etp)
            node_counts_D = self._needs_nodes(plan).sum(0)
            counts = self._reader.start(self._numbers, node_counts_D, plan.from_gateways, plan.from_sources, table)
        numbers = cache_fn(counts)
        lengths = (self.inter.size, self.inter.size, self.intra.size, self.intra.size, self.etp.size)
        parts, start = [], 0
        for length in lengths:
            parts.append(tuple(numbers[start : start + length]))
            start += length
        return replace(plan, work=None, counts=None, sizes=_Sizes(*parts)), numbers[start:]

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Wait for the counts, the only wait for the device, and start to send tokens to the nodes."""
        plan, counts_e = self._resolve_sizes(state.handle, cache_fn)
        to_nodes = make_permute_map(self._needs_nodes(plan), sum(plan.sizes.to_nodes))
        sizes = plan.sizes.to_nodes, plan.sizes.from_nodes
        routing_CX = permute_rows(plan.routing.to(torch.uint8), to_nodes, self.inter.size)
        pending = PendingAllToAll([routing_CX], *sizes, self.inter)
        x_CH, probs_CX = permute(state.x_RH, to_nodes), permute_rows(state.probs_R, to_nodes, self.inter.size)
        exchange = AllToAllExchange(self.inter, *sizes)
        x_MH, probs_MX = start_exchange(exchange, x_CH, probs_CX)
        return DispatchState(x_MH, probs_MX, counts_e, replace(plan, work=(exchange, pending), to_nodes=to_nodes))

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens, distribute them inside the node, and gather those of the other etp ranks."""
        plan: _HierarchicalState = state.handle
        exchange, pending = plan.work
        x_NH, probs_Ne = finish_exchange(exchange, (state.x_RH, state.probs_R))
        (routing_Ne,), sizes = pending.wait(), plan.sizes
        to_ranks = order_N = inverse_N = None
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
            counts_DL = plan.from_sources[:, 0].view(self.inter.size, self.intra.size)
            num_received = sum(sizes.from_ranks)
            order_N = block_permutation(counts_DL.t(), num_received)
            inverse_N = block_permutation(counts_DL, num_received)
            x_NH, probs_Ne = reorder(order_N, inverse_N, x_NH, probs_Ne)
            routing_Ne = routing_Ne.index_select(0, order_N)
        x_NH, probs_Ne, routing_Ne = (
            all_gather_rows(table, sizes.gathered, self.etp) for table in (x_NH, probs_Ne, routing_Ne)
        )
        plan = replace(
            plan, work=None, routing=routing_Ne.bool(), to_ranks=to_ranks, order_N=order_N, inverse_N=inverse_N
        )
        return replace(state, x_RH=x_NH, probs_R=probs_Ne, handle=plan)

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Copy every token for each of its local experts."""
        return permute_received(self.permutation, state, state.handle.routing)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the local experts' results of every received token."""
        return self.permutation.unpermute(y_RH, state.handle.routes)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Sum over etp and over the ranks of the node; start to return the sums to the tokens' nodes."""
        plan: _HierarchicalState = state.handle
        sizes = plan.sizes
        y_NH = reduce_scatter_rows(y_RH, sizes.gathered, self.etp)
        if plan.to_ranks is not None:
            (y_NH,) = reorder(plan.inverse_N, plan.order_N, y_NH)
            (y_IH,) = all_to_all(self.intra, sizes.from_ranks, sizes.to_ranks, y_NH)
            y_NH = unpermute(y_IH, plan.to_ranks)
        exchange = AllToAllExchange(self.inter, sizes.from_nodes, sizes.to_nodes)
        (y_CH,) = start_exchange(exchange, y_NH)
        return y_CH, exchange

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum each token's results of the nodes."""
        return unpermute(y_RH, state.handle.to_nodes)


def make_dispatcher(settings: DispatcherSettings) -> HierarchicalDispatcher:
    return HierarchicalDispatcher(settings.ps, settings.permutation)
