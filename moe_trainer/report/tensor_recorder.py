"""What goes in and out of modules in one iteration, and the gradients of what goes in (--save-activations-interval, --save-dgrads-interval).

Hooks on the modules copy to the host. Every microbatch overwrites the one before it, so what stays is the last one's (as in
Megatron-LM, whose hooks do the same). A recomputed module runs twice and gives the same numbers again.

The gradient wanted is that of one module's input, not the sum over all readers of the tensor: each module is handed a view of its own
to take it from. A view shares the storage, by which recomputation and offloading know their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


class TensorRecorder:
    """Records named modules from its making until `stop`.

    activations: "NAME/input0", "NAME/output0", ... of every floating tensor that is handed over by position or comes out.
    input_grads: "NAME/input0", ... of the inputs that need one.
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
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _after(self, name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        for kind, values in (("input", inputs), ("output", output if isinstance(output, tuple) else (output,))):
            for index, value in enumerate(values):
                if _is_floating(value):
                    self.activations[f"{name}/{kind}{index}"] = value.detach().to("cpu", copy=True).contiguous()

    def _before(self, name: str, module: nn.Module, inputs: tuple) -> tuple:
        return tuple(self._watched(f"{name}/input{index}", value) for index, value in enumerate(inputs))

    def _watched(self, key: str, value: object) -> object:
        if not _is_floating(value) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        own = value.view_as(value)
        own.register_hook(partial(self._keep, key))
        return own

    def _keep(self, key: str, grad: Tensor) -> None:
        self.input_grads[key] = grad.detach().to("cpu", torch.float32, copy=True).contiguous()


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
