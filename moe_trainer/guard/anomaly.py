"""Where a number stops being finite: the first module, expert and microbatch, forward or backward, over all ranks.

`Search` watches one forward and backward pass. Every module gets two hooks. Behind its forward its results are looked at: what was
finite on the way in and is not on the way out was made here, and a child is done before its parent. On the way in each tensor goes
through an identity of its own, whose gradient is that of this module alone: where the gradients of its results were finite and this
one is not, the module's backward made it. Gradients of weights are looked at as they come. The first event of a microbatch and
direction on a rank counts; what comes later is its consequence.

Ranks exchange rows in the middle of a layer, so a rank may see nothing but what another one sent. Events are therefore ordered by
microbatch, direction, chunk of the pipeline and position in the model: of two ranks the one that saw it in an earlier module of the
forward pass (a later one in backward) was there first. A child stands before its parent in both directions.

A weight that is not finite to begin with comes before everything. All this costs a synchronisation per tensor: it is for an iteration
that has failed already.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.parallel.params import info_of, is_stored

FORWARD, BACKWARD = 0, 1
BEHIND = 1 << 30  # behind all modules of a chunk, or behind all microbatches

Rows = Callable[[nn.Module, tuple], tuple[Sequence[str], Sequence[int]] | None]
"""Of a module and its arguments: the names of the parts that its rows belong to and how many each has; None where it has no parts."""


@dataclass(frozen=True, order=True)
class Fault:
    """Something that is not finite. Smaller means earlier. microbatch: from 1; 0 before the first one, BEHIND after the last."""

    microbatch: int
    direction: int
    chunk: int
    position: int
    what: str = field(compare=False)

    @property
    def text(self) -> str:
        """E.g. "NaN in the results of decoder.layers.1.mlp.experts, forward pass of microbatch 2"."""
        if self.microbatch in (0, BEHIND):
            return self.what
        return f"{self.what}, {('forward', 'backward')[self.direction]} pass of microbatch {self.microbatch}"


@dataclass(frozen=True)
class Chunk:
    """A part of the model. number: its place in the pipeline; name_of: a module's global name by its path in the chunk."""

    number: int
    module: nn.Module
    name_of: Callable[[str], str]


