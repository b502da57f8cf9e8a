"""Names of the same layers in the two flavors of checkpoints: of GPT models and of hybrid models.

| GPT | hybrid |
|---|---|
| decoder.layers.i. of attention, its norms and its hyper-connection | decoder.layers.2i. |
| decoder.layers.i. of the MLP or the experts, likewise | decoder.layers.2i+1. |
| mtp.layers.d.mtp_model_layer. of the same two | mtp.layers.d.mtp_model_layer.layers.0. and .1. |
| decoder.final_layernorm. | decoder.final_norm. |

The table holds for a pattern of pairs, such as *E*- : attention and then a feed-forward layer. Everything else is named
alike, and optimizer states have the names of their weights.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX

_SCALING = f"(?:{re.escape(SCALING_PREFIX)})?"
_LAYER = re.compile(rf"^({_SCALING}decoder\.layers\.)(\d+)\.(.+)$")
_IN_DEPTH = re.compile(rf"^({_SCALING}mtp\.layers\.\d+\.mtp_model_layer\.)(?:layers\.\d+\.)?(.+)$")
_FEED_FORWARD = ("mlp_hyper_connection.", "pre_mlp_layernorm.", "mlp.", "post_mlp_layernorm.")
_FINAL_NORMS = ("decoder.final_layernorm.", "decoder.final_norm.")  # by whether the model is hybrid


def is_hybrid(record: Mapping[str, Any]) -> bool:
    """Return whether a model with these flags, by destination, has the names of hybrid models."""
    return bool(record.get("hybrid_layer_pattern"))


def is_other_flavor(saved: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's flags, where it has them, describe a model of the other flavor than a run's."""
    return "num_layers" in saved and is_hybrid(saved) != is_hybrid(here)


def has_hybrid_names(names: Iterable[str]) -> bool:
    """Return whether the names of a model's tensors are those of a hybrid model."""
    return any(name.startswith(final_norm(True)) for name in names)


def final_norm(hybrid: bool) -> str:
    """Return the prefix of the names of the norm after the last layer."""
    return _FINAL_NORMS[hybrid]


def to_flavor(name: str, hybrid: bool) -> str:
    """Return the name of a tensor in the given flavor, from its name in the other one."""
    if name.startswith(_FINAL_NORMS[not hybrid]):
        return _FINAL_NORMS[hybrid] + name.removeprefix(_FINAL_NORMS[not hybrid])
    inside = _IN_DEPTH.match(name)
    if inside is not None:
        return inside[1] + (f"layers.{int(inside[2].startswith(_FEED_FORWARD))}." if hybrid else "") + inside[2]
    layer = _LAYER.match(name)
    if layer is None:
        return name
    prefix, number, rest = layer[1], int(layer[2]), layer[3]
    number = 2 * number + rest.startswith(_FEED_FORWARD) if hybrid else number // 2
    return f"{prefix}{number}.{rest}"
