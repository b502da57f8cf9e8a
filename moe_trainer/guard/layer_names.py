"""Layers tell the trace that they run, so that a collective that hangs can be told from the same one of another layer.

Two hooks a layer: one before its forward, one on the gradient of its output, which comes when backward enters the layer. They
set an attribute each; about a microsecond a layer and microbatch.
"""

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from moe_trainer.parallel.trace import Trace


def name_layers(trace: Trace, layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Have each of the (name, module) pairs set `trace.layer` whenever its forward or backward begins."""
    for name, layer in layers:
        layer.register_forward_pre_hook(functools.partial(_before, trace, name))
        layer.register_forward_hook(functools.partial(_after, trace, name))


def _before(trace: Trace, name: str, layer: nn.Module, inputs: tuple) -> None:
    trace.layer = name


def _after(trace: Trace, name: str, layer: nn.Module, inputs: tuple, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(functools.partial(_backward, trace, f"backward of {name}", trace.microbatch))


def _backward(trace: Trace, place: str, microbatch: int | None, grad: Tensor) -> None:
    trace.layer, trace.microbatch = place, microbatch
