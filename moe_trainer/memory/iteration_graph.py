"""All microbatches of an iteration, forward, backward and reduction, as one CUDA graph (full_iteration).

Communication that is launched during the capture is captured: messages between pipeline stages, exchanges of tokens,
keys and values, reductions of gradients and gathers of parameters that overlap the computation. All of it is waited
for inside. Batches and the factor of the gradients are copied to their addresses at capture; losses and gradients are
read from theirs. A graph is for one number of microbatches. That number varies with packed sequences and when the batch
size grows, so the graphs of the last few numbers are kept. They run one after the other and share a memory pool, which
is as large as the largest needs. When buffers of experts grow, all graphs are dropped.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moe_trainer.memory.graph_capture import CapturedGraph, Scope, join_tensors, split_tensors

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GRAPHS = 16
"""Numbers of microbatches whose graphs are kept."""


@dataclass(frozen=True)
class _Captured:
    """A captured iteration, with the inputs that it reads, the result that it writes and the state that it leaves."""

    graph: CapturedGraph
    inputs: list[torch.Tensor]
    result: Any
    state: Any


class IterationGraph:
    """The captured iterations."""

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
        self._graphs: dict[Any, _Captured] = {}
        self._pool: Any = None

    def begin_iteration(self, eager: bool) -> bool:
        """Count the next iteration; return whether it uses a graph. With `eager` it does not."""
        self._iterations += 1
        return not eager and self._iterations > self._eager_iterations

    def drop(self) -> None:
        """Drop all graphs and their memory; the next iteration that uses one captures it again."""
        self._graphs.clear()
        self._pool = None

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def run(
        self,
        key: Any,
        inputs: Any,
        fn: Callable[[Any], Any],
        after_capture: Callable[[], T],
        after_replay: Callable[[T], None],
    ) -> Any:
        """Run fn(inputs), captured once for each key.

        Args:
            key: identifies the graph.
            inputs: nested value with tensors.
            fn: the iteration.
            after_capture: returns the Python state that fn leaves.
            after_replay: restores it, since a replay does not.

        Returns:
            The result of fn; its tensors are overwritten by the next run.
        """
        tensors, template = split_tensors(inputs)
        if key not in self._graphs:
            captured = self._capture(key, template, tensors, fn, after_capture)
        else:
            captured = self._graphs.pop(key)
            for own, x in zip(captured.inputs, tensors):
                own.copy_(x)
            captured.graph.replay()
            after_replay(captured.state)
        self._graphs[key] = captured  # the last one
        return captured.result

    def _capture(
        self,
        key: Any,
        template: Any,
        tensors: list[torch.Tensor],
        fn: Callable[[Any], Any],
        after_capture: Callable[[], Any],
    ) -> _Captured:
        if len(self._graphs) == MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        inputs = [x.clone() for x in tensors]
        graph = CapturedGraph(self._pool, self._generators, self._scopes)
        result = graph.capture(lambda: fn(join_tensors(template, inputs)))
        logger.info("captured a CUDA graph of the full iteration (%s microbatches)", key)
        return _Captured(graph, inputs, result, after_capture())
