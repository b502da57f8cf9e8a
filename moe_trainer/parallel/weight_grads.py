"""Deferred weight gradients (zero-bubble schedules, overlap with the all-to-all).

The previous layer needs the gradient of a linear's input, but nothing needs that of its weight before the end of the
iteration. A layer built with a queue defers the wgrad GEMM while the queue is active, and the schedule runs it where
the rank would otherwise wait.

NOTE: torch also runs a parameter's post-accumulate hooks in the backward that defers its gradient, with `.grad` unset.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class PendingGrads:
    """The deferred weight gradients of one backward pass, in its order."""

    def __init__(self) -> None:
        self.wgrad_fns: dict[Parameter, list[Callable[[], Tensor]]] = {}
        self.callbacks: list[Callable[[], None]] = []

    @torch.no_grad()
    def run(self) -> None:
        """Compute and accumulate every gradient, with one call of the hooks per parameter; then run the callbacks."""
        while self.wgrad_fns:
            param = next(iter(self.wgrad_fns))
            first, *others = self.wgrad_fns.pop(param)
            grad = first()
            for wgrad_fn in others:
                grad = grad + wgrad_fn()
            param.backward(gradient=grad.to(param.dtype))
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class WeightGradQueue:
    """Collects the weight gradients of one model chunk while `active`, for one backward pass (microbatch) at a time."""

    def __init__(self) -> None:
        self.active = False
        self._pending = PendingGrads()

    def defer(self, param: Parameter, compute: Callable[[], Tensor]) -> None:
        assert self.active, "gradients are deferred only while the queue is active"
        self._pending.wgrad_fns.setdefault(param, []).append(compute)

    def run_after_pending(self, params: Iterable[Parameter], callback: Callable[[], None]) -> bool:
        """Run a callback after all pending gradients, if one of `params` has one; otherwise return False."""
        is_pending = any(param in self._pending.wgrad_fns for param in params)
        if is_pending:
            self._pending.callbacks.append(callback)
        return is_pending

    def take(self) -> PendingGrads:
        """Return the gradients deferred since the last call; the caller runs them."""
        pending, self._pending = self._pending, PendingGrads()
        return pending

    def run(self) -> None:
        self.take().run()
