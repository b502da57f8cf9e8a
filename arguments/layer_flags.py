"""The decoder layers that a record of flags describes, whichever flags describe them."""

from collections.abc import Mapping
from typing import Any

from arguments.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    LATENT,
    MLP,
    MOE,
    SPARSE,
    hybrid_letters,
    linear_layer_pattern,
    recorded_moe_layers,
)

LAYER_FLAGS = frozenset({"num_layers", "moe_layer_freq", "linear_attention_freq", "hybrid_layer_pattern"})
"""Flags that describe the same layers otherwise in a GPT model and in a hybrid one."""


def layer_letters(record: Mapping[str, Any]) -> str:
    """Return one letter per sublayer of the decoder, as --hybrid-layer-pattern has them.

    Raises:
        ValueError: if a list of layers does not have one entry per layer.
    """
    if record.get("hybrid_layer_pattern"):
        return hybrid_letters(record["hybrid_layer_pattern"])
    routed = recorded_moe_layers(record)
    variant = record.get("experimental_attention_variant")
    linear = linear_layer_pattern(len(routed), variant, record.get("linear_attention_freq"))
    softmax = {"dsa": SPARSE, None: LATENT if record.get("multi_latent_attention") else ATTENTION}
    return "".join(
        ((DELTA_NET if variant == "gdn" else "?") if is_linear else softmax.get(None if any(linear) else variant, "?"))
        + (MOE if is_moe else MLP)
        for is_linear, is_moe in zip(linear, routed, strict=True)
    )
