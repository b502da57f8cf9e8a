"""CUDA graphs of parts of layers (--cuda-graph-impl local); a model chunk names its parts, selected ones are replayed.

    y = graphs.run("attn", fn, modules, x)      fn(x); captured once, then replayed

`fn` may return tensors, or containers and dataclasses of them. To autograd a captured part is one node whose backward
replays a second graph for the gradients of inputs and parameters. Hooks on parameters (main gradients, overlapped
reductions) run after that node, outside the graph; hooks before a module's forward (parameter gathers) run before a
replay.

A microbatch's tensors must survive from its forward to its backward, and a graph has one set of them. So every pass
in flight has a set of graphs, a `_Slot`: one for each part that it calls, forward and backward. A pass takes the
first free slot, and the graphs of a new slot are captured where they first run. A slot is free when its backward has
run and its outputs and gradients are no longer referenced; this is read from the reference counts of their storages,
so deferred weight gradients (zero bubble) keep it busy. All graphs of a slot share one pool, and slots share none:
within a slot graphs run in the order of capture, which shared temporary memory requires; slots run in any order.

The factor of the auxiliary losses changes and is not an input: graphs read it from a tensor (`scale_tensor`). Weight
gradients inside are computed at once, because a deferred gradient is Python. Gradients of parameters go through one
buffer for all parts with parameters of the same shapes; their hooks consume them before the next part's backward.

Warm-up iterations, evaluation and recorded iterations run without graphs.
Rejected: a graph for each layer and microbatch of an iteration (TransformerEngine's make_graphed_callables): memory
then grows with the batch instead of with what is in flight.
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.memory.graph_capture import CapturedGraph, Scope, join_tensors, split_tensors
from moe_trainer.parallel.weight_grads import WeightGradQueue

logger = logging.getLogger(__name__)


def graph_generators(module: nn.Module, device: torch.device) -> Iterator[torch.Generator]:
    """Yield the generators that a graph of a module draws from, besides the device's default one.

    Submodules that have some have a method `graph_generators(device)`.
    """
    for part in module.modules():
        if hasattr(part, "graph_generators"):
            yield from part.graph_generators(device)  # type: ignore[operator]


class CudaGraphs:
    """The captured parts of one model chunk; without `parts` nothing is captured.

    Attributes:
        scopes: contexts of every capture, see CapturedGraph.
    """

    def __init__(
        self,
        parts: frozenset[str] = frozenset(),
        device: torch.device | None = None,
        *,
        warmup: int = 0,
        queue: WeightGradQueue | None = None,
    ):
        """Store the settings.

        Args:
            parts: names of captured parts.
            device: of the model.
            warmup: iterations before the first capture, at least one, in which libraries initialize.
            queue: the chunk's queue of deferred weight gradients.
        """
        self.parts, self.device, self.queue = parts, device or torch.device("cpu"), queue
        self._eager_iterations, self._iterations, self._eager = max(1, warmup), 0, True
        self._slots: list[_Slot] = []
        self._slot: _Slot | None = None  # of the current forward pass
        self._scale: Tensor | None = None
        self._scratch: dict[tuple, tuple[Tensor, ...]] = {}
        self._num_logged = 0
        self._recorded: dict[tuple[str, str], bool] = {}  # layer kind and part -> whether it was captured
        self._is_log_complete = False
        self.scopes: tuple[Scope, ...] = ()

    def is_captured(self, *parts: str) -> bool:
        """Whether one of these parts is captured, in passes that use graphs."""
        return not self.parts.isdisjoint(parts)

    def is_replayed(self, *parts: str) -> bool:
        """Whether one of these parts is captured or replayed in the current pass."""
        return self._slot is not None and self.is_captured(*parts)

    def begin_iteration(self, eager: bool = False) -> None:
        """Begin the next iteration, with `eager` without graphs."""
        self._iterations += 1
        self._eager = eager or self._iterations <= self._eager_iterations

    def end_iteration(self) -> None:
        """Log what the iteration has captured: of each layer kind once, and the memory of new graphs."""
        if len(self._slots) > self._num_logged:
            if not self._is_log_complete:
                self._log_parts()
            self._log_memory()

    def record(self, kind: str, part: str, is_captured: bool) -> None:
        """Record whether a part of a layer of this kind was captured in the current pass, for the log."""
        if self._slot is not None:
            self._recorded[kind, part] = is_captured

    def drop(self) -> None:
        """Drop all graphs and their memory; they are captured again where they are needed next."""
        self._slots.clear()
        self._slot, self._num_logged = None, 0

    def begin_pass(self, training: bool, grad_scale: float | Tensor) -> None:
        """Begin a forward pass of the chunk; `grad_scale` is the same for all passes in flight."""
        self._slot = None
        if not self.parts or "iteration" in self.parts or self._eager or not training or not torch.is_grad_enabled():
            return
        if self._scale is None:
            self._scale = torch.zeros((), dtype=torch.float64, device=self.device)
        self._scale.fill_(grad_scale)
        self._slot = next((slot for slot in self._slots if slot.is_free()), None)
        if self._slot is None:
            self._slot = _Slot(self)
            self._slots.append(self._slot)
        self._slot.begin()

    def scale_tensor(self, grad_scale: float | Tensor) -> float | Tensor:
        """Return the factor, as a tensor that captured parts may read in a pass that uses graphs."""
        return grad_scale if self._slot is None or self._scale is None else self._scale

    def hold(self, x: Tensor) -> Tensor:
        """Return a tensor that changes with the batch in memory that is the same in every pass of the current slot.

        Captured parts may read it without having it as an input. Every pass holds the same tensors in the same order.
        """
        return x if self._slot is None else self._slot.hold(x)

    def run(
        self, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], *tensors: Tensor, kind: str = "module"
    ) -> Any:
        """Return fn(*tensors), captured or replayed if the part is selected and not inside another captured part.

        Args:
            part: its name.
            fn: the part. Other tensors and values that it reads must not change.
            modules: modules whose parameters fn reads.
            *tensors: inputs.
            kind: of the layer, for the log.
        """
        if self._slot is None or self._slot.capturing:
            return fn(*tensors)
        self.record(kind, part, part in self.parts)
        if part not in self.parts:
            return fn(*tensors)
        return self._slot.call(part, fn, modules, tensors)

    def scratch(self, params: Sequence[Parameter]) -> tuple[Tensor, ...]:
        """Return the buffers of a part's parameter gradients between its graph and their hooks."""
        key = tuple((param.shape, param.dtype) for param in params)
        if key not in self._scratch:
            self._scratch[key] = tuple(torch.empty_like(param, requires_grad=False) for param in params)
        return self._scratch[key]

    @property
    def num_passes(self) -> int:
        """Passes in flight that have graphs."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of the inputs, outputs and gradients of all parts, each storage once."""
        tensors = [x for slot in self._slots for x in slot.tensors()]
        tensors += [x for buffers in self._scratch.values() for x in buffers]
        return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())

    def _log_parts(self) -> None:
        self._is_log_complete = True
        for kind in dict.fromkeys(kind for kind, _ in self._recorded):
            captured, eager = (
                ", ".join(part for (other, part), found in self._recorded.items() if other == kind and found is wanted)
                for wanted in (True, False)
            )
            logger.info("CUDA graphs of %s: captured: %s; not captured: %s", kind, captured or "none", eager or "none")

    def _log_memory(self) -> None:
        self._num_logged = len(self._slots)
        logger.info(
            "CUDA graphs: %d for %d passes in flight (%s), %.1f MiB of captured inputs and outputs",
            sum(slot.num_graphs for slot in self._slots),
            len(self._slots),
            ", ".join(sorted(self.parts)),
            self.num_bytes / 2**20,
        )


