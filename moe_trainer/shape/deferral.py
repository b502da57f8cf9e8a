"""Which weight gradients wait (parallel/weight_grads.py), as far as flags tell: for the model, which needs queues, and the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments.parallel import ParallelArgs


def beside_exchange(parallel: ParallelArgs) -> bool:
    """Are all weight gradients computed where tokens are exchanged in backward?"""
    return parallel.delay_wgrad_compute or parallel.overlap_dispatch_backward_with_experts_wgrad


def of_all_layers(parallel: ParallelArgs) -> bool:
    """Do the weight gradients of all layers wait, instead of being part of backward?"""
    return parallel.pipeline_schedule == "zero-bubble" or beside_exchange(parallel)


def of_the_head(parallel: ParallelArgs) -> bool:
    """Does that of the output layer alone wait?"""
    return parallel.defer_embedding_wgrad_compute and not of_all_layers(parallel)
