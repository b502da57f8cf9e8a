"""Which activations are recomputed or offloaded, as far as flags tell."""

from __future__ import annotations

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
