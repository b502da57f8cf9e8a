"""Hooks on modules, for everything that looks at intermediate results.

A recomputed module runs twice with the same results. An observer of every call passes the activation policy of the
module's chunk, which excludes the second run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from moe_trainer.memory.activations import ActivationPolicy


class ModuleTracer:
    """Hooks on modules and parameters until `stop`."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def on_inputs(
        self, module: nn.Module, look: Callable[[tuple], tuple | None], policy: ActivationPolicy | None = None
    ) -> None:
        """Call `look(inputs)` before every forward pass of a module. What it returns replaces the inputs."""
        self._hooks.append(module.register_forward_pre_hook(partial(_call_unless_recomputing, look, policy)))

    def on_output(
        self, module: nn.Module, look: Callable[[tuple, Any], None], policy: ActivationPolicy | None = None
    ) -> None:
        """Call `look(inputs, output)` after every forward pass of a module."""
        self._hooks.append(module.register_forward_hook(partial(_call_unless_recomputing, look, policy)))

    def on_weight_grad(self, param: Parameter, look: Callable[[Tensor | None], None]) -> None:
        """Call `look(grad)` with every gradient that is computed for a parameter."""
        self._hooks.append(param.register_hook(look))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _call_unless_recomputing(look: Callable, policy: ActivationPolicy | None, module: nn.Module, *values: Any) -> Any:
    return None if policy is not None and policy.is_recomputing else look(*values)


def tap_gradients(inputs: tuple, look: Callable[[int, Tensor], None]) -> tuple:
    """Return a module's inputs with a view of each that requires a gradient, which `look(index, grad)` receives.

    It is the gradient of this module's input, not the sum over all readers of the tensor. A view shares the storage,
    by which recompute and offload identify tensors.
    """

    def tap(index: int, value: object) -> object:
        if not (is_floating(value) and value.requires_grad and torch.is_grad_enabled()):
            return value
        view = value.view_as(value)
        view.register_hook(partial(look, index))
        return view

    return tuple(tap(index, value) for index, value in enumerate(inputs))


def is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point()
