"""Parts of layers as CUDA graphs (--cuda-graph-impl local): a model chunk names its parts, and those that are chosen are replayed.

    y = graphs.run("attn", fn, modules, x)      fn(x); captured once, then replayed

`fn` may return tensors, or a record (dataclass, tuple) that has some in it. To autograd a captured part is one node: its backward
replays a second graph, which gives the gradients of the inputs and of the parameters. Hooks on parameters (main gradients, overlapped
reductions) run behind that node, outside the graph, as ever; hooks before a module's forward (parameter gathers) run before a replay.

A microbatch's tensors must survive from its forward to its backward, and a graph has one set of them. So every pass that is in flight
has a set of graphs, a `_Slot`: one for each part it calls, forward and backward. A pass takes the first slot that is free, and the
graphs of a new one are captured where they first run. A slot is free when its backward has run and nobody holds one of its outputs or
gradients any more: that is read off the number of references to their storages, so weight gradients that wait (zero bubble) keep it
busy. All graphs of a slot have one pool, and pools are not shared: within a slot graphs run in the order in which they were captured,
which is what sharing the memory of temporary tensors takes; slots run in any order.

What changes and is not an input: the factor of auxiliary losses is a tensor that graphs read (`live`). Weight gradients inside are
computed at once (`queue` rests meanwhile): a gradient that waits is Python. Gradients of parameters go through one buffer for all parts
with parameters of the same shapes; their hooks take them before the next part's backward.

Warm-up iterations, evaluation, and iterations that are asked to record what happens inside run without graphs.
Rejected: a graph for each layer and microbatch of an iteration (as make_graphed_callables of TransformerEngine has it): memory
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

from moe_trainer.memory.graph_capture import Graph, put_together, take_apart
from moe_trainer.parallel.weight_grads import WeightGradQueue

logger = logging.getLogger(__name__)


class Graphs:
    """The captured parts of one model chunk; without `parts` everything runs as it is.

    parts: names. warmup: iterations before the first capture, at least one: libraries set themselves up in it. queue: of the chunk.
    """

    def __init__(self, parts: frozenset[str] = frozenset(), device: torch.device | None = None, *, warmup: int = 0,
                 queue: WeightGradQueue | None = None):
        self.parts, self.device, self.queue = parts, device or torch.device("cpu"), queue
        self._eager_iterations, self._iterations, self._eager = max(1, warmup), 0, True
        self._slots: list[_Slot] = []
        self._slot: _Slot | None = None  # of the forward pass that runs
        self._scale: Tensor | None = None
        self._scratch: dict[tuple, tuple[Tensor, ...]] = {}
        self._told = 0

    def captures(self, *parts: str) -> bool:
        """Is one of them captured (in passes that use graphs)?"""
        return not self.parts.isdisjoint(parts)

    def begin_iteration(self, eager: bool = False) -> None:
        """The next iteration begins. eager: without graphs."""
        if len(self._slots) > self._told:
            self._tell()
        self._iterations += 1
        self._eager = eager or self._iterations <= self._eager_iterations

    def begin_pass(self, training: bool, grad_scale: float | Tensor) -> None:
        """A forward pass of the chunk begins. grad_scale: factor of the auxiliary losses, the same for all passes in flight."""
        self._slot = None
        if not self.parts or "iteration" in self.parts or self._eager or not training or not torch.is_grad_enabled():
            return
        if self._scale is None:
            self._scale = torch.zeros((), dtype=torch.float64, device=self.device)
        self._scale.fill_(grad_scale)
        self._slot = next((slot for slot in self._slots if slot.free()), None)
        if self._slot is None:
            self._slot = _Slot(self)
            self._slots.append(self._slot)
        self._slot.begin()

    def live(self, grad_scale: float | Tensor) -> float | Tensor:
        """The factor as a tensor that a captured part may read, in a pass that uses graphs."""
        return grad_scale if self._slot is None else self._scale

    def run(self, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], *tensors: Tensor) -> Any:
        """fn(*tensors), captured or replayed if the part is. modules: those whose parameters fn reads. Everything else that it reads must
        stay where it is, tensors and values; inside another captured part it belongs to that."""
        if part not in self.parts or self._slot is None or self._slot.capturing:
            return fn(*tensors)
        return self._slot.call(part, fn, modules, tensors)

    def scratch(self, params: Sequence[Parameter]) -> tuple[Tensor, ...]:
        """Where the gradients of a part's parameters lie between its graph and their hooks."""
        key = tuple((param.shape, param.dtype) for param in params)
        if key not in self._scratch:
            self._scratch[key] = tuple(torch.empty_like(param, requires_grad=False) for param in params)
        return self._scratch[key]

    @property
    def num_passes(self) -> int:
        """Passes in flight that there are graphs for."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that stay where they are: inputs, outputs and gradients of the parts, each storage once."""
        found = [x for slot in self._slots for x in slot.tensors()]
        found += [x for buffers in self._scratch.values() for x in buffers]
        return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found}.values())

    def _tell(self) -> None:
        self._told = len(self._slots)
        logger.info("CUDA graphs: %d in all for %d passes in flight (%s), %.1f MiB of tensors that stay in their places",
                    sum(slot.num_graphs for slot in self._slots), len(self._slots), ", ".join(sorted(self.parts)), self.num_bytes / 2**20)


