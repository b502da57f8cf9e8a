"""All microbatches of an iteration, forward, backward and reduction, as one CUDA graph (full_iteration).

Communication that is launched during the capture is captured: messages between pipeline stages, exchanges of tokens,
keys and values, reductions of gradients and gathers of parameters that overlap the computation. All of it is waited
for inside. Batches and the factor of the gradients are copied to their addresses at capture; losses and gradients are
read from theirs. There is one graph, for one number of microbatches: when the batch size grows, or buffers of experts
grow, a new graph replaces it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_trainer.memory.graph_capture import CapturedGraph, Scope, join_tensors, split_tensors

logger = logging.getLogger(__name__)


class IterationGraph:
    """The captured iteration."""

    def __init__(self, warmup: int, generators: Sequence[torch.Generator] = (), scopes: Sequence[Scope] = ()):
        """Create it without a graph.

        Args:
            warmup: iterations before the first capture, at least one.
            generators: generators that an iteration draws from, in addition to the device's default one.
            scopes: contexts of the capture, see CapturedGraph.
        """
        self._scopes = tuple(scopes)
        self._generators = tuple(generators)
        self._eager_iterations, self._iterations = max(1, warmup), 0
        self._key: Any = None
        self._graph: CapturedGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._result: Any = None

    def begin_iteration(self, eager: bool) -> bool:
        """Count the next iteration; return whether it uses a graph. With `eager` it does not."""
        self._iterations += 1
        return not eager and self._iterations > self._eager_iterations

    def drop(self) -> None:
        """Drop the graph and its memory; the next iteration that uses one captures it again."""
        self._graph = self._result = self._key = None
        self._inputs = []

    def run(self, key: Any, inputs: Any, fn: Callable[[Any], Any], after_replay: Callable[[], None]) -> Any:
        """Run fn(inputs), captured once for each key.

        Args:
            key: identifies the graph, not None; a new key replaces it.
            inputs: nested value with tensors.
            fn: the iteration.
            after_replay: sets the Python state that fn leaves, which a replay does not.

        Returns:
            The result of fn; its tensors are overwritten by the next run.
        """
        tensors, template = split_tensors(inputs)
        if key != self._key:
            self._capture(key, template, tensors, fn)
            return self._result
        for captured, x in zip(self._inputs, tensors):
            captured.copy_(x)
        self._graph.replay()
        after_replay()
        return self._result

    def _capture(self, key: Any, template: Any, tensors: list[torch.Tensor], fn: Callable[[Any], Any]) -> None:
        self.drop()  # frees its memory before the next capture
        self._inputs = [x.clone() for x in tensors]
        self._graph = CapturedGraph(torch.cuda.graph_pool_handle(), self._generators, self._scopes)
        self._result = self._graph.capture(lambda: fn(join_tensors(template, self._inputs)))
        self._key = key
        logger.info("captured a CUDA graph of the full iteration (%s microbatches)", key)
