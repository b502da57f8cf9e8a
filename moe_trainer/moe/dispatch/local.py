"""Dispatch without communication: every expert is on this rank.

With expert-parallel size 1 Megatron-Core's allgather and alltoall dispatchers both reduce to this local permutation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moe_trainer.memory.host_read import HostReads
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Once, TokenDispatcher, at_once
from moe_trainer.moe.dispatch.eight_bits import EightBits
from moe_trainer.ops.permute import Permutation


@dataclass(frozen=True)
class _Sorted:
    """routes: the sort; None as long as it is not known how many rows there are. counts: of each expert's rows, on their way. routing_TE:
    what is still to be sorted."""

    routes: Any
    counts: Callable[[], list[int]] | None
    routing_TE: Tensor | None = None


class LocalDispatcher(TokenDispatcher):
    """Sort the local tokens by expert (stable); sum them back."""

    def __init__(self, permutation: Permutation, eight_bits: EightBits = EightBits()):
        """eight_bits: what is rounded as if it travelled."""
        self.permutation, self.eight_bits = permutation, eight_bits
        self._reads = HostReads()

    takes_known = True

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Order tokens by expert, here or, where it is not known how many rows there are, when they are counted. Unless they are equal, the
        counts of rows are on their way to the host when it returns."""
        known = hints.known
        if known is None:
            return Dispatched(x_TH, probs_TE, [], _Sorted(None, None if hints.captured else self._read(routing_TE.sum(0)), routing_TE))
        x_RH, probs_R, routes = self.permutation.permute(self.eight_bits.dispatched(x_TH), probs_TE, routing_TE, num_rows=known.num_rows)
        even = [] if known.per_expert is None else [known.per_expert] * routing_TE.shape[1]
        return Dispatched(x_RH, probs_R, even, _Sorted(routes, None if even or hints.captured else self._read(routes.counts_E)))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """The counts reach the host here, if they are not known: the only wait."""
        if sent.tokens_per_expert_e:
            return sent
        kept: _Sorted = sent.handle
        counts_e = once(kept.counts or self._read(kept.routing_TE.sum(0) if kept.routes is None else kept.routes.counts_E))
        if kept.routes is not None:
            return replace(sent, tokens_per_expert_e=counts_e)
        x_RH, probs_R, routes = self.permutation.permute(
            self.eight_bits.dispatched(sent.x_RH), sent.probs_R, kept.routing_TE, num_rows=sum(counts_e))
        return Dispatched(x_RH, probs_R, counts_e, _Sorted(routes, None))

    def _read(self, counts_E: Tensor) -> Callable[[], list[int]]:
        return self._reads.start(lambda counts_E: counts_E, counts_E)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return self.permutation.unpermute(self.eight_bits.combined(y_RH), sent.handle.routes)