class _Slot:
    """The graphs of one pass in flight, in call order."""

    def __init__(self, graphs: CudaGraphs):
        self.graphs, self.pool = graphs, torch.cuda.graph_pool_handle()
        self.capturing = False
        self._parts: list[_GraphedPart] = []
        self._held: list[Tensor] = []
        self._next = self._next_held = 0
        self._own_references: dict[int, int] = {}  # by storage

    def begin(self) -> None:
        self._next = self._next_held = 0

    def hold(self, x: Tensor) -> Tensor:
        if self._next_held == len(self._held):
            self._held.append(x.clone())
        held = self._held[self._next_held]
        self._next_held += 1
        return held.copy_(x)

    def is_free(self) -> bool:
        """Whether its last pass has ended and none of its tensors is referenced elsewhere."""
        return not any(part.is_in_flight for part in self._parts) and self._references() == self._own_references

    def call(self, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], tensors: tuple[Tensor, ...]) -> Any:
        """Run the next part of the pass."""
        if self._next == len(self._parts):
            with self.capture_scope():
                self._parts.append(_GraphedPart(self, part, fn, modules, tensors))
        graphed = self._parts[self._next]
        self._next += 1
        graphed.check(part, tensors)
        return graphed.run(tensors)

    @contextlib.contextmanager
    def capture_scope(self) -> Iterator[None]:
        """Capture in this scope; references that are added or dropped in it are the slot's own."""
        gc.collect()  # so that no other references are dropped
        before = self._references()
        queue, self.capturing = self.graphs.queue, True
        deferring = queue if queue is not None and queue.active else None
        if deferring is not None:
            deferring.active = False
        try:
            yield
        finally:
            self.capturing = False
            if deferring is not None:
                deferring.active = True
            gc.collect()
        after = self._references()
        for key, count in after.items():
            self._own_references[key] = self._own_references.get(key, 0) + count - before.get(key, 0)

    def static_input(self, x: Tensor) -> Tensor:
        """Return the tensor from which graphs read an input: x itself if the slot owns it, else a copy."""
        if x.untyped_storage()._cdata in self._own_references:
            return x.detach().requires_grad_(x.requires_grad)
        return torch.empty_like(x, requires_grad=False).copy_(x.detach()).requires_grad_(x.requires_grad)

    @property
    def num_graphs(self) -> int:
        """Two for every part, forward and backward."""
        return 2 * len(self._parts)

    def tensors(self) -> Iterator[Tensor]:
        """Return the inputs, outputs and gradients of all parts."""
        return (x for part in self._parts for x in part.tensors())

    def _references(self) -> dict[int, int]:
        storages = {x.untyped_storage()._cdata for x in self.tensors()}
        return {key: torch._C._storage_Use_Count(key) for key in storages}


