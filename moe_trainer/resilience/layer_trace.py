"""Hooks that tell the trace which layer runs, so that a hang report names the layer of a collective.

Two hooks per layer: one before its forward, one on the gradient of its output, which runs when backward enters the
layer. Each sets an attribute, which costs about a microsecond per layer and microbatch.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from moe_trainer.parallel.trace import Trace


def register_layer_trace_hooks(trace: Trace, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Set `trace.layer` whenever the forward or backward of one of the (name, module) pairs begins."""
    for name, layer in layers:
        layer.register_forward_pre_hook(functools.partial(_before_forward, trace, name))
        layer.register_forward_hook(functools.partial(_after_forward, trace, name))


def _before_forward(trace: Trace, name: str, layer: nn.Module, inputs: tuple) -> None:
    trace.layer = name


def _after_forward(trace: Trace, name: str, layer: nn.Module, inputs: tuple, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(functools.partial(_before_backward, trace, f"backward of {name}", trace.microbatch))


def _before_backward(trace: Trace, place: str, microbatch: int | None, grad: Tensor) -> None:
    trace.layer, trace.microbatch = place, microbatch
