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
    moe_layer_pattern,
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
    num_layers, freq = int(record["num_layers"]), record.get("moe_layer_freq") or 1
    routed = moe_layer_pattern(
        num_layers, int(record.get("num_experts") or 0), freq if isinstance(freq, (list, tuple)) else int(freq)
    )
    variant = record.get("experimental_attention_variant")
    linear = linear_layer_pattern(num_layers, variant, record.get("linear_attention_freq"))
    softmax = {"dsa": SPARSE, None: LATENT if record.get("multi_latent_attention") else ATTENTION}
    return "".join(
        ((DELTA_NET if variant == "gdn" else "?") if is_linear else softmax.get(None if any(linear) else variant, "?"))
        + (MOE if is_moe else MLP)
        for is_linear, is_moe in zip(linear, routed, strict=True)
    )
