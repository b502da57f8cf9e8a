"""What a router asks of a selection: which experts take a token, and with what weight.

There is one file per selection in this package, listed by arguments/mechanisms/selections.py. The router builds one
and never asks which.

Shape letters: T tokens, E experts, K top-k, V token ids.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.declaration import SelectionDeclaration
from arguments.moe import MoEArgs
from moe_trainer.moe.dispatch.base import CacheFn
from moe_trainer.moe.selections.scores import Scores, make_scores
from moe_trainer.parallel.state import ParallelState

FusedTopK = Callable[..., tuple[Tensor, Tensor]]
"""A kernel that chooses and weighs, with the arguments of TransformerEngine's; see layers/te.py."""


@dataclass(frozen=True)
class SelectionContext:
    """What a selection is built for.

    Attributes:
        moe: flags.
        name: global name of the router.
        layer_number: of the router, from 1.
        ps: process groups.
        cache_fn: wraps every decision, so that a recomputed layer takes that of its first pass.
    """

    moe: MoEArgs
    name: str
    layer_number: int
    ps: ParallelState
    cache_fn: CacheFn

    def make_scores(self, pre_softmax: bool) -> Scores:
        """Return the scores of the flags."""
        return make_scores(self.moe.moe_router_score_function, pre_softmax, self.moe.moe_router_topk_scaling_factor)


@dataclass(frozen=True)
class RoutingInputs:
    """What a selection may read besides the logits.

    Attributes:
        training: the router is in training mode.
        active: it is, and gradients are computed.
        expert_bias_E: the router's.
        token_ids_T: ids of the tokens.
        given_TK: the router's experts from outside.
    """

    training: bool = True
    active: bool = False
    expert_bias_E: Tensor | None = None
    token_ids_T: Tensor | None = None
    given_TK: Tensor | None = None


class Choice(NamedTuple):
    """Chosen experts as indices and as a bool map."""

    chosen_TK: Tensor
    routing_TE: Tensor


def to_routing_map(chosen_TK: Tensor, logits_TE: Tensor) -> Tensor:
    """Return the selected experts as bool [T, E]."""
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)


class ExpertSelection:
    """Base of all selections; a module's `make_selection` makes one of a SelectionContext.

    Attributes:
        declaration: what other code may ask of it.
        reads_token_ids: it needs `token_ids_T`, and no expert bias.
        has_own_counts: balancing losses always count `counted`, which their kernels cannot do.
    """

    declaration: SelectionDeclaration
    reads_token_ids = False
    has_own_counts = False

    def make_tables(self, vocab_size: int, device: torch.device) -> None:
        """Make what depends on the padded number of token ids, which a checkpoint may replace."""

    def use_kernel(self, kernel: FusedTopK | None) -> None:
        """Compute by a fused kernel from now on, if it can compute this selection; None: in plain torch."""

    def preselect(self, logits_TE: Tensor) -> Choice | None:
        """Choose by logits before the balancing losses, which then count the same; None if `route` will choose."""
        return None

    def counted(self, logits_TE: Tensor, choice: Choice | None) -> Tensor | None:
        """Return the map of the experts that balancing losses count; None: the top-k of their own scores."""
        return None if choice is None else choice.routing_TE

    def route(self, logits_TE: Tensor, choice: Choice | None, inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
        """Choose experts, unless `choice` says which, and weigh them.

        Returns:
            probs_TE in the dtype of the logits, zero if not selected; routing_TE bool.
        """
        raise NotImplementedError

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        """Return the routing margin of tokens (margin.py); None if a token's own scores do not order its experts."""
        return None

    def balancing_bias(self, expert_bias_E: Tensor | None) -> Tensor | None:
        """Return the bias that balances the choice, given that of the router; None without one."""
        return expert_bias_E

    def state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the selection that a checkpoint stores, by name inside the router."""
        yield from ()

    def reset(self) -> None:
        """Discard what this iteration has counted."""

    @staticmethod
    def end_iteration(selections: Iterable[Any], ps: ParallelState, frozen: bool) -> None:
        """Update the state of all selections of this class after a global batch; `frozen` only resets the counts."""


class ScoredSelection(ExpertSelection):
    """A selection that weighs experts by scores; subclasses choose them."""

    def __init__(self, topk: int, scores: Scores, cache_fn: CacheFn):
        super().__init__()
        self.topk, self.scores, self.cache_fn = topk, scores, cache_fn

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        """Return chosen_TK."""
        raise NotImplementedError

    def route(self, logits_TE: Tensor, choice: Choice | None, inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
        scores_TE = self.scores.score(logits_TE)
        if choice is None:
            chosen_TK = self.choose(logits_TE, scores_TE, inputs)
            choice = Choice(chosen_TK, to_routing_map(chosen_TK, logits_TE))
        return self.scores.weigh(logits_TE, scores_TE, *choice), choice.routing_TE
