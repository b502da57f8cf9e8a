"""Dispatch by all-to-all: every routed token is sent to the rank that holds its expert, and its result is sent back.

Local tokens are sorted by expert. Expert-parallel rank r holds experts [r*e, (r+1)*e), so this order is by
destination as well, and blocks [source][local expert] arrive. The host needs the split sizes before tokens can be
sent: E counts per rank are exchanged first, started before the local sort and read in one copy. Tokens and
probabilities go in one call. Results return the same way in reverse, so a token's results are summed on its own rank
in ascending order of experts: the numbers are those of one process.

With a fixed receive buffer of C tokens nothing is read by the host: every pair of ranks exchanges a slot of ceil(C / S)
tokens, of which the first ones are used, and the counts stay on the device (ops/fixed_slots.py). Tokens that do not fit
into their slot are left out and set a flag on the device. All ranks must have the same C.

Communication per layer and microbatch: 2 * T * k tokens of H in forward, as many in backward; with etp > 1 that times
etp - 1 more for the gather and the reduce-scatter. Tokens may be sent in MXFP8 (mxfp8_transport.py).
Shape letters: T local tokens, E experts, e local experts, S sources (ranks of ep; after the gather of etp and ep), R
routed tokens, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import ALLTOALL
from moe_trainer.memory.host_read import AsyncHostReader, integer_tensor
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    KnownCounts,
    TokenDispatcher,
    no_cache,
)
from moe_trainer.moe.dispatch.flex import DispatcherSettings
from moe_trainer.moe.dispatch.mxfp8_transport import (
    HIGH_PRECISION,
    Mxfp8Transport,
    gather_tokens,
    reduce_scatter_tokens,
    start_token_exchange,
)
from moe_trainer.ops.fixed_slots import (
    BufferOrder,
    SlotMap,
    buffer_to_slots,
    compact_slots,
    fill_slots,
    make_slot_map,
    slots_to_buffer,
    sum_slots,
)
from moe_trainer.ops.permute import Permutation, block_permutation, reorder
from moe_trainer.parallel.collectives import (
    CollectiveWork,
    all_gather_flat,
    all_gather_rows,
    all_to_all_flat,
    finish_exchange,
)
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _CountExchange:
    """The exchange of counts, in flight.

    Attributes:
        received_Se: tokens from each rank of ep for each local expert.
        work: its handle.
        counts: pending host read of the tokens sent to each rank, then received_Se. None with etp > 1, whose ranks
            gather first.
    """

    received_Se: Tensor
    work: CollectiveWork
    counts: Callable[[], list[int]] | None


@dataclass(frozen=True)
class _FixedSlots:
    """The slots of a fixed buffer.

    Attributes:
        map: the local permutation.
        size: tokens of each slot.
        pad_multiple: to which the tokens of each expert are padded in the buffer.
    """

    map: SlotMap
    size: int
    pad_multiple: int


@dataclass(frozen=True)
class _SortedState:
    """State of one dispatch before token_dispatch.

    Attributes:
        routes: the local permutation; None while `routing_TE` is not applied, and with slots.
        counts_E: this rank's tokens for each expert.
        expert_E: see DispatchHints.
        routing_TE: routing that is not applied yet, because the number of routed tokens is not known.
        known: see DispatchHints.
        exchange: of counts, if it has started.
        slots: with a fixed buffer.
    """

    routes: Any
    counts_E: Tensor
    expert_E: Tensor | None = None
    routing_TE: Tensor | None = None
    known: KnownCounts | None = None
    exchange: _CountExchange | None = None
    slots: _FixedSlots | None = None


@dataclass(frozen=True)
class _Sizes:
    """What is sent.

    Attributes:
        received_Se: tokens from each source for each local expert.
        send, receive: tokens to and from each rank of ep, on the host.
        gathered: tokens received by each rank of etp, on the host.
    """

    received_Se: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    gathered: tuple[int, ...]


@dataclass(frozen=True)
class _SentState:
    """State of one dispatch from token_dispatch on.

    Attributes:
        routes: the local permutation; None with slots.
        sizes: what is sent.
        slots: with a fixed buffer.
        work: the exchange of tokens, while it is in flight.
        orders: permutation from blocks [source][expert] to [expert][source], and back; None if these are equal.
        buffer_order: where the tokens of slots are in the buffer.
    """

    routes: Any
    sizes: _Sizes
    slots: _FixedSlots | None
    work: Any
    orders: tuple[Tensor, Tensor] | None = None
    buffer_order: BufferOrder | None = None


class AllToAllDispatcher(TokenDispatcher):
    """Sort by expert, exchange tokens over ep, gather them over etp, sort what arrived by local expert."""

    declaration = ALLTOALL
    fixed_buffer_problem = None

    def __init__(self, ps: ParallelState, permutation: Permutation, mxfp8: Mxfp8Transport = HIGH_PRECISION):
        self.ep, self.etp, self.permutation, self.mxfp8 = ps.ep, ps.etp, permutation, mxfp8
        self._reader = AsyncHostReader()

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Sort the local tokens by expert and start to exchange the counts.

        If the number of routed tokens is unknown, tokens are only counted here and sorted when the counts are on the
        host. While a graph captures this, the exchange of counts starts later. Fused kernels sum a token's results in
        the order of the columns.
        """
        if hints.buffer_size is not None:
            return self._fill_slots(x_TH, probs_TE, routing_TE, hints.buffer_size, hints)
        known = hints.known
        if known is None:
            counts_E = routing_TE.sum(0)
            exchange = None if hints.is_captured else self._start_count_exchange(counts_E)
            plan = _SortedState(None, counts_E, hints.expert_E, routing_TE, exchange=exchange)
            return DispatchState(x_TH, probs_TE, [], plan)
        x_RH, probs_R, routes = self._permute(x_TH, probs_TE, routing_TE, hints.expert_E, known.num_tokens)
        needs_exchange = known.per_expert is None and known.by_rank is None
        exchange = self._start_count_exchange(routes.counts_E) if needs_exchange and not hints.is_captured else None
        return DispatchState(x_RH, probs_R, [], _SortedState(routes, routes.counts_E, known=known, exchange=exchange))

    def _fill_slots(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, buffer_size: int, hints: DispatchHints
    ) -> DispatchState:
        size = -(-buffer_size // (self.ep.size * self.etp.size))
        slots = make_slot_map(routing_TE, self.ep.size, size, order_E=hints.expert_E)
        counts_E = slots.routes.counts_E
        exchange = None if hints.is_captured else self._start_count_exchange(counts_E, is_read=False)
        fixed = _FixedSlots(slots, size, hints.pad_multiple)
        plan = _SortedState(None, counts_E, exchange=exchange, slots=fixed)
        return DispatchState(*fill_slots(x_TH, probs_TE, slots), [], plan, slots.overflow)

    def _permute(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, expert_E: Tensor | None, num_routed: int
    ) -> tuple[Tensor, Tensor, Any]:
        if expert_E is not None and self.permutation.takes_order:
            return self.permutation.permute_in_order(x_TH, probs_TE, routing_TE, expert_E, num_routed)
        return self.permutation.permute(x_TH, probs_TE, routing_TE, num_rows=num_routed)

    def _start_count_exchange(self, counts_E: Tensor, is_read: bool = True) -> _CountExchange:
        """Start to exchange the counts; `is_read`: the host will read them."""
        received_Se = torch.empty_like(counts_E).view(self.ep.size, -1)
        work = all_to_all_flat(received_Se.view(-1), counts_E, self.ep, async_op=True)
        is_read = is_read and self.etp.size == 1
        counts = self._reader.start(self._sizes, counts_E, received_Se, work=work) if is_read else None
        return _CountExchange(received_Se, work, counts)

    def _sizes(self, counts_E: Tensor, received_Se: Tensor) -> Tensor:
        return torch.cat([counts_E.view(self.ep.size, -1).sum(1), received_Se.flatten()])

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Wait for the counts, the only wait for the device, and send the tokens."""
        plan: _SortedState = state.handle
        sizes, counts_e = self._resolve_sizes(plan, cache_fn)
        x_RH, probs_R, routes = state.x_RH, state.probs_R, plan.routes
        if plan.routing_TE is not None:
            x_RH, probs_R, routes = self._permute(x_RH, probs_R, plan.routing_TE, plan.expert_E, sum(sizes.send))
        work, (x_RH, probs_R) = start_token_exchange(
            self.ep,
            sizes.send,
            sizes.receive,
            x_RH,
            probs_R,
            casts=self.mxfp8.casts,
            round_forward=self.mxfp8.dispatch,
        )
        fixed_size = max(sizes.receive, default=0) * self.ep.size * self.etp.size if plan.slots is None else 0
        sent = _SentState(routes, sizes, plan.slots, work)
        return DispatchState(x_RH, probs_R, counts_e, sent, state.overflow, fixed_size)

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens and gather those of the other etp ranks."""
        sent: _SentState = state.handle
        x_RH, probs_R = finish_exchange(sent.work, (state.x_RH, state.probs_R))
        x_RH = gather_tokens(x_RH, sent.sizes.gathered, self.etp, self.mxfp8)
        probs_R = all_gather_rows(probs_R, sent.sizes.gathered, self.etp)
        return replace(state, x_RH=x_RH, probs_R=probs_R, handle=replace(sent, work=None))

    def _resolve_sizes(self, plan: _SortedState, cache_fn: CacheFn) -> tuple[_Sizes, list[int]]:
        """Wait for the counts unless they are known; return the split sizes and the tokens of each local expert.

        With a fixed buffer the sizes are known, and dispatch_postprocess counts the tokens.
        """
        known, num_local = plan.known, plan.counts_E.shape[0] // self.ep.size
        if known is not None and known.per_expert is not None:
            by_source = [[known.per_expert] * num_local] * (self.etp.size * self.ep.size)
            received_Se = plan.counts_E.new_full((len(by_source), num_local), known.per_expert)
            return self._make_sizes(received_Se, [num_local * known.per_expert] * self.ep.size, by_source)
        if known is not None and known.by_rank is not None:
            blocks = [slice(rank * num_local, (rank + 1) * num_local) for rank in range(self.ep.size)]
            by_source = [list(counts[blocks[self.ep.rank]]) for counts in known.by_rank]
            received_Se = integer_tensor([count for source in by_source for count in source], plan.counts_E.device)
            send = [sum(known.by_rank[self.ep.rank][block]) for block in blocks]
            return self._make_sizes(received_Se.view(-1, num_local), send, by_source)
        slots = plan.slots
        exchange = plan.exchange or self._start_count_exchange(plan.counts_E, is_read=slots is None)
        received_Se = self._wait_for_counts(exchange)
        if slots is not None:
            equal = (slots.size,) * self.ep.size
            return _Sizes(received_Se, equal, equal, (self.ep.size * slots.size,) * self.etp.size), []
        counts = cache_fn(exchange.counts or self._reader.start(self._sizes, plan.counts_E, received_Se))
        send, received = counts[: self.ep.size], counts[self.ep.size :]
        by_source = [received[start : start + num_local] for start in range(0, len(received), num_local)]
        return self._make_sizes(received_Se, send, by_source)

    def _make_sizes(self, received_Se: Tensor, send: list[int], by_source: list[list[int]]) -> tuple[_Sizes, list[int]]:
        """Return the sizes, and the tokens of each local expert.

        Args:
            send: tokens to each rank of ep.
            by_source: received_Se on the host.
        """
        totals = [sum(source) for source in by_source]
        by_etp_rank = [totals[start : start + self.ep.size] for start in range(0, len(totals), self.ep.size)]
        receive, gathered = tuple(by_etp_rank[self.etp.rank]), tuple(sum(rank) for rank in by_etp_rank)
        sizes = _Sizes(received_Se, tuple(send), receive, gathered)
        return sizes, [sum(column) for column in zip(*by_source)]

    def _wait_for_counts(self, exchange: _CountExchange) -> Tensor:
        """Return the counts from all sources, on the device."""
        exchange.work.wait()
        mine_Se = exchange.received_Se
        if self.etp.size == 1:
            return mine_Se
        received_Se = mine_Se.new_empty(self.etp.size * self.ep.size, mine_Se.shape[1])
        all_gather_flat(received_Se.view(-1), mine_Se.view(-1), self.etp)
        return received_Se

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Sort received tokens by local expert; with one local expert they are sorted."""
        sent: _SentState = state.handle
        received_Se = sent.sizes.received_Se
        if sent.slots is not None:
            order = compact_slots(received_Se, sent.slots.size, sent.slots.pad_multiple)
            x_CH, probs_C = slots_to_buffer(order, state.x_RH, state.probs_R)
            return DispatchState(x_CH, probs_C, order.counts_e, replace(sent, buffer_order=order), state.overflow)
        if len(state.tokens_per_expert_e) == 1:
            return state
        num_received = sum(sent.sizes.gathered)
        orders = block_permutation(received_Se, num_received), block_permutation(received_Se.t(), num_received)
        x_RH, probs_R = reorder(*orders, state.x_RH, state.probs_R)
        return replace(state, x_RH=x_RH, probs_R=probs_R, handle=replace(sent, orders=orders))

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sort the results by the rank to which they return."""
        sent: _SentState = state.handle
        if sent.buffer_order is not None:
            return buffer_to_slots(sent.buffer_order, y_RH)
        return y_RH if sent.orders is None else reorder(*sent.orders[::-1], y_RH)[0]

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Any]:
        """Sum the partial results over etp and start to send them back."""
        sizes = state.handle.sizes
        y_RH = reduce_scatter_tokens(y_RH, sizes.gathered, self.etp, self.mxfp8)
        work, (y_RH,) = start_token_exchange(
            self.ep, sizes.receive, sizes.send, y_RH, casts=self.mxfp8.casts, round_backward=self.mxfp8.gradients
        )
        return y_RH, work

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        sent: _SentState = state.handle
        return self.permutation.unpermute(y_RH, sent.routes) if sent.slots is None else sum_slots(y_RH, sent.slots.map)


def make_dispatcher(settings: DispatcherSettings) -> AllToAllDispatcher:
    return AllToAllDispatcher(settings.ps, settings.permutation, settings.mxfp8)