class _Slot:
    """The graphs of one pass in flight, in the order in which it calls them."""

    def __init__(self, graphs: Graphs):
        self.graphs, self.pool = graphs, torch.cuda.graph_pool_handle()
        self.capturing = False
        self._units: list[_Unit] = []
        self._next = 0
        self._ours: dict[int, int] = {}  # storage -> references to it that are the slot's own

    def begin(self) -> None:
        """A pass begins."""
        self._next = 0

    def free(self) -> bool:
        """Has its last pass ended, and does nobody hold a tensor of it any more?"""
        return not any(unit.in_flight for unit in self._units) and self._references() == self._ours

    def call(self, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], tensors: tuple[Tensor, ...]) -> Any:
        """The next part of the pass."""
        if self._next == len(self._units):
            with self.owning():
                self._units.append(_Unit(self, part, fn, modules, tensors))
        unit = self._units[self._next]
        self._next += 1
        unit.check(part, tensors)
        return unit.run(tensors)

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """Inside a graph is captured; the references that come and go meanwhile are the slot's own."""
        gc.collect()  # so that none of others' go
        before = self._references()
        queue, self.capturing = self.graphs.queue, True
        waits = queue is not None and queue.active
        if waits:
            queue.active = False
        try:
            yield
        finally:
            self.capturing = False
            if waits:
                queue.active = True
            gc.collect()
        after = self._references()
        for key, count in after.items():
            self._ours[key] = self._ours.get(key, 0) + count - before.get(key, 0)

    def place(self, x: Tensor) -> Tensor:
        """Where an input is going to be: x itself if the slot owns it, else a copy."""
        if x.untyped_storage()._cdata in self._ours:
            return x.detach().requires_grad_(x.requires_grad)
        return torch.empty_like(x, requires_grad=False).copy_(x.detach()).requires_grad_(x.requires_grad)

    @property
    def num_graphs(self) -> int:
        """Forward and backward of every part."""
        return 2 * len(self._units)

    def tensors(self) -> Iterator[Tensor]:
        """What stays where it is."""
        return (x for unit in self._units for x in unit.tensors())

    def _references(self) -> dict[int, int]:
        storages = {x.untyped_storage()._cdata for x in self.tensors()}
        return {key: torch._C._storage_Use_Count(key) for key in storages}


class _Pass:
    """Held by the node of a part between its forward and its backward, or until the node is dropped."""


