"""Alternating execution of the forward of one microbatch and the backward of another, in two threads.

A pass that has started an all-to-all yields to the other one, which computes while the tokens are exchanged. Only one
thread runs at a time, and they switch at yield points only. So all ranks execute the same sequence of computations and
collectives whatever their timing, the passes may share groups, and results equal those of sequential execution.

`yield_point` is an identity in the autograd graph that yields in forward and in backward. In backward it also computes
deferred weight gradients (weight_grads.py) during the exchange.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_trainer.parallel.weight_grads import WeightGradQueue

FORWARD, BACKWARD = 0, 1


class _StoppedError(RuntimeError):
    """Stops a pass because the other one failed."""


class PassState(Protocol):
    """State that each pass must have for itself (parallel/fsdp_overlap.py)."""

    def begin(self) -> None:
        """Keep the current state for the running pass and create a new one for the other."""

    def switch(self) -> None:
        """Save the current state and restore that of the other pass."""

    def end(self) -> None:
        """Discard the state of the other pass."""


class AlternatingExecutor:
    """Runs two passes in turn. Outside `run`, yielding does nothing."""

    def __init__(self) -> None:
        self.pass_state: PassState | None = None
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [True, True]
        self._failed = False

    def run(self, forward: Callable[[], Any], backward: Callable[[], Any], executor: Executor) -> None:
        """Run both passes, starting with `backward` in this thread; `forward` runs in a thread of the executor.

        If one raises, the other is stopped at its next turn.
        """
        assert all(self._ended), "the executor is already running"
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended, self._failed = [False, False], False
        if self.pass_state is not None:
            self.pass_state.begin()
        future = executor.submit(self._run_forward, forward)
        backward_error: BaseException | None = None
        try:
            backward()
        except BaseException as exc:  # noqa: BLE001 - raised below, once the other pass has ended
            backward_error, self._failed = exc, True
        self._end(BACKWARD)
        forward_error = future.exception()  # waits for its end
        if self.pass_state is not None:
            self.pass_state.end()
        for error in (backward_error, forward_error):
            if error is not None and not isinstance(error, _StoppedError):
                raise error

    def _run_forward(self, forward: Callable[[], Any]) -> None:
        self._turns[FORWARD].acquire()
        try:
            if not self._failed:
                forward()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._end(FORWARD)

    def _end(self, side: int) -> None:
        self._ended[side] = True
        self._wake(1 - side)

    def _wake(self, side: int) -> None:
        if self.pass_state is not None and not self._ended[side]:
            self.pass_state.switch()
        self._turns[side].release()

    def yield_turn(self, side: int) -> None:
        """Let the other pass run until it yields or ends."""
        if self._ended[1 - side] or self._ended[side]:
            return
        self._wake(1 - side)
        self._turns[side].acquire()
        if self._failed:
            raise _StoppedError("the pass of the other microbatch failed")


class _YieldPoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, overlap_executor, queue, *tensors):
        ctx.overlap_executor, ctx.queue = overlap_executor, queue
        overlap_executor.yield_turn(FORWARD)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.overlap_executor.yield_turn(BACKWARD)
        if ctx.queue is not None and ctx.queue.active:
            ctx.queue.run()
        return None, None, *grads


def yield_point(
    overlap_executor: AlternatingExecutor | None, queue: WeightGradQueue | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return the tensors; yield to the other pass in forward and in backward, and run an active queue in backward."""
    return tensors if overlap_executor is None else _YieldPoint.apply(overlap_executor, queue, *tensors)
