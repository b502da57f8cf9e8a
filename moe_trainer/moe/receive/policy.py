"""What the ways have in which the experts of a layer receive tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_trainer.memory.paged_stash import StashGroup
from moe_trainer.moe.dispatch.base import DispatchState, TokenDispatcher
from moe_trainer.moe.receive.budget import ReceiveBudget


class ReceivePolicy(ABC):
    """How the experts of a layer receive tokens: unless a way says otherwise, their counts are read on the host.

    Attributes:
        budgets: of received tokens; one if the buffers are not as long as what is received.
    """

    budgets: Sequence[ReceiveBudget] = ()

    def set_dispatcher(self, dispatcher: TokenDispatcher, experts: Any, device: torch.device) -> str | None:
        """Prepare for a dispatcher.

        Returns:
            Why token counts are on the host in spite of a budget; None if they need not be, or without a budget.
        """
        return None

    @property
    def has_device_counts(self) -> bool:
        """Whether token counts may stay on the device."""
        return False

    @property
    def counts_on_device(self) -> bool:
        """Whether token counts stay on the device now."""
        return False

    def fixed_buffer(self, num_tokens: int, experts: Any) -> tuple[int | None, int]:
        """Return the size of the fixed receive buffer and the padding of experts in it; None, 1 without one."""
        return None, 1

    @abstractmethod
    def run(
        self, experts: Any, state: DispatchState, num_tokens: int, weights: Any
    ) -> tuple[Tensor, StashGroup | None]:
        """Run the experts on the received tokens.

        Args:
            experts: the layer's Experts.
            state: output of dispatch_postprocess.
            num_tokens: number of local tokens, which this rank has routed.
            weights: placement.own.OwnWeights, the weights that the experts compute with.

        Returns:
            The results, and the group of join_stash.
        """
