"""Global auxiliary loss of a mapping with several data ranks, computed by one process.

Definition (arXiv 2501.11873, section 3): E * sum_e f_e * P_e. f_e is the frequency of expert e among all choices of the
iteration so far, on all ranks, and P_e its mean probability over the tokens of the microbatch, on all ranks. In the
gradient every data rank has the same part of the sum over tokens, as in Megatron-LM. One process runs the microbatches
of all data ranks one after the other; those that the mapping runs at once are a group. Their gradients need the choices
of all of them, so the process runs the forward passes of a group before the backward passes (`grouped_order`) and adds
the gradients after the last forward pass of the group.

The loss is computed from its definition and differentiated by autograd. It shares nothing with moe/balancing.py (except
the choice of selections that count it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_trainer.moe.balancing import LOSS_NAMES
from moe_trainer.moe.router import TopKRouter
from moe_trainer.moe.selections.selection import Choice
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.pipeline.schedule import ScheduleInputs
from moe_trainer.pipeline.simulate import BACKWARD, FORWARD, Action
from moe_trainer.training.run import TrainRun

GLOBAL_LOSS = "global_load_balancing_loss"
Shares = Sequence[Sequence[int]]
"""By group of microbatches that run at once, the number of data and context ranks that share each; 1 for all, if they
share all alike."""


def emulate_global_balance(run: TrainRun, steps: Iterator[Shares]) -> None:
    """Make one process compute the global auxiliary loss of several data ranks. Call it before the first step.

    Args:
        run: of the one process.
        steps: yields the groups of every step, and of the validation after them.
    """
    routers = [
        layer.router for chunk in run.chunks for layer in chunk.moe_layers() if layer.router.coefficients[GLOBAL_LOSS]
    ]
    if not routers:
        return
    balances = [GlobalBalance(router, lambda: run.ps.trace.microbatch) for router in routers]
    for balance in balances:
        vars(balance.router).update(_losses=balance)
    schedule, run_microbatches = run.schedule, run.schedule.run

    def reset_and_run(work: ScheduleInputs) -> list:
        groups = next(steps)
        order = grouped_order(list(map(len, groups)))
        vars(schedule).update(
            program=lambda _, forward_only: [each for each in order if not forward_only or each.kind == FORWARD]
        )
        for balance in balances:
            balance.reset(groups)
        return run_microbatches(work)

    vars(schedule).update(run=reset_and_run)


def grouped_order(sizes: Sequence[int]) -> tuple[Action, ...]:
    """Return an order with the forward passes of a group of microbatches, then their backward passes, and so on."""
    numbers = iter(range(sum(sizes)))
    groups = [[next(numbers) for _ in range(size)] for size in sizes]
    return tuple(Action(kind, 0, number) for group in groups for kind in (FORWARD, BACKWARD) for number in group)


class GlobalBalance:
    """Replacement of a router's losses that adds the global one when the choices of a whole group are known."""

    def __init__(self, router: TopKRouter, microbatch: Callable[[], int | None]):
        self.router, self.microbatch = router, microbatch
        self._other_losses = router._losses
        self._pending: dict[int, list[tuple[Tensor, Tensor, Tensor | slice]]] = {}
        self.reset([])

    def reset(self, groups: Shares) -> None:
        """Discard the choices of the previous iteration; `groups` are those of the next one."""
        self._choices_E = torch.zeros(len(self.router.weight), dtype=torch.float64)
        self._shares = [shares for shares in groups for _ in shares]  # by microbatch
        self._mean_size = len(self._shares) / max(1, len(groups))

    def __call__(
        self, logits_TE: Tensor, shape: torch.Size, choice: Choice | None, valid: ValidTokens | None = None
    ) -> Tensor:
        """Return the gradient of all losses; that of the global loss is added later, in place."""
        grad_TE = self._others(logits_TE, shape, choice, valid)
        counted_T = slice(None) if valid is None else valid.mask_T
        number = self.microbatch()
        assert number is not None, "routers run inside a microbatch"
        shares, calls = self._shares[number - 1], self._pending.setdefault(number, [])
        calls.append((logits_TE, grad_TE, counted_T))
        # a layer shared by several depths of multi-token prediction is called several times per microbatch
        if len(self._pending) == len(shares) and len(calls) == len(next(iter(self._pending.values()))):
            for group in zip(*self._pending.values(), strict=True):
                self._add_global_loss(group, shares)
            self._pending.clear()
        return grad_TE

    def _others(self, logits_TE: Tensor, shape: torch.Size, choice: Choice | None, valid: ValidTokens | None) -> Tensor:
        router, settings = self.router, self.router.loss_settings
        others = {**settings.coefficients, GLOBAL_LOSS: 0.0}
        router.loss_settings = replace(settings, coefficients=others)
        try:
            if any(others.values()) or router.moe.moe_z_loss_coeff is not None:
                return self._other_losses(logits_TE, shape, choice, valid)
        finally:
            router.loss_settings = settings
        return torch.zeros_like(logits_TE, dtype=torch.promote_types(logits_TE.dtype, torch.float32))

    def _add_global_loss(self, group: Sequence[tuple[Tensor, Tensor, Tensor | slice]], shares: Sequence[int]) -> None:
        """Add the loss of one group: value and gradient for each of its microbatches.

        The third element is which tokens of a microbatch are no padding.
        """
        router = self.router
        counted = [logits_TE[counted_T].to(grad_TE.dtype) for logits_TE, grad_TE, counted_T in group]
        tokens, ranks = sum(map(len, counted)), sum(shares)
        with torch.no_grad():
            self._choices_E += sum(map(self._counts, counted))
        for logits_TE, (_, grad_TE, counted_T), share in zip(counted, group, shares):
            with torch.enable_grad():
                leaf_TE = logits_TE.detach().requires_grad_()
                frequency_E = (self._choices_E / self._choices_E.sum()).to(leaf_TE.dtype)
                loss = leaf_TE.shape[1] * (frequency_E * self._scores(leaf_TE).sum(0) / tokens).sum()
                (slope_TE,) = torch.autograd.grad(loss, leaf_TE)
            grad_TE[counted_T] += slope_TE * (
                router.coefficients[GLOBAL_LOSS]
                * (tokens * share / ranks if router.loss_settings.per_token_loss else 1)
            )
            # ranks sum their shares, but the one process averages over as many microbatches
            router.get_buffer("loss_sums")[LOSS_NAMES.index(GLOBAL_LOSS)] += loss.detach() * self._mean_size

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
        counted_TE = router.selection.counted(logits_TE, None) if router.selection.has_own_counts else None
        if counted_TE is not None:
            return counted_TE.sum(0).float()
        experts_TK = self._scores(logits_TE).topk(router.topk)[1]
        return torch.bincount(experts_TK.flatten(), minlength=logits_TE.shape[1]).float()
