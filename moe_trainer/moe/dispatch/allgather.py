"""Dispatch by all-gather: every rank gathers all tokens and selects those of its experts; results are reduce-scattered.

The group's tokens are concatenated in rank order, which sorts an expert's tokens by source rank and then by token. A
rank needs the routing columns of its own experts only, so probabilities and routing map are sent by all-to-all
instead of being gathered. Results are summed per token on each rank and then over ranks, in the wider dtype of tokens
and probabilities, as in Megatron-Core; in fp32 they differ from the all-to-all dispatcher's in the last bits. With
expert tensor parallelism the group is tp_ep (etp x ep): the ranks of etp request the same columns, and the
reduce-scatter also sums their partial results.

Communication per layer and microbatch: T * H gathered and reduce-scattered over S ranks, in forward and backward, for
any top-k.
Shape letters: T local tokens, G tokens of the group, E experts, e local experts, S ranks, R routed tokens, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import ALLGATHER
from moe_trainer.memory.host_read import AsyncHostReader
from moe_trainer.moe.dispatch.base import (
    NO_HINTS,
    CacheFn,
    DispatchHints,
    DispatchState,
    TokenDispatcher,
    expert_ranks,
    no_cache,
    permute_received,
)
from moe_trainer.moe.dispatch.flex import DispatcherSettings
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import (
    CollectiveWork,
    all_gather_flat,
    all_gather_rows,
    all_to_all,
    reduce_scatter_rows,
)
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class _AllGatherState:
    """State of one dispatch.

    Attributes:
        routing: before token_dispatch this rank's [T, E] map, after it the [G, e] map of the local experts.
        counts: handle of the exchange of counts, and the pending host read of every rank's number of tokens and the
            local experts' routed tokens.
        sizes: tokens of every rank, on the host.
        routes: the local permutation.
    """

    routing: Tensor
    counts: tuple[CollectiveWork, Callable[[], list[int]]] | None = None
    sizes: tuple[int, ...] = ()
    routes: Any = None


class AllGatherDispatcher(TokenDispatcher):
    """Gather all tokens of the expert group, select those of the local experts, reduce-scatter the results."""

    declaration = ALLGATHER

    def __init__(self, ps: ParallelState, permutation: Permutation):
        self.permutation = permutation
        self.group = ps.tp_ep
        self.ep_size = ps.ep.size
        self.expert_ranks = expert_ranks(ps)
        self._reader = AsyncHostReader()

    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Start to exchange the counts, unless they are known or a graph captures this.

        Ranks may have different numbers of tokens, for example in the last batch of an evaluation.
        """
        known = hints.known
        if known is not None and known.per_expert is not None:
            counts_e = [known.per_expert * self.group.size] * (routing_TE.shape[1] // self.ep_size)
            sizes = (x_TH.shape[0],) * self.group.size
            return DispatchState(x_TH, probs_TE, counts_e, _AllGatherState(routing_TE, sizes=sizes))
        counts = None if hints.is_captured else self._start_count_exchange(routing_TE)
        return DispatchState(x_TH, probs_TE, [], _AllGatherState(routing_TE, counts))

    def _start_count_exchange(self, routing_TE: Tensor) -> tuple[CollectiveWork, Callable[[], list[int]]]:
        num_tokens = routing_TE.new_full((1,), routing_TE.shape[0], dtype=torch.int64)
        local_N = torch.cat([num_tokens, routing_TE.sum(0)])
        table_SN = local_N.new_empty(self.group.size, local_N.shape[0])
        work = all_gather_flat(table_SN.view(-1), local_N, self.group, async_op=True)
        return work, self._reader.start(self._sizes, table_SN, work=work)

    def _sizes(self, table_SN: Tensor) -> Tensor:
        """Return the number of tokens of every rank, then the routed tokens of the local experts."""
        num_local = (table_SN.shape[1] - 1) // self.ep_size
        first = 1 + self.expert_ranks[self.group.rank] * num_local
        return torch.cat([table_SN[:, 0], table_SN[:, first : first + num_local].sum(0)])

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Wait for the counts, the only wait for the device."""
        gather: _AllGatherState = state.handle
        if gather.sizes:
            return state
        work, read_counts = gather.counts or self._start_count_exchange(gather.routing)
        work.wait()
        counts = cache_fn(read_counts)
        sizes = tuple(counts[: self.group.size])
        return replace(
            state,
            tokens_per_expert_e=counts[self.group.size :],
            handle=_AllGatherState(gather.routing, sizes=sizes),
        )

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Gather the tokens and the columns of the local experts."""
        gather: _AllGatherState = state.handle
        sizes = gather.sizes
        x_GH = all_gather_rows(state.x_RH, sizes, self.group)
        send, receive = [state.x_RH.shape[0]] * self.group.size, sizes
        (probs_Ge,) = all_to_all(self.group, send, receive, self._columns(state.probs_R))
        (routing_Ge,) = all_to_all(self.group, send, receive, self._columns(gather.routing.to(torch.uint8)))
        return replace(state, x_RH=x_GH, probs_R=probs_Ge, handle=replace(gather, routing=routing_Ge.bool()))

    def _columns(self, table_TE: Tensor) -> Tensor:
        """[T, E] -> [S * T, e]: the columns of each rank's experts."""
        num_tokens, num_experts = table_TE.shape
        num_local = num_experts // self.ep_size
        columns_PTe = table_TE.view(num_tokens, self.ep_size, num_local).transpose(0, 1)
        if self.ep_size < self.group.size:
            columns_PTe = torch.stack([columns_PTe[rank] for rank in self.expert_ranks])
        return columns_PTe.reshape(-1, num_local)

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Permute the gathered tokens, one copy for each local expert that takes them."""
        return permute_received(self.permutation, state, state.handle.routing)

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the local experts' results of every token of the group, in the dtype of the sum over ranks."""
        return self.permutation.unpermute(y_RH, state.handle.routes).to(
            torch.promote_types(y_RH.dtype, state.probs_R.dtype)
        )

    def finish_token_combine(self, y_RH: Tensor, handle: Any, state: DispatchState) -> Tensor:
        """Sum over ranks; every rank receives its own tokens."""
        return reduce_scatter_rows(y_RH, state.handle.sizes, self.group)

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Cast back to the dtype of the tokens."""
        return y_RH.to(state.x_RH.dtype)


def make_dispatcher(settings: DispatcherSettings) -> AllGatherDispatcher:
    return AllGatherDispatcher(settings.ps, settings.permutation)