class _Watched(torch.autograd.Function):
    """The same tensor; its gradient passes `look`."""

    @staticmethod
    def forward(ctx, x: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        ctx.look = look
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.look(grad)
        return grad, None


@dataclass
class _Call:
    """One forward pass of a module."""

    microbatch: int
    rows: tuple[Sequence[str], Sequence[int]] | None


@dataclass(frozen=True)
class _Node:
    """A module to watch. before, behind: its number when parents come first, and when children do."""

    chunk: int
    name: str
    module: nn.Module
    before: int
    behind: int


class Search:
    """Collects the first events of every microbatch while `watching`."""

    def __init__(self, chunks: Sequence[Chunk], microbatch: Callable[[], int | None], rows: Rows = lambda module, args: None):
        """microbatch: the one that the calling thread works on, from 1."""
        self._chunks, self._microbatch, self._rows = chunks, microbatch, rows
        self._first: dict[tuple[int, int], Fault] = {}
        self._open: dict[tuple[int, int], list[_Call]] = {}  # by thread and module
        self._backward = threading.local()  # microbatch: the one whose gradients this thread computes

    def earliest(self) -> Fault | None:
        """What this rank saw first."""
        return min(self._first.values(), default=None)

    def note(self, fault: Fault) -> None:
        """Something seen elsewhere, which counts if nothing was seen in that microbatch and direction."""
        self._first.setdefault((fault.microbatch, fault.direction), fault)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the weights, then at everything that runs inside."""
        for chunk in self._chunks:
            fault = weight_at_fault(chunk)
            if fault is not None:
                self.note(fault)
        handles = [handle for chunk in self._chunks for handle in self._attach(chunk)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.clear()

    def _attach(self, chunk: Chunk) -> Iterator[Any]:
        owners = {}
        for node in _nodes(chunk):
            yield node.module.register_forward_pre_hook(functools.partial(self._before, node))
            yield node.module.register_forward_hook(functools.partial(self._after, node))
            owners.update({param: node for param in node.module.parameters(recurse=False)})
        for param, node in owners.items():
            if param.requires_grad:
                yield param.register_hook(functools.partial(self._weight_grad, node, param))

    def _before(self, node: _Node, module: nn.Module, args: tuple) -> tuple:
        call = _Call(self._microbatch() or 1, self._rows(module, args))
        self._open.setdefault((threading.get_ident(), id(module)), []).append(call)
        look = functools.partial(self._input_grad, node, call)
        return tuple(_Watched.apply(x, look) if _has_grad(x) else x for x in args)

    def _after(self, node: _Node, module: nn.Module, args: tuple, output: Any) -> None:
        call = self._open[threading.get_ident(), id(module)].pop()
        for x in _tensors(output):
            fault = _fault(x, call.rows)
            if fault is not None:
                self.note(Fault(call.microbatch, FORWARD, node.chunk, node.behind, f"{fault[0]} in the results of {node.name}{fault[1]}"))
            if _has_grad(x):
                x.register_hook(functools.partial(self._output_grad, node, call))

    def _output_grad(self, node: _Node, call: _Call, grad: Tensor) -> None:
        self._backward.microbatch = call.microbatch
        fault = _fault(grad, call.rows)
        if fault is not None:
            self._note_backward(node, call.microbatch, f"{fault[0]} in the gradient that reaches the results of {node.name}{fault[1]}")

    def _input_grad(self, node: _Node, call: _Call, grad: Tensor) -> None:
        fault = _fault(grad, call.rows)  # of a module whose results' gradients were at fault, these are noted already
        if fault is not None:
            self._note_backward(node, call.microbatch, f"{fault[0]} in the gradient that {node.name}{fault[1]} passes on")

    def _weight_grad(self, node: _Node, param: Parameter, grad: Tensor | None) -> None:
        if grad is None and hasattr(param, "main_grad_sum"):
            grad = param.main_grad  # a matmul has added the gradient to it
        if grad is None:
            return  # put off: what it adds to is looked at after the reduction
        grad = getattr(grad, "_local_tensor", grad)
        name = _slice_at_fault(param, grad)
        if name is not None:
            self._note_backward(node, getattr(self._backward, "microbatch", 1), f"{_kind(grad)} in the gradient of {name}")

    def _note_backward(self, node: _Node, microbatch: int, what: str) -> None:
        self.note(Fault(microbatch, BACKWARD, -node.chunk, -node.before, what))


def weight_at_fault(chunk: Chunk) -> Fault | None:
    """The first weight of a chunk, in order of use, that is not finite before anything has run. Weights kept in 8 bits are not looked at."""
    for position, param in enumerate(chunk.module.parameters()):
        values = getattr(param, "_local_tensor", param.detach())  # of a sharded one this rank's part
        name = None if is_stored(param) else _slice_at_fault(param, values)
        if name is not None:
            return Fault(0, FORWARD, chunk.number, position, f"weight {name} is {_kind(values)} before the iteration")
    return None


def gradients_at_fault(views: Iterable[tuple[Any, Tensor]]) -> list[str]:
    """Names of parameters whose reduced gradients are not finite on this rank; views: as Gradients.owned_views gives them."""
    return [info_of(slot.param).names[0] for slot, view in views if not torch.isfinite(view).all()]


def _nodes(chunk: Chunk) -> Iterator[_Node]:
    behind = {id(module): position for position, module in enumerate(_children_first(chunk.module, set()))}
    for before, (path, module) in enumerate(chunk.module.named_modules()):
        yield _Node(chunk.number, chunk.name_of(path), module, before, behind[id(module)])


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _tensors(output: Any) -> Iterator[Tensor]:
    for x in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(x, Tensor) and x.is_floating_point():
            yield x


def _has_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()


def _fault(x: Tensor, rows: tuple[Sequence[str], Sequence[int]] | None) -> tuple[str, str] | None:
    """(NaN or Inf, the part of the rows in brackets) of a tensor that is not finite."""
    counted = None if rows is None else sum(rows[1])
    if counted is not None and counted <= x.shape[0]:
        x = x[:counted]  # what stands behind the parts' rows means nothing
    if torch.isfinite(x).all():
        return None
    if counted is None or counted != x.shape[0]:
        return _kind(x), ""
    bad = int((~torch.isfinite(x.reshape(counted, -1))).any(1).nonzero()[0])
    for name, count in zip(*rows):
        if bad < count:
            return _kind(x), f" ({name})"
        bad -= count
    return _kind(x), ""


def _kind(x: Tensor) -> str:
    return "NaN" if torch.isnan(x).any() else "Inf"


def _slice_at_fault(param: Parameter, values: Tensor) -> str | None:
    """The name of a parameter, or of the slice of a stack, whose values (its own, or a gradient) are not finite."""
    if torch.isfinite(values).all():
        return None
    names = info_of(param).names
    if len(names) == 1 or values.shape[0] != len(names):
        return names[0]
    return next(name for name, part in zip(names, values) if not torch.isfinite(part).all())
