"""The global auxiliary loss of a mapping with several data ranks, computed by one process.

Megatron-LM defines the loss of a microbatch by the running mean, over the microbatches so far in the iteration, of token counts summed
over the tensor, data and context ranks. One process runs the microbatches of all data ranks one after the other: `data_ranks` consecutive
ones share a microbatch number of the mapping. Their gradients all need the counts of all of them, so the process runs the forward passes
of such a group before the backward passes (`grouped_order`), and the gradients are filled in behind the last forward pass of the group.

The loss is computed from its definition here, and differentiated by autograd: nothing of it is shared with moe/balancing.py (of
FineRMoE's experts the choice is).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.balancing import LOSS_NAMES
from moe_trainer.moe.finermoe import choose_slices
from moe_trainer.moe.router import TopKRouter, as_map
from moe_trainer.pipeline.schedule import Work
from moe_trainer.run import Run
from moe_trainer.shape.timetable import BACKWARD, FORWARD, Action, Order

GLOBAL_LOSS = "global_load_balancing_loss"


def emulate_global_balance(run: Run, data_ranks: int) -> None:
    """Make one process compute the global auxiliary loss of `data_ranks` data ranks. Call it before the first step."""
    routers = [layer.router for chunk in run.chunks for layer in chunk.moe_layers() if layer.router.coefficients[GLOBAL_LOSS]]
    if not routers:
        return
    run.schedule.orders = lambda num_microbatches: [grouped_order(num_microbatches, data_ranks)]
    balances = [GlobalBalance(router, data_ranks, lambda: run.ps.trace.microbatch) for router in routers]
    for balance in balances:
        balance.router._losses = balance
    run_microbatches = run.schedule.run

    def begin_and_run(work: Work) -> list:
        for balance in balances:
            balance.begin()
        return run_microbatches(work)

    run.schedule.run = begin_and_run


def grouped_order(num_microbatches: int, size: int) -> Order:
    """The forward passes of `size` microbatches, then their backward passes, and so on."""
    groups = [range(start, min(start + size, num_microbatches)) for start in range(0, num_microbatches, size)]
    return tuple(Action(kind, 0, microbatch) for group in groups for kind in (FORWARD, BACKWARD) for microbatch in group)


class GlobalBalance:
    """Stands in for `TopKRouter._losses`: the router's other losses at once, the global one when all data ranks' counts are known."""

    def __init__(self, router: TopKRouter, data_ranks: int, microbatch: Callable[[], int | None]):
        """microbatch: number of the microbatch that is computed now."""
        self.router, self.data_ranks, self.microbatch = router, data_ranks, microbatch
        self._other_losses = router._losses
        self._waiting: dict[int | None, list[tuple[Tensor, Tensor]]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the counts of the iteration before."""
        self._sums_E, self._steps = torch.zeros(self.router.num_experts), 0

    def __call__(self, logits_TE: Tensor, shape: Sequence[int], routing_TE: Tensor | None) -> Tensor:
        """Return the gradient of all losses; that of the global one is added to it later, in place."""
        grad_TE = self._others(logits_TE, shape, routing_TE)
        calls = self._waiting.setdefault(self.microbatch(), [])
        calls.append((logits_TE, grad_TE))
        # a layer that serves several depths of multi-token prediction is called several times per microbatch
        if len(self._waiting) == self.data_ranks and len(calls) == len(next(iter(self._waiting.values()))):
            for together in zip(*self._waiting.values(), strict=True):
                self._add(together)
            self._waiting.clear()
        return grad_TE

    def _others(self, logits_TE: Tensor, shape: Sequence[int], routing_TE: Tensor | None) -> Tensor:
        router, coefficients = self.router, self.router.coefficients
        router.coefficients = others = {**coefficients, GLOBAL_LOSS: 0.0}
        try:
            if any(others.values()) or router.moe.moe_z_loss_coeff is not None:
                return self._other_losses(logits_TE, shape, routing_TE)
        finally:
            router.coefficients = coefficients
        return torch.zeros_like(logits_TE, dtype=torch.promote_types(logits_TE.dtype, torch.float32))

    def _add(self, together: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the loss of one microbatch number: value and gradient for each data rank."""
        router = self.router
        with torch.no_grad():
            self._sums_E = self._sums_E + sum(self._counts(logits_TE.to(grad_TE.dtype)) for logits_TE, grad_TE in together)
        self._steps += 1
        for logits_TE, grad_TE in together:
            with torch.enable_grad():
                leaf_TE = logits_TE.detach().to(grad_TE.dtype).requires_grad_()
                tokens = len(leaf_TE) * self.data_ranks
                mean_E = (self._sums_E / self._steps).to(leaf_TE.dtype)
                loss = router.num_experts / (router.topk * tokens**2) * (self._scores(leaf_TE).sum(0) * mean_E).sum()
                (slope_TE,) = torch.autograd.grad(loss, leaf_TE)
            grad_TE += slope_TE * (router.coefficients[GLOBAL_LOSS] * (len(leaf_TE) if router.per_token_loss else 1))
            # ranks add up their shares; the one process takes the mean over as many microbatches as there are shares
            router.loss_sums[LOSS_NAMES.index(GLOBAL_LOSS)] += loss.detach() * self.data_ranks

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Scores of which those of a token sum to one."""
        kind = self.router.moe.moe_router_score_function
        if kind == "softmax":
            return logits_TE.softmax(-1)
        scores_TE = logits_TE.sigmoid() if kind == "sigmoid" else F.softplus(logits_TE).sqrt()
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)

    def _counts(self, logits_TE: Tensor) -> Tensor:
        """Tokens of every expert by the plain top-k of the scores [E]."""
        router = self.router
        if router.grid is not None:
            return as_map(choose_slices(logits_TE, grid=router.grid, topk=router.topk), logits_TE).sum(0).float()
        return torch.bincount(self._scores(logits_TE).topk(router.topk)[1].flatten(), minlength=router.num_experts).float()
