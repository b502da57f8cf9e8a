"""Record what goes in and out of modules in one iteration, and the gradients of their inputs.

Hooks copy to the host. Every microbatch overwrites the previous one, so the last one's values remain, as in
Megatron-LM. A recomputed module runs twice with the same results.

The recorded gradient is that of one module's input, not the sum over all readers of the tensor: each module gets its
own view to take it from. A view shares the storage, by which recomputation and offloading identify tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn


class ModuleTracer:
    """Recorder of named modules from construction until `stop`.

    Attributes:
        activations: "NAME/input0", "NAME/output0", ... of every floating-point positional input and output.
        input_grads: "NAME/input0", ... of the inputs that require a gradient.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, activations: bool, input_grads: bool):
        self.activations: dict[str, Tensor] = {}
        self.input_grads: dict[str, Tensor] = {}
        self._hooks = []
        for name, module in modules:
            if activations:
                self._hooks.append(module.register_forward_hook(partial(self._after, name)))
            if input_grads:
                self._hooks.append(module.register_forward_pre_hook(partial(self._before, name)))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _after(self, name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        for kind, values in (("input", inputs), ("output", output if isinstance(output, tuple) else (output,))):
            for index, value in enumerate(values):
                if _is_floating(value):
                    self.activations[f"{name}/{kind}{index}"] = value.detach().to("cpu", copy=True).contiguous()

    def _before(self, name: str, module: nn.Module, inputs: tuple) -> tuple:
        return tuple(self._tap(f"{name}/input{index}", value) for index, value in enumerate(inputs))

    def _tap(self, key: str, value: object) -> object:
        if not _is_floating(value) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        view = value.view_as(value)
        view.register_hook(partial(self._save_grad, key))
        return view

    def _save_grad(self, key: str, grad: Tensor) -> None:
        self.input_grads[key] = grad.detach().to("cpu", torch.float32, copy=True).contiguous()


def _is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()
