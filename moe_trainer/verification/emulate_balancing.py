"""Global auxiliary loss of a mapping with several data ranks, computed by one process.

Megatron-LM defines the loss of a microbatch by the running mean, over the microbatches so far in the iteration, of
token counts summed over tensor, context and data ranks. One process runs the microbatches of all data ranks one after
the other, and `num_data_ranks` consecutive ones have the same microbatch index in the mapping. Their gradients need
the counts of all of them, so the process runs the forward passes of such a group before the backward passes
(`grouped_order`) and adds the gradients after the last forward pass of the group.

The loss is computed from its definition and differentiated by autograd. It shares nothing with moe/balancing.py (except
the choice of FineRMoE's experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.balancing import LOSS_NAMES
from moe_trainer.moe.finermoe import choose_slices
from moe_trainer.moe.router import TopKRouter
from moe_trainer.moe.topk import to_routing_map
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.pipeline.schedule import ScheduleInputs
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, Action, Order
from moe_trainer.training.context import TrainContext

GLOBAL_LOSS = "global_load_balancing_loss"


def emulate_global_balance(run: TrainContext, num_data_ranks: int) -> None:
    """Make one process compute the global auxiliary loss of several data ranks. Call it before the first step."""
    routers = [
        layer.router for chunk in run.chunks for layer in chunk.moe_layers() if layer.router.coefficients[GLOBAL_LOSS]
    ]
    if not routers:
        return
    run.schedule.orders = lambda num_microbatches: [grouped_order(num_microbatches, num_data_ranks)]
    balances = [GlobalBalance(router, num_data_ranks, lambda: run.ps.trace.microbatch) for router in routers]
    for balance in balances:
        balance.router._losses = balance
    run_microbatches = run.schedule.run

    def reset_and_run(work: ScheduleInputs) -> list:
        for balance in balances:
            balance.reset()
        return run_microbatches(work)

    run.schedule.run = reset_and_run


def grouped_order(num_microbatches: int, size: int) -> Order:
    """Return an order with the forward passes of `size` microbatches, then their backward passes, and so on."""
    groups = [range(start, min(start + size, num_microbatches)) for start in range(0, num_microbatches, size)]
    return tuple(Action(kind, 0, number) for group in groups for kind in (FORWARD, BACKWARD) for number in group)


class GlobalBalance:
    """Replacement of a router's losses that adds the global one when the counts of all data ranks are known."""

    def __init__(self, router: TopKRouter, num_data_ranks: int, microbatch: Callable[[], int | None]):
        self.router, self.num_data_ranks, self.microbatch = router, num_data_ranks, microbatch
        self._other_losses = router._losses
        self._pending: dict[int | None, list[tuple[Tensor, Tensor, Tensor | slice]]] = {}
        self.reset()

    def reset(self) -> None:
        """Discard the counts of the previous iteration."""
        self._sums_E, self._steps = torch.zeros(self.router.num_experts), 0

    def __call__(
        self, logits_TE: Tensor, shape: Sequence[int], routing_TE: Tensor | None, valid: ValidTokens | None = None
    ) -> Tensor:
        """Return the gradient of all losses; that of the global loss is added later, in place."""
        grad_TE = self._others(logits_TE, shape, routing_TE, valid)
        counted_T = slice(None) if valid is None else valid.mask_T
        calls = self._pending.setdefault(self.microbatch(), [])
        calls.append((logits_TE, grad_TE, counted_T))
        # a layer shared by several depths of multi-token prediction is called several times per microbatch
        if len(self._pending) == self.num_data_ranks and len(calls) == len(next(iter(self._pending.values()))):
            for group in zip(*self._pending.values(), strict=True):
                self._add_global_loss(group)
            self._pending.clear()
        return grad_TE

    def _others(
        self, logits_TE: Tensor, shape: Sequence[int], routing_TE: Tensor | None, valid: ValidTokens | None
    ) -> Tensor:
        router, coefficients = self.router, self.router.coefficients
        router.coefficients = others = {**coefficients, GLOBAL_LOSS: 0.0}
        try:
            if any(others.values()) or router.moe.moe_z_loss_coeff is not None:
                return self._other_losses(logits_TE, shape, routing_TE, valid)
        finally:
            router.coefficients = coefficients
        return torch.zeros_like(logits_TE, dtype=torch.promote_types(logits_TE.dtype, torch.float32))

    def _add_global_loss(self, group: Sequence[tuple[Tensor, Tensor, Tensor | slice]]) -> None:
        """Add the loss of one microbatch index: value and gradient for each data rank.

        The third element is which tokens of a data rank are no padding.
        """
        router = self.router
        counted = [logits_TE[counted_T].to(grad_TE.dtype) for logits_TE, grad_TE, counted_T in group]
        tokens = sum(map(len, counted))
        with torch.no_grad():
            self._sums_E = self._sums_E + sum(map(self._counts, counted))
        self._steps += 1
        for logits_TE, (_, grad_TE, counted_T) in zip(counted, group):
            with torch.enable_grad():
                leaf_TE = logits_TE.detach().requires_grad_()
                mean_E = (self._sums_E / self._steps).to(leaf_TE.dtype)
                loss = router.num_experts / (router.topk * tokens**2) * (self._scores(leaf_TE).sum(0) * mean_E).sum()
                (slope_TE,) = torch.autograd.grad(loss, leaf_TE)
            grad_TE[counted_T] += slope_TE * (
                router.coefficients[GLOBAL_LOSS] * (len(leaf_TE) if router.per_token_loss else 1)
            )
            # ranks sum their shares, but the one process averages over as many microbatches
            router.loss_sums[LOSS_NAMES.index(GLOBAL_LOSS)] += loss.detach() * self.num_data_ranks

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores, which sum to one for each token."""
        kind = self.router.moe.moe_router_score_function
        if kind == "softmax":
            return logits_TE.softmax(-1)
        scores_TE = logits_TE.sigmoid() if kind == "sigmoid" else F.softplus(logits_TE).sqrt()
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)

    def _counts(self, logits_TE: Tensor) -> Tensor:
        """Return the number of tokens of every expert [E], by the top-k of the scores."""
        router = self.router
        if router.grid is not None:
            experts_TK = choose_slices(logits_TE, grid=router.grid, topk=router.topk)
            return to_routing_map(experts_TK, logits_TE).sum(0).float()
        experts_TK = self._scores(logits_TE).topk(router.topk)[1]
        return torch.bincount(experts_TK.flatten(), minlength=router.num_experts).float()
