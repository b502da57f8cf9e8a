"""Names of the same layers in the two flavors of checkpoints: of GPT models and of hybrid models.

| GPT | hybrid |
|---|---|
| decoder.layers.i. of attention and its norms | decoder.layers.2i. |
| decoder.layers.i. of the MLP or the experts and their norms | decoder.layers.2i+1. |
| decoder.final_layernorm. | decoder.final_norm. |

The table holds for a pattern of pairs, such as *E*- : attention and then a feed-forward layer. Everything else is named
alike, and optimizer states have the names of their weights.
"""

import re
from collections.abc import Mapping
from typing import Any

from arguments.layer_pattern import ATTENTION, MLP, MOE, hybrid_letters, linear_layer_pattern, recorded_moe_layers

LAYER_FLAGS = frozenset({"num_layers", "moe_layer_freq", "hybrid_layer_pattern"})
"""Flags that describe the same layers otherwise in the other flavor."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_FEED_FORWARD = ("pre_mlp_layernorm.", "mlp.", "post_mlp_layernorm.")
_FINAL_NORMS = ("decoder.final_layernorm.", "decoder.final_norm.")  # by whether the model is hybrid


def is_hybrid(record: Mapping[str, Any]) -> bool:
    """Return whether a model with these flags, by destination, has the names of hybrid models."""
    return bool(record.get("hybrid_layer_pattern"))


def final_norm(hybrid: bool) -> str:
    """Return the prefix of the names of the norm after the last layer."""
    return _FINAL_NORMS[hybrid]


def to_flavor(name: str, hybrid: bool) -> str:
    """Return the name of a tensor in the given flavor, from its name in the other one."""
    if name.startswith(_FINAL_NORMS[not hybrid]):
        return _FINAL_NORMS[hybrid] + name.removeprefix(_FINAL_NORMS[not hybrid])
    layer = _LAYER.match(name)
    if layer is None:
        return name
    number = 2 * int(layer[1]) + layer[2].startswith(_FEED_FORWARD) if hybrid else int(layer[1]) // 2
    return f"decoder.layers.{number}.{layer[2]}"


def layer_letters(record: Mapping[str, Any]) -> str:
    """Return one letter per sublayer of the decoder, as --hybrid-layer-pattern has them.

    Raises:
        ValueError: if a list of layers does not have one entry per layer.
    """
    if is_hybrid(record):
        return hybrid_letters(record["hybrid_layer_pattern"])
    routed = recorded_moe_layers(record)
    variant = record.get("experimental_attention_variant")
    linear = linear_layer_pattern(len(routed), variant, record.get("linear_attention_freq"))
    softmax = {"dsa": "D", None: "+" if record.get("multi_latent_attention") else ATTENTION}
    return "".join(
        (("G" if variant == "gdn" else "?") if is_linear else softmax.get(None if any(linear) else variant, "?"))
        + (MOE if is_moe else MLP)
        for is_linear, is_moe in zip(linear, routed, strict=True)
    )


def difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return what the first layer is that differs between models of the two flavors, None if there is none."""
    one, other = layer_letters(saved), layer_letters(here)
    if one == other:
        return None
    number = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    first, second = (letters[number : number + 1] or "none" for letters in (one, other))
    return (
        f"as --hybrid-layer-pattern its layers are {one}, and those of this run {other}: layer {number} (from 0) is "
        f"{first} in the checkpoint and {second} here"
    )
