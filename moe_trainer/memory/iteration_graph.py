"""The microbatches of an iteration, forward and backward, as one CUDA graph (--cuda-graph-impl full_iteration).

Batches and the factor of the gradients are copied to where they were at capture; losses and gradients are read where they were then.
There is one graph, for one number of microbatches: where the batch grows, the next one replaces it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_trainer.memory.graph_capture import Graph, put_together, take_apart

logger = logging.getLogger(__name__)


class IterationGraph:
    """warmup: iterations before the first capture, at least one. generators: that an iteration draws from, besides the device's own one."""

    def __init__(self, warmup: int, generators: Sequence[torch.Generator] = ()):
        self._generators = tuple(generators)
        self._eager_iterations, self._iterations = max(1, warmup), 0
        self._key: Any = None
        self._graph: Graph | None = None
        self._inputs: list[torch.Tensor] = []
        self._result: Any = None
        self._state: Any = None

    def begins(self, eager: bool) -> bool:
        """The next iteration begins. eager: it runs without a graph. Returns: does it use one?"""
        self._iterations += 1
        return not eager and self._iterations > self._eager_iterations

    def run(self, key: Any, inputs: Any, fn: Callable[[Any], Any], state: Callable[[], Any], restore: Callable[[Any], None]) -> Any:
        """fn(inputs), captured once for a key. inputs: a record of tensors. state: what Python remembers of a run, `restore` that it had run.

        Returns: what fn returned; its tensors hold what this run gave, until the next.
        """
        tensors: list[torch.Tensor] = []
        shape = take_apart(inputs, tensors)
        if key != self._key:
            self._capture(key, shape, tensors, fn)
            self._state = state()
            return self._result
        for place, x in zip(self._inputs, tensors):
            place.copy_(x)
        self._graph.replay()
        restore(self._state)
        return self._result

    def _capture(self, key: Any, shape: Any, tensors: list[torch.Tensor], fn: Callable[[Any], Any]) -> None:
        self._graph = self._result = self._state = None  # its memory is free before the next one takes any
        self._inputs = [x.clone() for x in tensors]
        self._graph = Graph(torch.cuda.graph_pool_handle(), self._generators)
        self._result = self._graph.capture(lambda: fn(put_together(shape, iter(self._inputs))))
        self._key = key
        logger.info("CUDA graph of the whole iteration (%s microbatches)", key)
