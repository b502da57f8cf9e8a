"""Two passes that take turns: forward of one microbatch and backward of another, in two threads, one of them running at a time.

While the rows of one pass are under way between ranks the other one computes. Where a pass has started an exchange and would
wait for it, it passes the overlap_executor; it gets it back when the other one has started an exchange in turn, or has ended. Nothing
else switches between the two, so every rank goes through the same sequence of computations and collectives, whatever its timing:
the passes may use the same groups, and results are those of running one after the other.

`yield_point` is that place in the program, as an identity in the autograd graph: its forward passes the overlap_executor of the forward pass, its
backward that of the backward pass. It is also where weight gradients that were put off (weight_grads.py) are computed, beside an
exchange of backward.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_trainer.parallel.weight_grads import WeightGradQueue

FORWARD, BACKWARD = 0, 1


class _Stopped(RuntimeError):
    """This pass ends because the other one failed."""


class PassState(Protocol):
    """State of the program that belongs to a pass, not to the rank."""

    def begin(self) -> None:
        """Two passes begin: the one that runs keeps the present state, the other one starts with a new one."""

    def switch(self) -> None:
        """The other pass goes on: exchange its state and the present one."""

    def end(self) -> None:
        """Both have ended."""


class AlternatingExecutor:
    """What the two passes of a rank share. Outside `run` passing it does nothing.

    pass_state: what changes hands with it (parallel/fsdp_overlap.py), if anything does.
    """

    def __init__(self) -> None:
        self.pass_state: PassState | None = None
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [True, True]
        self._failed = False

    def run(self, forward: Callable[[], Any], backward: Callable[[], Any], executor: Executor) -> None:
        """Run both to their ends, `backward` first and in this thread, `forward` in one of the executor's.

        Raises: what one of them raised; the other one is stopped at its next turn.
        """
        assert all(self._ended), "the overlap_executor is in use"
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended, self._failed = [False, False], False
        if self.pass_state is not None:
            self.pass_state.begin()
        other = executor.submit(self._follow, forward)
        mine: BaseException | None = None
        try:
            backward()
        except BaseException as error:  # noqa: BLE001 - raised again below, once the other side has ended
            mine, self._failed = error, True
        self._end(BACKWARD)
        theirs = other.exception()  # waits for its end
        if self.pass_state is not None:
            self.pass_state.end()
        for error in (mine, theirs):
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _follow(self, forward: Callable[[], Any]) -> None:
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
        """Let the other pass run until it passes the overlap_executor or ends."""
        if self._ended[1 - side] or self._ended[side]:
            return
        self._wake(1 - side)
        self._turns[side].acquire()
        if self._failed:
            raise _Stopped("the pass of the other microbatch failed")


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
    """Return the tensors, which are under way. In forward and again in backward the other pass may run here.

    queue: whose gradients are computed here in backward, if it is active.
    """
    return tensors if overlap_executor is None else _YieldPoint.apply(overlap_executor, queue, *tensors)
