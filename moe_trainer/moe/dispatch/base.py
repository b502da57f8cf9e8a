"""The dispatcher interface: six phases, composed into dispatch() and combine().

A dispatcher brings every token to the ranks that hold its experts and the results back. The phases are separate so that an
overlapping schedule can run them one by one (communication of one microbatch beside the computation of another):

    preprocess -> exchange -> postprocess      (together: dispatch)
    regroup    -> exchange_back -> restore     (together: combine)

Only `exchange` and `exchange_back` wait for other ranks; `preprocess` may start the exchange of a few counts. Both are made
of a start, which returns while rows are under way where a dispatcher can do that, and a finish. State travels in the
`Dispatched` value that preprocess makes and later phases receive: a dispatcher object holds constants only, so that recomputation and
two microbatches in flight are safe.

Shape letters: T local tokens, E experts, e local experts, R rows received by this rank, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_trainer.parallel.state import ParallelState

T = TypeVar("T")


def ep_ranks(ps: ParallelState) -> tuple[int, ...]:
    """For every member of ps.tp_ep its rank in its expert-parallel group: which part of the experts it holds.

    Either axis may vary faster inside tp_ep; where the members of this rank's own ep group stand in it tells.
    """
    place = [ps.tp_ep.ranks.index(rank) for rank in ps.ep.ranks]
    stride = place[1] - place[0] if len(place) > 1 else ps.tp_ep.size
    return tuple(member // stride % ps.ep.size for member in range(ps.tp_ep.size))


class Members:
    """The members of tp_ep as holders of experts: each counts as one that holds experts of its own, though those of one etp group
    hold pieces of the same ones."""

    def __init__(self, ps: ParallelState):
        self.part_of = ep_ranks(ps)
        self.num_parts = ps.ep.size

    def columns(self, table_TE: Tensor) -> Tensor:
        """[T, E] -> [T, V]: the columns of every member's experts, one member after the other. Differentiable."""
        if self.num_parts == len(self.part_of):
            return table_TE
        parts = table_TE.unflatten(1, (self.num_parts, -1))
        return torch.cat([parts[:, part] for part in self.part_of], 1)


@dataclass(frozen=True)
class Known:
    """What is known of the rows before the routing is read: rows of this rank in all, and if they are known those of each expert from each
    rank: one number if these are all equal, or one list of all columns from each rank of ep (then that is the group of experts)."""

    num_rows: int
    per_expert: int | None = None
    by_rank: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Hints:
    """What is known besides the routing. Every dispatcher takes it and uses what it can.

    expert_E: with clones of experts the expert that each column stands for, int64: where a token's rows are summed one by one, they are
    summed in the order of these. known: of the rows; for dispatchers that have takes_known. captured: a graph captures `preprocess`, so
    that nothing may be under way when it returns. buffer_rows: receive into so many rows, whatever arrives, and leave the counts on the
    device; for dispatchers that have takes_buffer_rows.
    """

    expert_E: Tensor | None = None
    known: Known | None = None
    captured: bool = False
    buffer_rows: int | None = None


Once = Callable[[Callable[[], T]], T]
"""Ask for what reaches the host, or return what a region that is recomputed has asked for before."""


def at_once(ask: Callable[[], T]) -> T:
    return ask()


@dataclass(frozen=True)
class Dispatched:
    """What this rank's experts get, and what combine needs to bring the results home."""

    x_RH: Tensor  # after postprocess: rows sorted by local expert, then by source rank, then by token
    probs_R: Tensor  # probability of each row
    # rows of each local expert, on the host; sums to R (empty until they are known). Received into a buffer: int64 on the device, and what
    # stands behind these rows is undefined
    tokens_per_expert_e: list[int] | Tensor
    handle: Any  # the dispatcher's own record (a permutation, split sizes, ...)
    overflow: Tensor | None = None  # received into a buffer: integer [1] on the device, not 0 where rows found no room in it


class TokenDispatcher(ABC):
    """Base of all dispatchers; holds constants only."""

    takes_padding = True  # may a token be sent to more experts than the router chooses?
    takes_known = False  # does it use what is known of the rows, so that preprocess waits for nothing and gives tensors alone?
    takes_buffer_rows = False  # can it receive into a buffer of a size that is given beforehand?

    @abstractmethod
    def preprocess(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor, hints: Hints = Hints()) -> Dispatched:
        """Order the local tokens for sending. Hints change no number beyond the last bits, so a dispatcher may ignore them."""

    def exchange(self, sent: Dispatched) -> Dispatched:
        """Communicate to the ranks that hold the experts. Nothing to do on one rank."""
        return self.finish_exchange(self.start_exchange(sent))

    def start_exchange(self, sent: Dispatched, once: Once = at_once) -> Dispatched:
        """Begin to communicate. The rows must not be touched before finish_exchange. once: is asked for what reaches the host."""
        return sent

    def finish_exchange(self, sent: Dispatched) -> Dispatched:
        """Wait for the rows."""
        return sent

    def postprocess(self, sent: Dispatched) -> Dispatched:
        """Sort received rows by local expert."""
        return sent

    def regroup(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Undo postprocess on the experts' output."""
        return y_RH

    def exchange_back(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Communicate back to the tokens' ranks. Nothing to do on one rank."""
        return self.finish_exchange_back(*self.start_exchange_back(y_RH, sent), sent)

    def start_exchange_back(self, y_RH: Tensor, sent: Dispatched) -> tuple[Tensor, Any]:
        """Begin to communicate back. Returns: what finish_exchange_back takes; the rows must not be touched before."""
        return y_RH, None

    def finish_exchange_back(self, y_RH: Tensor, under_way: Any, sent: Dispatched) -> Tensor:
        """Wait for the rows. Dispatchers that cannot return while rows are under way do all of it here."""
        return y_RH

    @abstractmethod
    def restore(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Sum each token's rows into token order."""

    def dispatch(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> Dispatched:
        """Send every token to the ranks that hold its experts.

        Shapes: x_TH [T, hidden] params dtype; probs_TE floating; routing_TE bool.
        Returns: Dispatched; x_RH sorted by local expert.
        """
        return self.postprocess(self.exchange(self.preprocess(x_TH, probs_TE, routing_TE)))

    def combine(self, y_RH: Tensor, sent: Dispatched) -> Tensor:
        """Bring the experts' outputs back and sum them per token.

        Shapes: y_RH in the order of sent.x_RH, already multiplied by the probabilities. Returns y_TH.
        """
        return self.restore(self.exchange_back(self.regroup(y_RH, sent), sent), sent)
