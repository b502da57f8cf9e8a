"""Which parts of a layer are recomputed, sent to the host, or captured as graphs: what the flags say, for the model and for the planner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments.training import TrainingArgs


def recomputed_parts(training: TrainingArgs) -> frozenset[str]:
    """Names of the parts that run again in backward: "full" for spans of layers, "mtp", or those of --recompute-modules."""
    if training.recompute_granularity == "full":
        return frozenset({"full", "mtp"} if training.recompute_method == "uniform" else {"full"})
    return frozenset(training.recompute_modules or ()) if training.recompute_granularity == "selective" else frozenset()


def offloaded_parts(training: TrainingArgs) -> frozenset[str]:
    """Names of the parts of which what they save goes to the host: "layer" for whole layers, or those of --offload-modules."""
    if training.cpu_offloading_num_layers:
        return frozenset({"layer"})
    if not training.fine_grained_activation_offloading:
        return frozenset()
    parts = set(training.offload_modules)
    return frozenset(parts | {"expert_fc1", "moe_act"} if "fused_group_mlp" in parts else parts)


def is_offloaded(number: int, fraction: float) -> bool:
    """Does the group with this number, of those that a part saves in one pass, go to the host? fraction: --activation-offload-fraction.

    memory/offload.py decides the same group by group.
    """
    return math.floor((number + 1) * fraction + 1e-9) > math.floor(number * fraction + 1e-9)


def captured_parts(training: TrainingArgs) -> frozenset[str]:
    """Names of the parts of a layer that are captured as CUDA graphs: those of --cuda-graph-modules, "layer" for whole layers, or
    "iteration", where they are parts of something larger."""
    if training.cuda_graph_impl == "full_iteration":
        return frozenset({"iteration"})
    if training.cuda_graph_impl == "none":
        return frozenset()
    return frozenset(training.cuda_graph_modules) or frozenset({"layer"})


def recomputed_spans(training: TrainingArgs, num_layers: int) -> tuple[tuple[int, int, bool], ...]:
    """(first, stop, is it recomputed) of the runs of layers that a chunk of so many layers goes through.

    uniform: every --recompute-num-layers layers are one region; block: the first --recompute-num-layers layers are one each.
    """
    step = training.recompute_num_layers or 1
    if training.recompute_granularity != "full":
        return ((0, num_layers, False),)
    if training.recompute_method == "uniform":
        return tuple((first, min(first + step, num_layers), True) for first in range(0, num_layers, step))
    return tuple((index, index + 1, index < step) for index in range(num_layers))
