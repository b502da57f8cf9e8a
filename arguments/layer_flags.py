"""The decoder layers that a record of flags describes, whichever flags describe them."""

from collections.abc import Mapping
from typing import Any

from arguments.layer_pattern import (
    ATTENTION,
    LATENT,
    MLP,
    MOE,
    hybrid_letters,
    recorded_linear_layers,
    recorded_moe_layers,
)
from arguments.mechanisms.sublayers import VARIANT, variant_of

UNKNOWN = "?"
"""Of a sublayer that a hybrid model cannot have."""

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
    variant = variant_of(record)
    linear = recorded_linear_layers(record, len(routed))
    softmax = LATENT if record.get("multi_latent_attention") else ATTENTION
    if record.get(VARIANT) is not None and not any(linear):
        softmax = variant.letter if variant.selects_keys else UNKNOWN
    return "".join(
        ((variant.letter or UNKNOWN) if is_linear else softmax) + (MOE if is_moe else MLP)
        for is_linear, is_moe in zip(linear, routed, strict=True)
    )
