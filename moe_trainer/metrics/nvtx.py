"""Named ranges on the timeline of NVIDIA Nsight Systems (--nvtx-ranges): `scripts/analyze_nsys.py` adds them up.

A range of the host's own control flow is pushed and popped on its thread. The backward of a module has no such place:
autograd calls hooks, on a separate thread. Its range is started by the gradient of what the module returned and ended
by the gradient of what it received, so it need not nest.

Names: "iteration 7"; the timers' names ("optimizer", "forward-compute"); "forward microbatch 2 chunk 0" and "backward
..." for each action of the pipeline; "decoder.layers.3", "decoder.layers.3.mlp.router" and other modules; "dispatch",
"combine" and "backward of X".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

BACKWARD_OF = "backward of "


class Nvtx(Protocol):
    """What torch.cuda.nvtx has."""

    def range_push(self, msg: str) -> Any: ...
    def range_pop(self) -> Any: ...
    def range_start(self, msg: str) -> Any: ...
    def range_end(self, range_id: Any) -> Any: ...


class Ranges:
    """Ranges of one rank. These, on a CPU or without --nvtx-ranges, mark nothing."""

    def __call__(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark the enclosed block."""
        return contextlib.nullcontext()

    def mark_module(self, name: str, module: nn.Module) -> None:
        """Mark every forward of a module and, where its first input requires a gradient, the backward."""

    def mark_phases(self, name: str, owner: object, methods: tuple[str, ...]) -> None:
        """Mark the methods of an object that are the parts of one phase.

        The first one's first argument and the last one's result are tensors, or have a tensor `x_RH`.
        """


class NvtxRanges(Ranges):
    """Ranges that a library shows."""

    def __init__(self, nvtx: Nvtx):
        self._nvtx = nvtx
        self._open: dict[str, Any] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._nvtx.range_push(name)
        try:
            yield
        finally:
            self._nvtx.range_pop()

    def mark_module(self, name: str, module: nn.Module) -> None:
        nvtx = self._nvtx

        def before(module: nn.Module, inputs: tuple) -> None:
            nvtx.range_push(name)
            self._end_with_gradient(name, inputs[0] if inputs else None)

        def after(module: nn.Module, inputs: tuple, output: Any) -> None:
            nvtx.range_pop()
            if inputs and _requires_grad(inputs[0]):
                self._start_with_gradient(name, output[0] if isinstance(output, tuple) else output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)  # a failed forward is popped, too

    def mark_phases(self, name: str, owner: object, methods: tuple[str, ...]) -> None:
        for index, method in enumerate(methods):
            is_first, is_last = index == 0, index == len(methods) - 1
            setattr(owner, method, self._marked(name, getattr(owner, method), is_first, is_last))

    def _marked(self, name: str, call: Callable, is_first: bool, is_last: bool) -> Callable:
        @wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if is_first:
                self._end_with_gradient(name, args[0])
            with self(name):
                result = call(*args, **kwargs)
            if is_last:
                self._start_with_gradient(name, getattr(result, "x_RH", result))
            return result

        return marked

    def _start_with_gradient(self, name: str, output: Any) -> None:
        if _requires_grad(output):
            output.register_hook(partial(self._start, BACKWARD_OF + name))

    def _end_with_gradient(self, name: str, given: Any) -> None:
        if _requires_grad(given):
            given.register_hook(partial(self._end, BACKWARD_OF + name))

    def _start(self, name: str, grad: Tensor) -> None:
        self._end(name, grad)  # one whose input had no gradient after all
        self._open[name] = self._nvtx.range_start(name)

    def _end(self, name: str, grad: Tensor) -> None:
        if name in self._open:
            self._nvtx.range_end(self._open.pop(name))


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def make_ranges(enabled: bool, device: torch.device) -> Ranges:
    """Return the ranges of a rank: torch's, if they are enabled and the device is a GPU."""
    return NvtxRanges(torch.cuda.nvtx) if enabled and device.type == "cuda" else Ranges()
