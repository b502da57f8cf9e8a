"""Locate the first non-finite value: module, expert and microbatch, forward or backward, over all ranks.

`NonFiniteTracer` hooks every module for one forward and backward pass. An output that is not finite although the
inputs were was computed there; children finish before their parents. Input gradients pass an identity per module: a
non-finite one, with finite output gradients, was computed by this module's backward. Only the first event per
microbatch and direction counts.

Ranks exchange tokens inside a layer, so events of all ranks are ordered by microbatch, direction, pipeline chunk and
position in the model. Non-finite weights come before everything. Each tensor costs a synchronization, so this is for
iterations that have already failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.debug.module_tracer import ModuleTracer, is_floating, tap_gradients
from moe_trainer.parallel.params import get_param_info, is_quantized_param

FORWARD, BACKWARD = 0, 1
AFTER_LAST = 1 << 30  # after all modules of a chunk, or after all microbatches

ExpertTokens = tuple[Sequence[str], Sequence[int]]
"""Names of a module's experts, and their numbers of tokens."""
ExpertTokensFn = Callable[[nn.Module, tuple], ExpertTokens | None]
"""Return the experts of a module and their tokens in its inputs; None for other modules."""


@dataclass(frozen=True, order=True)
class Fault:
    """A non-finite value.

    Smaller means earlier. `microbatch` counts from 1; 0 is before the first, AFTER_LAST after the last.
    """

    microbatch: int
    direction: int
    chunk: int
    position: int
    what: str = field(compare=False)

    @property
    def text(self) -> str:
        """Describe it, e.g. "NaN in the results of decoder.layers.1.mlp.experts, forward pass of microbatch 2"."""
        if self.microbatch in (0, AFTER_LAST):
            return self.what
        return f"{self.what}, {('forward', 'backward')[self.direction]} pass of microbatch {self.microbatch}"


@dataclass(frozen=True)
class Chunk:
    """A part of the model with its position in the pipeline; `get_name` maps a path in it to a global name."""

    number: int
    module: nn.Module
    get_name: Callable[[str], str]


@dataclass
class _Call:
    microbatch: int
    expert_tokens: ExpertTokens | None


@dataclass(frozen=True)
class _Node:
    """A traced module with its positions in parents-first (`pre_order`) and children-first order (`post_order`)."""

    chunk: int
    name: str
    module: nn.Module
    pre_order: int
    post_order: int


class NonFiniteTracer:
    """Collector of the first event of every microbatch and direction.

    `get_microbatch` returns the current microbatch (from 1) of the calling thread.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        get_microbatch: Callable[[], int | None],
        get_expert_tokens: ExpertTokensFn = lambda module, inputs: None,
    ):
        self._chunks, self._get_microbatch, self._get_expert_tokens = chunks, get_microbatch, get_expert_tokens
        self._first: dict[tuple[int, int], Fault] = {}
        self._calls: dict[tuple[int, int], list[_Call]] = {}  # unfinished ones by thread and module
        self._backward = threading.local()  # microbatch: the one whose gradients this thread computes

    def earliest(self) -> Fault | None:
        return min(self._first.values(), default=None)

    def note(self, fault: Fault) -> None:
        """Add an event, which counts if it is the first of its microbatch and direction."""
        self._first.setdefault((fault.microbatch, fault.direction), fault)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check the weights, then trace everything that runs inside."""
        for chunk in self._chunks:
            fault = first_nonfinite_weight(chunk)
            if fault is not None:
                self.note(fault)
        tracer = ModuleTracer()
        for chunk in self._chunks:
            self._attach(tracer, chunk)
        try:
            yield
        finally:
            tracer.stop()
            self._calls.clear()

    def _attach(self, tracer: ModuleTracer, chunk: Chunk) -> None:
        owners = {}
        for node in _nodes(chunk):
            tracer.on_inputs(node.module, partial(self._before, node))
            tracer.on_output(node.module, partial(self._after, node))
            owners.update({param: node for param in node.module.parameters(recurse=False)})
        for param, node in owners.items():
            if param.requires_grad:
                tracer.on_weight_grad(param, partial(self._weight_grad, node, param))

    def _before(self, node: _Node, inputs: tuple) -> tuple:
        call = _Call(self._get_microbatch() or 1, self._get_expert_tokens(node.module, inputs))
        self._calls.setdefault((threading.get_ident(), id(node.module)), []).append(call)
        return tap_gradients(inputs, partial(self._input_grad, node, call))

    def _after(self, node: _Node, inputs: tuple, output: Any) -> None:
        call = self._calls[threading.get_ident(), id(node.module)].pop()
        for x in filter(is_floating, output if isinstance(output, (tuple, list)) else (output,)):
            if (fault := _find_fault(x, call.expert_tokens)) is not None:
                what = f"{fault[0]} in the results of {node.name}{fault[1]}"
                self.note(Fault(call.microbatch, FORWARD, node.chunk, node.post_order, what))
            if x.requires_grad:
                x.register_hook(partial(self._output_grad, node, call))

    def _output_grad(self, node: _Node, call: _Call, grad: Tensor) -> None:
        self._backward.microbatch = call.microbatch
        if (fault := _find_fault(grad, call.expert_tokens)) is not None:
            what = f"{fault[0]} in the gradient that reaches the results of {node.name}{fault[1]}"
            self._note_backward(node, call.microbatch, what)

    def _input_grad(self, node: _Node, call: _Call, index: int, grad: Tensor) -> None:
        fault = _find_fault(grad, call.expert_tokens)  # already noted if the output gradients were not finite
        if fault is not None:
            what = f"{fault[0]} in the gradient that {node.name}{fault[1]} passes on"
            self._note_backward(node, call.microbatch, what)

    def _weight_grad(self, node: _Node, param: Parameter, grad: Tensor | None) -> None:
        if grad is None and hasattr(param, "main_grad_sum"):
            grad = param.main_grad  # type: ignore[attr-defined]  # the GEMM accumulated the gradient into it
        if grad is None:
            return  # deferred: checked after the reduction
        grad = getattr(grad, "_local_tensor", grad)
        name = _nonfinite_slice(param, grad)
        if name is not None:
            microbatch = getattr(self._backward, "microbatch", 1)
            self._note_backward(node, microbatch, f"{_kind(grad)} in the gradient of {name}")

    def _note_backward(self, node: _Node, microbatch: int, what: str) -> None:
        self.note(Fault(microbatch, BACKWARD, -node.chunk, -node.pre_order, what))


