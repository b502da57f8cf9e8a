"""Agreement of the ranks on receive buffers and paged stashes that were too small (moe/receive/budget.py)."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moe_trainer.moe.receive.budget import (
    count_growing_stashes,
    count_overflows,
    get_grown_budgets,
    get_receive_budgets,
    get_stashes,
    receive_scope,
)
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)


class ReceiveBuffers:
    """The buffers of the experts of a model, which may be too small for an iteration.

    Attributes:
        may_lose_tokens: tokens that do not fit are lost, on any rank: the iteration is then repeated.
    """

    def __init__(self, chunks: Sequence[Any], ps: ParallelState, device: torch.device, is_limited: bool):
        """Store the settings; `is_limited`: there is a --moe-expert-rank-capacity-factor."""
        self._chunks, self._ps, self._device, self._is_limited = chunks, ps, device, is_limited
        self.may_lose_tokens = False

    def allow_lost_tokens(self) -> bool:
        """Keep counts on the device where layers allow it, in a run that can repeat iterations. Collective.

        Returns:
            may_lose_tokens.
        """
        self.may_lose_tokens = self._is_limited and any(
            collectives.all_gather_object(
                any(budget.allows_device_counts for budget in get_receive_budgets(self._chunks)), self._ps.world
            )
        )
        return self.may_lose_tokens

    def scope(self, counts_on_host: bool) -> AbstractContextManager[None]:
        """Return the scope of the passes of an iteration; `counts_on_host`: no token may be lost."""
        return receive_scope(self._chunks, self.may_lose_tokens and not counts_on_host)

    def count_small_buffers(self) -> Tensor:
        """Return the numbers of layers whose buffers overflowed, stashes that will grow, and layers whose buffers grew.

        fp64 [3] on the device, over all ranks if tokens may be lost, else of this rank.

        Communication: the three numbers over the world, if tokens may be lost. Otherwise graphs contain no stash.
        """
        chunks = self._chunks
        overflowed, growing = count_overflows(chunks, self._device), count_growing_stashes(chunks, self._device)
        counts_3 = torch.cat([overflowed, growing, overflowed.new_full((1,), len(get_grown_budgets(chunks)))])
        return collectives.all_reduce(counts_3, self._ps.world) if self.may_lose_tokens else counts_3

    def agree(self, where: str, was_repeated: bool = False) -> bool:
        """Adopt the factors to which buffers have grown, and log the sufficient ones.

        Collective if tokens may be lost: then fixed buffers have one size, of the largest factor on any rank, and rank
        0 logs. Otherwise every rank has its own sizes and logs what grew.

        Args:
            where: what has been computed, for the log.
            was_repeated: it is an iteration in which tokens were lost and which was repeated.

        Returns:
            Whether a buffer has grown, so that graphs which contain its old size must be dropped.
        """
        if not self._is_limited:
            return False
        budgets, stashes, rank = get_receive_budgets(self._chunks), get_stashes(self._chunks), self._ps.world.rank
        grown = [(budget.factor, budget.fixed_factor, budget.name, rank) for budget in get_grown_budgets(self._chunks)]
        factors = {budget.name: budget.factor for budget in budgets}
        full = [stash.sufficient_factor for stash in stashes if stash.has_overflowed and was_repeated]
        local = grown, factors, max(full, default=0.0)
        gathered = collectives.all_gather_object(local, self._ps.world) if self.may_lose_tokens else [local]
        grown = [each for of_rank, _, _ in gathered for each in of_rank]
        largest: dict[str, float] = {}
        for _, factors, _ in gathered:
            for name, factor in factors.items():
                largest[name] = max(factor, largest.get(name, factor))
        for budget in budgets:
            budget.adopt(largest[budget.name])
        stash_factor = max(factor for _, _, factor in gathered)
        for stash in stashes if stash_factor else ():
            stash.adopt(stash_factor)
        if not self.may_lose_tokens or not rank:
            _log_sufficient_factors(where, was_repeated, grown, max(largest.values(), default=0.0), stash_factor)
        return bool(grown)


def _log_sufficient_factors(
    where: str,
    was_repeated: bool,
    grown: Sequence[tuple[float, float, str, int]],
    largest: float,
    stash_factor: float,
) -> None:
    if stash_factor:
        logger.warning(
            f"{where}: the paged stash was full; nothing of it has taken effect, and it was repeated. "
            f"--moe-paged-stash-buffer-size-factor-cuda {stash_factor:g} would have been enough"
        )
    if grown:
        after, before, name, fullest = max(grown)
        layers, ranks = {name for _, _, name, _ in grown}, {rank for *_, rank in grown}
        outcome = (
            "nothing of it has taken effect, and it was repeated with larger ones"
            if was_repeated
            else "no token is lost"
        )
        logger.warning(
            f"{where}: experts received more tokens than their receive buffers hold; {outcome}. Buffers grew (layers: "
            f"{len(layers)}, ranks: {len(ranks)}): the factor of {name} on rank {fullest} grew from {before:g} to "
            f"{after:g}. --moe-expert-rank-capacity-factor {largest:g} would have been enough"
        )
