"""Dispatch without communication: every expert is on this rank.

With expert-parallel size 1 Megatron-Core's allgather and alltoall dispatchers both reduce to this local permutation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from arguments.mechanisms.dispatchers import LOCAL
from moe_trainer.memory.host_read import AsyncHostReader
from moe_trainer.moe.dispatch.base import NO_HINTS, CacheFn, DispatchHints, DispatchState, TokenDispatcher, no_cache
from moe_trainer.moe.dispatch.flex import DispatcherSettings
from moe_trainer.moe.dispatch.mxfp8_transport import HIGH_PRECISION, Mxfp8Transport
from moe_trainer.ops.fixed_slots import SlotMap, fill_slots, make_slot_map, padded_size, sum_slots
from moe_trainer.ops.permute import Permutation


@dataclass(frozen=True)
class _LocalState:
    """State of one dispatch.

    Attributes:
        routes: the local permutation; None until the number of routed tokens is known.
        counts: pending host read of each expert's tokens.
        routing_TE: routing that is not applied yet.
        slots: with a fixed buffer, its one slot.
    """

    routes: Any
    counts: Callable[[], list[int]] | None
    routing_TE: Tensor | None = None
    slots: SlotMap | None = None


class LocalDispatcher(TokenDispatcher):
    """Sort the local tokens by expert (stable); sum their results."""

    declaration = LOCAL
    fixed_buffer_problem = None

    def __init__(self, permutation: Permutation, mxfp8: Mxfp8Transport = HIGH_PRECISION):
        """Store the permutation; `mxfp8` says which tokens are rounded as if they were sent."""
        self.permutation, self.mxfp8 = permutation, mxfp8
        self._reader = AsyncHostReader()

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Sort tokens if the number of routed tokens is known; start to read the counts unless they are equal.

        A fixed buffer is sorted at once, and its counts are not read.
        """
        if hints.buffer_size is not None:
            multiple = hints.pad_multiple
            size = padded_size(hints.buffer_size, routing_TE.shape[1], multiple)
            slots = make_slot_map(routing_TE, 1, size, multiple)
            tables = fill_slots(self.mxfp8.round_tokens(x_TH), probs_TE, slots)
            return DispatchState(
                *tables, slots.counts_Se[0], _LocalState(None, None, slots=slots), overflow=slots.overflow
            )
        known = hints.known
        if known is None:
            counts = None if hints.is_captured else self._read(routing_TE.sum(0))
            return DispatchState(x_TH, probs_TE, [], _LocalState(None, counts, routing_TE))
        x_RH, probs_R, routes = self.permutation.permute(
            self.mxfp8.round_tokens(x_TH), probs_TE, routing_TE, num_rows=known.num_tokens
        )
        even = [] if known.per_expert is None else [known.per_expert] * routing_TE.shape[1]
        counts = None if even or hints.is_captured else self._read(routes.counts_E)
        return DispatchState(x_RH, probs_R, even, _LocalState(routes, counts))

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Wait for the counts, the only wait for the device; sort the tokens if that is still to be done."""
        local: _LocalState = state.handle
        if local.slots is not None or state.tokens_per_expert_e:
            return state
        routing_TE = local.routing_TE
        if routing_TE is None:
            return replace(state, tokens_per_expert_e=cache_fn(local.counts or self._read(local.routes.counts_E)))
        counts_e = cache_fn(local.counts or self._read(routing_TE.sum(0)))
        x_RH, probs_R, routes = self.permutation.permute(
            self.mxfp8.round_tokens(state.x_RH), state.probs_R, routing_TE, num_rows=sum(counts_e)
        )
        return DispatchState(x_RH, probs_R, counts_e, _LocalState(routes, None))

    def _read(self, counts_E: Tensor) -> Callable[[], list[int]]:
        return self._reader.start(lambda counts_E: counts_E, counts_E)

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        y_RH, local = self.mxfp8.round_gradients(y_RH), state.handle
        return self.permutation.unpermute(y_RH, local.routes) if local.slots is None else sum_slots(y_RH, local.slots)


def make_dispatcher(settings: DispatcherSettings) -> LocalDispatcher:
    return LocalDispatcher(settings.permutation, settings.mxfp8)