class _PassToken:
    """Referenced by the node of a part between its forward and its backward, or until the node is dropped."""


class _GraphedPart:
    """One part in one slot: its two graphs, their inputs and outputs."""

    def __init__(
        self, slot: _Slot, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], tensors: tuple[Tensor, ...]
    ):
        self.slot, self.part = slot, part
        self.params = tuple(
            dict.fromkeys(param for module in modules for param in module.parameters() if param.requires_grad)
        )
        self._hooks = [
            (module, hook)
            for root in modules
            for module in root.modules()
            for hook in module._forward_pre_hooks.values()
        ]
        self._generators = [
            generator for module in modules for generator in graph_generators(module, slot.graphs.device)
        ]
        self._prepare()
        self.inputs = tuple(slot.static_input(x) for x in tensors)
        self._forward_graph = self._new_graph()
        self._backward_graph: CapturedGraph | None = None
        with torch.enable_grad():
            result = self._forward_graph.capture(lambda: fn(*self.inputs))
        outputs, self._template = split_tensors(result)
        self._graph_outputs = [x for x in outputs if x.requires_grad]  # until backward is captured
        self.outputs = [x.detach() for x in outputs]
        self.requires_grad = [x.requires_grad for x in outputs]
        self.output_grads: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self._param_grads: list[Tensor | None] = []
        self._pass: Callable[[], _PassToken | None] = lambda: None
        self._is_captured_pass = True  # a capture leaves the outputs of the first pass

    def _new_graph(self) -> CapturedGraph:
        return CapturedGraph(self.slot.pool, self._generators, self.slot.graphs.scopes)

    @property
    def is_in_flight(self) -> bool:
        """Whether its backward is still to come."""
        return self._pass() is not None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the inputs, outputs and their gradients."""
        yield from (
            x for xs in (self.inputs, self.outputs, self.output_grads, self.input_grads) for x in xs if x is not None
        )

    def check(self, part: str, tensors: tuple[Tensor, ...]) -> None:
        """Raise RuntimeError if part or inputs differ from those of the capture."""
        given, captured = [(x.shape, x.dtype) for x in tensors], [(x.shape, x.dtype) for x in self.inputs]
        if part != self.part or given != captured:
            raise RuntimeError(
                f"CUDA graphs: {part} was called with {given}, but {self.part} was captured with {captured}; "
                "use --cuda-graph-impl none"
            )

    def run(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the result of the part for these tensors. Differentiable."""
        outputs = _Graphed.apply(self, len(tensors), *tensors, *self.params)
        return join_tensors(self._template, outputs)

    def forward(self, tensors: Sequence[Tensor]) -> _PassToken:
        """Replay the forward graph into `outputs`."""
        if not self._is_captured_pass:
            self._prepare()
            for static, x in zip(self.inputs, tensors):
                if static.data_ptr() != x.data_ptr():
                    static.copy_(x)
            self._forward_graph.replay()
        self._is_captured_pass = False
        token = _PassToken()
        self._pass = weakref.ref(token)
        return token

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Replay the backward graph with gradients of the outputs; return those of inputs and parameters."""
        if self._backward_graph is None:
            with self.slot.capture_scope():
                self.output_grads = [
                    torch.empty_like(x) for x, needed in zip(self.outputs, self.requires_grad) if needed
                ]
                self._load(grads)
                self._capture_backward()
        else:
            self._load(grads)
            self._backward_graph.replay()
        self._pass = lambda: None
        input_grads = [x if x is None else x.detach() for x in self.input_grads]
        return input_grads, [
            x if x is None else _returned_grad(param, x) for param, x in zip(self.params, self._param_grads)
        ]

    def _load(self, grads: Sequence[Tensor | None]) -> None:
        for static, grad in zip(self.output_grads, (grad for grad, needed in zip(grads, self.requires_grad) if needed)):
            static.zero_() if grad is None else static.copy_(grad)

    def _capture_backward(self) -> None:
        inputs = [x for x in self.inputs if x.requires_grad]
        self._backward_graph = graph = self._new_graph()
        scratch = self.slot.graphs.scratch(self.params)

        def run() -> tuple[list[Tensor | None], list[Tensor | None]]:
            grads = torch.autograd.grad(
                self._graph_outputs, [*inputs, *self.params], self.output_grads, allow_unused=True
            )
            param_grads: list[Tensor | None] = [
                grad if grad is None else buffer.copy_(grad) for buffer, grad in zip(scratch, grads[len(inputs) :])
            ]
            return list(grads[: len(inputs)]), param_grads

        input_grads, self._param_grads = graph.capture(run)
        self._graph_outputs = []
        self.input_grads = [input_grads.pop(0) if x.requires_grad else None for x in self.inputs]

    def _prepare(self) -> None:
        """Run the modules' forward pre-hooks, which wait for parameters."""
        for module, hook in self._hooks:
            hook(module, ())


def _returned_grad(param: Parameter, grad: Tensor) -> Tensor:
    """Return a parameter's gradient so that the next replay may overwrite its buffer: hooks consume it at once."""
    return grad.detach() if param._post_accumulate_grad_hooks else grad.clone()


class _Graphed(torch.autograd.Function):
    """A captured part as one autograd node."""

    @staticmethod
    def forward(ctx, part: _GraphedPart, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.part, ctx.token = part, part.forward(tensors[:count])
        ctx.set_materialize_grads(False)
        outputs = tuple(x.detach() for x in part.outputs)
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, part.requires_grad) if not needed))
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        ctx.token = None
        input_grads, param_grads = ctx.part.backward(grads)
        return None, None, *input_grads, *param_grads
