"""Weight gradients that may wait: computed when the schedule says so, instead of inside backward.

Backward of a linear layer makes two products: the gradient of its input, which the previous layer waits for, and that of
its weight, which nobody waits for until the end of the iteration. A layer built with a queue hands the second one over
while the queue is active; the schedule runs it where the rank would otherwise idle (zero bubble, exchange of tokens).

NOTE: torch runs a parameter's post-accumulate hooks in the pass that put its gradient off, too, with `.grad` still unset.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class PendingGrads:
    """The deferred gradients of one backward pass, in the order in which that pass reached them."""

    def __init__(self) -> None:
        self.parts: dict[Parameter, list[Callable[[], Tensor]]] = {}
        self.afterwards: list[Callable[[], None]] = []  # called once by `run`, when every gradient is there

    @torch.no_grad()
    def run(self) -> None:
        """Compute every gradient and feed it to its parameter as autograd would: `.grad`, then the hooks, once per
        parameter. What is computed is forgotten; a second call does nothing."""
        while self.parts:
            param = next(iter(self.parts))
            computes = self.parts.pop(param)
            grad = computes.pop(0)()
            for compute in computes:
                grad = grad + compute()
            param.backward(gradient=grad.to(param.dtype))
        calls, self.afterwards = self.afterwards, []
        for call in calls:
            call()


class WeightGradQueue:
    """Where the layers of one model chunk put their weight gradients while `active`.

    One backward pass (one microbatch) at a time: `take` what it left before the next one begins, or `run` it.
    """

    def __init__(self) -> None:
        self.active = False
        self._pending = PendingGrads()

    def defer(self, param: Parameter, compute: Callable[[], Tensor]) -> None:
        """Keep `compute`, which returns the gradient of `param` in its shape, for later."""
        assert self.active, "gradients are deferred only while the queue is active"
        self._pending.parts.setdefault(param, []).append(compute)

    def run_after_pending(self, params: Iterable[Parameter], call: Callable[[], None]) -> bool:
        """Call `call` once everything that waits is computed, if a gradient of one of these parameters is part of it.

        Returns: whether one is; if not, nothing is called.
        """
        waits = any(param in self._pending.parts for param in params)
        if waits:
            self._pending.afterwards.append(call)
        return waits

    def take(self) -> PendingGrads:
        """What was deferred since the last call; the caller runs it."""
        taken, self._pending = self._pending, PendingGrads()
        return taken

    def run(self) -> None:
        """Compute everything that waits."""
        self.take().run()
