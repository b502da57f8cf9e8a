"""Deferred weight gradients (zero-bubble schedules, overlap with the all-to-all).

The previous layer needs the gradient of a linear's input, but nothing needs that of its weight before the end of the
iteration. A layer built with a queue defers the wgrad GEMM while the queue is active, and the schedule runs it where
the rank would otherwise wait.

A deferred function returns a gradient, or adds it to the main gradient by itself and returns None (ops/main_grad.py).

NOTE: torch also runs a parameter's post-accumulate hooks in the backward that defers its gradient, with `.grad` unset.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class _NoGradient(torch.autograd.Function):
    """A function of a parameter whose backward brings no gradient, but runs the parameter's hooks."""

    @staticmethod
    def forward(ctx: Any, param: Parameter) -> Tensor:
        return param.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class PendingGrads:
    """The deferred weight gradients of one backward pass, in its order."""

    def __init__(self) -> None:
        self.wgrad_fns: dict[Parameter, list[Callable[[], Tensor | None]]] = {}
        self.callbacks: list[Callable[[], None]] = []

    @torch.no_grad()
    def run(self) -> None:
        """Compute and accumulate every gradient, with one call of the hooks per parameter; then run the callbacks."""
        while self.wgrad_fns:
            param = next(iter(self.wgrad_fns))
            grads = [grad for compute in self.wgrad_fns.pop(param) if (grad := compute()) is not None]
            if grads:
                param.backward(gradient=functools.reduce(torch.add, grads).to(param.dtype))
            else:
                with torch.enable_grad():
                    _NoGradient.apply(param).backward()
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class WeightGradQueue:
    """Collects the weight gradients of one model chunk while `active`, for one backward pass (microbatch) at a time."""

    def __init__(self) -> None:
        self.active = False
        self._pending = PendingGrads()

    def defer(self, param: Parameter, compute: Callable[[], Tensor | None]) -> None:
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
