"""The dispatcher interface: Megatron-Core's six phases, composed into dispatch() and combine().

    dispatch_preprocess -> token_dispatch -> dispatch_postprocess     (dispatch)
    combine_preprocess  -> token_combine  -> combine_postprocess      (combine)

Only token_dispatch and token_combine wait for other ranks; dispatch_preprocess may start the exchange of token
counts. Both are split into a start, which returns while tokens are in flight where the backend allows it, and a
finish, so that an overlapping schedule can compute in between. State is in the returned `DispatchState`: a dispatcher
holds constants only, so recompute and two microbatches in flight are safe.

Shape letters: T local tokens, E experts, e local experts, R routed tokens received by this rank, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from arguments.mechanisms.dispatchers import DispatcherCapability, DispatcherDeclaration
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.collectives import Exchange, finish_exchange
from moe_trainer.parallel.state import ParallelState

T = TypeVar("T")

CacheFn = Callable[[Callable[[], T]], T]
"""Compute a value that decides on sizes, or return the one that the first pass of a recomputed region computed."""


def no_cache(compute: Callable[[], T]) -> T:
    return compute()


def expert_ranks(ps: ParallelState) -> tuple[int, ...]:
    """Return the expert-parallel rank of every member of ps.tp_ep, which identifies the experts that the member holds.

    Either axis may vary faster inside tp_ep. The positions of this rank's ep group in it show which one does.
    """
    positions = [ps.tp_ep.ranks.index(rank) for rank in ps.ep.ranks]
    stride = positions[1] - positions[0] if len(positions) > 1 else ps.tp_ep.size
    return tuple(member // stride % ps.ep.size for member in range(ps.tp_ep.size))


class EtpExpansion:
    """Expansion of expert columns to one column per member of tp_ep that holds a shard of the expert.

    Libraries that know no expert tensor parallelism then treat every shard as an expert.
    """

    def __init__(self, ps: ParallelState):
        self.expert_ranks = expert_ranks(ps)
        self.ep_size = ps.ep.size

    def expand(self, table_TE: Tensor) -> Tensor:
        """Return [T, V]: the columns of every member's experts, in the order of the members. Differentiable."""
        if self.ep_size == len(self.expert_ranks):
            return table_TE
        columns = table_TE.unflatten(1, (self.ep_size, -1))
        return torch.cat([columns[:, rank] for rank in self.expert_ranks], 1)


@dataclass(frozen=True)
class KnownCounts:
    """Counts of routed tokens that the host knows before it reads the routing.

    Attributes:
        num_tokens: routed tokens that this rank sends in all.
        per_expert: tokens that each rank sends to each expert, if all these numbers are equal.
        by_rank: tokens for each column, one list for each rank of ep (which then is the dispatcher's group).
    """

    num_tokens: int
    per_expert: int | None = None
    by_rank: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class DispatchHints:
    """Optional inputs of dispatch_preprocess. Every dispatcher uses those that it supports.

    Attributes:
        expert_E: the expert of each column, int64, where other ranks compute some tokens of an expert; a token's
            results are summed in this order.
        known: counts known to the host, for dispatchers with `uses_known_counts`.
        is_captured: a CUDA graph captures dispatch_preprocess, so no communication may be in flight when it returns.
        buffer_size: tokens in the fixed receive buffer, the same on all ranks; counts stay on the device. For
            dispatchers with `fixed_buffer_problem` None.
        pad_multiple: each expert's tokens in a fixed buffer are padded with zeros to a multiple of it; without one it
            is 1.
    """

    expert_E: Tensor | None = None
    known: KnownCounts | None = None
    is_captured: bool = False
    buffer_size: int | None = None
    pad_multiple: int = 1


NO_HINTS = DispatchHints()


@dataclass(frozen=True)
class DispatchState:
    """State passed from phase to phase.

    Attributes:
        x_RH: tokens; after dispatch_postprocess sorted by local expert, then by source rank, then by token.
        probs_R: probability of each routed token.
        tokens_per_expert_e: routed tokens of each local expert, on the host; sums to R, empty until it is known. With
            a fixed receive buffer int64 on the device, with padding, which is zeros and has zero gradients; what
            follows these tokens in the buffer is undefined.
        handle: the dispatcher's own record (a permutation, split sizes, ...).
        overflow: with a fixed receive buffer, integer [1] on the device, nonzero if tokens did not fit.
        fixed_size: with counts on the host, the size of a fixed receive buffer that would have held these tokens, if
            that is more than their number.
    """

    x_RH: Tensor
    probs_R: Tensor
    tokens_per_expert_e: list[int] | Tensor
    handle: Any
    overflow: Tensor | None = None
    fixed_size: int = 0