class _Unit:
    """One part in one slot: its two graphs, and the tensors between which they run."""

    def __init__(self, slot: _Slot, part: str, fn: Callable[..., Any], modules: Sequence[nn.Module], tensors: tuple[Tensor, ...]):
        self.slot, self.part = slot, part
        self.params = tuple(dict.fromkeys(param for module in modules for param in module.parameters() if param.requires_grad))
        self._hooks = [(module, hook) for root in modules for module in root.modules() for hook in module._forward_pre_hooks.values()]
        self._prepare()
        self.inputs = tuple(slot.place(x) for x in tensors)
        self._forward_graph, self._backward_graph = Graph(slot.pool), None
        with torch.enable_grad():
            result = self._forward_graph.capture(lambda: fn(*self.inputs))
        found: list[Tensor] = []
        self._result = take_apart(result, found)
        self._graph: list[Tensor] | None = [x for x in found if x.requires_grad]  # until its backward is captured
        self.outputs = [x.detach() for x in found]
        self.differentiable = [x.requires_grad for x in found]
        self.output_grads: list[Tensor] = []
        self.input_grads: list[Tensor | None] = []
        self._param_grads: list[Tensor | None] = []
        self._pass: Callable[[], _Pass | None] = lambda: None
        self._fresh = True  # the capture leaves the outputs of the first pass

    @property
    def in_flight(self) -> bool:
        """Is its backward still to come?"""
        return self._pass() is not None

    def tensors(self) -> Iterator[Tensor]:
        """What stays where it is."""
        yield from (x for xs in (self.inputs, self.outputs, self.output_grads, self.input_grads) for x in xs if x is not None)

    def check(self, part: str, tensors: tuple[Tensor, ...]) -> None:
        """Raises: RuntimeError when the pass takes another way than at capture."""
        now, then = [(x.shape, x.dtype) for x in tensors], [(x.shape, x.dtype) for x in self.inputs]
        if part != self.part or now != then:
            raise RuntimeError(f"CUDA graphs: {part} of {now} where {self.part} of {then} was captured; --cuda-graph-impl none runs anything")

    def run(self, tensors: tuple[Tensor, ...]) -> Any:
        """The part on these tensors, differentiable. Returns: what fn returned at capture, with the tensors of now."""
        outputs = _Graphed.apply(self, len(tensors), *tensors, *self.params)
        return put_together(self._result, iter(outputs))

    def forward(self, tensors: Sequence[Tensor]) -> _Pass:
        """Replay the forward graph; the outputs are in their places."""
        if not self._fresh:
            self._prepare()
            for place, x in zip(self.inputs, tensors):
                if place.data_ptr() != x.data_ptr():
                    place.copy_(x)
            self._forward_graph.replay()
        self._fresh = False
        ticket = _Pass()
        self._pass = weakref.ref(ticket)
        return ticket

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Replay the backward graph. grads: of the outputs. Returns: gradients of inputs and parameters."""
        if self._backward_graph is None:
            with self.slot.owning():
                self.output_grads = [torch.empty_like(x) for x, needed in zip(self.outputs, self.differentiable) if needed]
                self._load(grads)
                self._capture_backward()
        else:
            self._load(grads)
            self._backward_graph.replay()
        self._pass = lambda: None
        return [x if x is None else x.detach() for x in self.input_grads], [
            x if x is None else x.detach() if param._post_accumulate_grad_hooks else x.clone()  # hooks take it at once
            for param, x in zip(self.params, self._param_grads)]

    def _load(self, grads: Sequence[Tensor | None]) -> None:
        for place, grad in zip(self.output_grads, (grad for grad, needed in zip(grads, self.differentiable) if needed)):
            place.zero_() if grad is None else place.copy_(grad)

    def _capture_backward(self) -> None:
        wanted = [x for x in self.inputs if x.requires_grad]
        self._backward_graph = Graph(self.slot.pool)
        scratch = self.slot.graphs.scratch(self.params)

        def run() -> tuple[list[Tensor | None], list[Tensor | None]]:
            found = torch.autograd.grad(self._graph, [*wanted, *self.params], self.output_grads, allow_unused=True)
            of_params = [grad if grad is None else place.copy_(grad) for place, grad in zip(scratch, found[len(wanted):])]
            return list(found[:len(wanted)]), of_params

        of_inputs, self._param_grads = self._backward_graph.capture(run)
        self._graph = None
        self.input_grads = [of_inputs.pop(0) if x.requires_grad else None for x in self.inputs]

    def _prepare(self) -> None:
        """What hooks do before a module runs: wait for its parameters."""
        for module, hook in self._hooks:
            hook(module, ())


class _Graphed(torch.autograd.Function):
    """A part as one node."""

    @staticmethod
    def forward(ctx, unit: _Unit, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.ticket = unit, unit.forward(tensors[:count])
        ctx.set_materialize_grads(False)
        outputs = tuple(x.detach() for x in unit.outputs)
        ctx.mark_non_differentiable(*(x for x, needed in zip(outputs, unit.differentiable) if not needed))
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        ctx.ticket = None
        of_inputs, of_params = ctx.unit.backward(grads)
        return None, None, *of_inputs, *of_params
