"""The schedule of one stage: every micro-batch forward and backward, one after the other."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def run_microbatches(forward_step: Callable[[], tuple[Tensor, Result]], num_microbatches: int, *,
                     grad_scale: float | Tensor = 1.0,
                     accumulate: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
                     timer: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext()) -> list[Result]:
    """Accumulate the gradients of an iteration's micro-batches.

    forward_step: computes the next micro-batch; returns its scalar loss and whatever the caller wants back.
    grad_scale: factor of each loss in the gradient (loss_scale / num_microbatches, or loss_scale per token).
    accumulate: context under which backward must not reduce; all micro-batches but the last run inside.
    Returns: the second value of every forward_step, in order. It should not hold on to the graph.
    """
    assert num_microbatches >= 1, f"num_microbatches {num_microbatches}"
    results = []
    for index in range(num_microbatches):
        last = index == num_microbatches - 1
        with contextlib.nullcontext() if last else accumulate():
            with timer("forward-compute"):
                loss, result = forward_step()
            with timer("backward-compute"):
                loss.backward(gradient=torch.as_tensor(grad_scale, dtype=loss.dtype, device=loss.device))
        del loss
        results.append(result)
    return results