def permute_received(permutation: Permutation, state: DispatchState, routing_Ne: Tensor) -> DispatchState:
    """Copy every received token for each of its local experts.

    Args:
        permutation: the local permutation.
        state: x_RH and probs_R are [N, H] and [N, e] of the tokens that this rank received, N, each once.
        routing_Ne: which local experts take them.

    Returns:
        The sorted tokens; the permutation is `routes` of the handle.
    """
    counts_e = state.tokens_per_expert_e
    x_RH, probs_R, routes = permutation.permute(state.x_RH, state.probs_R, routing_Ne, num_rows=sum(counts_e))
    return DispatchState(x_RH, probs_R, counts_e, replace(state.handle, routes=routes))


class TokenDispatcher(ABC):
    """Base of all dispatchers; holds constants only."""

    declaration: ClassVar[DispatcherDeclaration]
    # why it cannot receive into a buffer of a given size, without counts on the host; None if it can
    fixed_buffer_problem: str | None = "the dispatcher receives buffers of the size of what arrives"

    @property
    def uses_known_counts(self) -> bool:
        """Whether dispatch_preprocess, with known counts, waits for nothing and returns tensors only."""
        return self.declaration.supports(DispatcherCapability.PREPROCESS_GRAPH)

    @property
    def supports_routing_padding(self) -> bool:
        """Whether a token may be sent to more experts than the router chooses."""
        return not self.declaration.ignores(DispatcherCapability.QUANTIZED_PADDING)

    @abstractmethod
    def dispatch_preprocess(
        self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: DispatchHints = NO_HINTS
    ) -> DispatchState:
        """Sort the local tokens by destination. Hints change results in the last bits at most."""

    def token_dispatch(self, state: DispatchState) -> DispatchState:
        """Send tokens to the ranks that hold their experts; does nothing on one rank."""
        return self.finish_token_dispatch(self.start_token_dispatch(state))

    def start_token_dispatch(self, state: DispatchState, cache_fn: CacheFn = no_cache) -> DispatchState:
        """Start to send tokens; they must not be read before finish_token_dispatch.

        Args:
            state: output of dispatch_preprocess.
            cache_fn: wraps the reads of counts by the host.
        """
        return state

    def finish_token_dispatch(self, state: DispatchState) -> DispatchState:
        """Wait for the tokens."""
        return state

    def dispatch_postprocess(self, state: DispatchState) -> DispatchState:
        """Sort received tokens by local expert."""
        return state

    def combine_preprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Undo dispatch_postprocess on the experts' output."""
        return y_RH

    def token_combine(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Send results back to the ranks of their tokens; does nothing on one rank."""
        return self.finish_token_combine(*self.start_token_combine(y_RH, state), state)

    def start_token_combine(self, y_RH: Tensor, state: DispatchState) -> tuple[Tensor, Exchange | None]:
        """Start to send results back. Return the inputs of finish_token_combine; they must not be read before it."""
        return y_RH, None

    def finish_token_combine(self, y_RH: Tensor, handle: Exchange | None, state: DispatchState) -> Tensor:
        """Wait for the results in flight. Backends without asynchronous communication communicate here."""
        return y_RH if handle is None else finish_exchange(handle, (y_RH,))[0]

    def combine_postprocess(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Sum the results of each token and restore token order, unless the exchange has done so."""
        return y_RH

    def set_budgets(self, budgets: Sequence[ReceiveBudget]) -> None:
        """Take the budgets of all MoE layers of the model, before the first dispatch."""
        return

    def close(self) -> None:
        """Release what a library holds; called before the process groups are destroyed."""
        return

    def dispatch(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> DispatchState:
        """Run the three phases of dispatch.

        Shapes: x_TH [T, hidden] params dtype; probs_TE floating; routing_TE bool. Returns x_RH sorted by local expert.
        """
        return self.dispatch_postprocess(self.token_dispatch(self.dispatch_preprocess(x_TH, probs_TE, routing_TE)))

    def combine(self, y_RH: Tensor, state: DispatchState) -> Tensor:
        """Run the three phases of combine.

        Shapes: y_RH in the order of state.x_RH, already multiplied by the probabilities. Returns y_TH.
        """
        y_RH = self.token_combine(self.combine_preprocess(y_RH, state), state)
        return self.combine_postprocess(y_RH, state)
