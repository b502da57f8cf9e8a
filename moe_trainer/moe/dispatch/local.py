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
    """routes: the sort. counts: of each expert's rows, on their way."""

    routes: Any
    counts: Callable[[], list[int]] | None


class LocalDispatcher(TokenDispatcher):
    """Sort the local tokens by expert (stable); sum them back."""

    def __init__(self, permutation: Permutation, eight_bits: EightBits = EightBits()):
        """eight_bits: what is rounded as if it travelled."""
        self.permutation, self.eight_bits = permutation, eight_bits
        self._reads = HostReads()

    takes_known = True

    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Order tokens by expert. On a GPU this waits for the device if the number of rows is not known. Unless they are equal, the counts
        of rows are on their way to the host when it returns."""
        known = hints.known
        told = {} if known is None else {"num_rows": known.num_rows}
        x_RH, probs_R, routes = self.permutation.permute(self.eight_bits.dispatched(x_TH), probs_TE, routing_TE, **told)
        even = [] if known is None or known.per_expert is None else [known.per_expert] * routing_TE.shape[1]
        return Dispatched(x_RH, probs_R, even, _Sorted(routes, None if even or hints.captured else self._read(routes)))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """The counts reach the host here, if they are not known."""
        if sent.tokens_per_expert_e:
            return sent
        kept: _Sorted = sent.handle
        return replace(sent, tokens_per_expert_e=once(self._read(kept.routes) if kept.counts is None else kept.counts))

    def _read(self, routes: Any) -> Callable[[], list[int]]:
        return self._reads.start(lambda counts_E: counts_E, routes.counts_E)

    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows."""
        return self.permutation.unpermute(self.eight_bits.combined(y_RH), sent.handle.routes)