def first_nonfinite_weight(chunk: Chunk) -> Fault | None:
    """Return the first non-finite weight of a chunk in order of use; quantized weights are not checked."""
    for position, param in enumerate(chunk.module.parameters()):
        values = getattr(param, "_local_tensor", param.detach())  # local shard
        name = None if is_quantized_param(param) else _nonfinite_slice(param, values)
        if name is not None:
            return Fault(0, FORWARD, chunk.number, position, f"weight {name} is {_kind(values)} before the iteration")
    return None


def nonfinite_gradients(views: Iterable[tuple[Any, Tensor]]) -> list[str]:
    """Return the names of parameters whose reduced gradients are not finite on this rank."""
    return [get_param_info(slot.param).names[0] for slot, view in views if not torch.isfinite(view).all()]


def _nodes(chunk: Chunk) -> Iterator[_Node]:
    post_order = {id(module): position for position, module in enumerate(_children_first(chunk.module, set()))}
    for position, (path, module) in enumerate(chunk.module.named_modules()):
        yield _Node(chunk.number, chunk.get_name(path), module, position, post_order[id(module)])


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _find_fault(x: Tensor, expert_tokens: ExpertTokens | None) -> tuple[str, str] | None:
    """Return (NaN or Inf, expert in brackets) of a non-finite tensor."""
    names, counts = expert_tokens or ((), ())
    num_tokens = None if expert_tokens is None else sum(counts)
    if num_tokens is not None and num_tokens <= x.shape[0]:
        x = x[:num_tokens]  # without the padding after the experts' tokens
    if torch.isfinite(x).all():
        return None
    if num_tokens == x.shape[0]:
        token = int((~torch.isfinite(x.reshape(num_tokens, -1))).any(1).nonzero()[0])
        for name, count in zip(names, counts):
            if token < count:
                return _kind(x), f" ({name})"
            token -= count
    return _kind(x), ""


def _kind(x: Tensor) -> str:
    return "NaN" if torch.isnan(x).any() else "Inf"


def _nonfinite_slice(param: Parameter, values: Tensor) -> str | None:
    """Return the name of a parameter, or of the slice of a stack, whose values or gradients are not finite."""
    if torch.isfinite(values).all():
        return None
    names = get_param_info(param).names
    if len(names) == 1 or values.shape[0] != len(names):
        return names[0]
    return next(name for name, part in zip(names, values) if not torch.isfinite(part).all())
