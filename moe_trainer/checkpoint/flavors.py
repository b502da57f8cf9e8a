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

from arguments.layer_flags import NUMBERED_FLAGS, attention_entries, layer_letters
from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX
from arguments.mtp import mtp_letters, num_mtp_depths

_SCALING = f"(?:{re.escape(SCALING_PREFIX)})?"
_LAYER = re.compile(rf"^({_SCALING}decoder\.layers\.)(\d+)\.(.+)$")
_IN_DEPTH = re.compile(rf"^({_SCALING}mtp\.layers\.\d+\.mtp_model_layer\.)(?:layers\.\d+\.)?(.+)$")
_FEED_FORWARD = ("mlp_hyper_connection.", "pre_mlp_layernorm.", "mlp.", "post_mlp_layernorm.")
_FINAL_NORMS = ("decoder.final_layernorm.", "decoder.final_norm.")  # by whether the model is hybrid


def is_hybrid(record: Mapping[str, Any]) -> bool:
    """Return whether a model with these flags, by destination, has the names of hybrid models."""
    return bool(record.get("hybrid_layer_pattern"))


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


def depth_letters(record: Mapping[str, Any]) -> str:
    """Return one letter per sublayer of a multi-token-prediction depth, "" without depths."""
    if is_hybrid(record):
        return mtp_letters(record["hybrid_layer_pattern"])
    return layer_letters(record)[-2:] if num_mtp_depths(record) else ""


def difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return what the first layer is that differs between models of the two flavors, None if there is none."""
    one, other = layer_letters(saved), layer_letters(here)
    if one == other:
        one, other = depth_letters(saved), depth_letters(here)
        if one == other or not (one and other):
            return None
        return (
            f"as --hybrid-layer-pattern the layers of a depth of multi-token prediction are {one}, and those of this "
            f"run {other}"
        )
    number = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    first, second = (letters[number : number + 1] or "none" for letters in (one, other))
    return (
        f"as --hybrid-layer-pattern its layers are {one}, and those of this run {other}: layer {number} (from 0) is "
        f"{first} in the checkpoint and {second} here"
    )


def numbering_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return which flag gives attention something else in two models without a `difference`, None if none does."""
    for dest in NUMBERED_FLAGS:
        one, other = attention_entries(saved, dest), attention_entries(here, dest)
        if any(a != b for a, b in zip(one, other)):  # one of them may have no multi-token prediction
            flag = "--" + dest.replace("_", "-")
            return (
                f"{flag} numbers its layers, which are sublayers in a hybrid model: one entry for each attention is "
                f"{[*one]} in the checkpoint, and {[*other]} with {flag} {here.get(dest)} of this run"
            )
    return None
