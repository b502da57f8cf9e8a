"""The decoder layers that a record of flags describes, whichever flags describe them."""

from collections.abc import Mapping, Sequence
from typing import Any

from arguments.layer_pattern import (
    ATTENTION,
    LATENT,
    MAMBA,
    MLP,
    MOE,
    hybrid_letters,
    recorded_linear_layers,
    recorded_moe_layers,
)
from arguments.mechanisms.sublayers import VARIANT, variant_of
from arguments.mtp import mtp_letters, num_mtp_depths

UNKNOWN = "?"
"""Of a sublayer that a hybrid model cannot have."""

LAYER_FLAGS = frozenset({"num_layers", "moe_layer_freq", "linear_attention_freq", "hybrid_layer_pattern"})
"""Flags that describe the same layers otherwise in a GPT model and in a hybrid one."""
NUMBERED_FLAGS = ("window_attn_skip_freq", "no_rope_freq", "rotary_base_per_layer")
"""Flags of the attention of a layer by its number, which in a hybrid model is that of a sublayer."""


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


def entry_of_layer(dest: str, value: int | Sequence[float] | None, number: int) -> float | None:
    """Return what the value of a flag of NUMBERED_FLAGS says of a layer (counted from 1), as an entry of its list."""
    if not value:
        return {"window_attn_skip_freq": 1, "no_rope_freq": 0}.get(dest)
    if isinstance(value, int):
        return int((number % value == 0) == (dest == "no_rope_freq"))
    return value[min(number, len(value)) - 1]


def attention_entries(record: Mapping[str, Any], dest: str) -> tuple[float | None, ...]:
    """Return what a flag of NUMBERED_FLAGS says of all attention: of the decoder, then of multi-token prediction."""
    letters, depths = layer_letters(record), num_mtp_depths(record)
    if pattern := record.get("hybrid_layer_pattern"):
        letters += mtp_letters(pattern) * depths
        numbers = [number for number, letter in enumerate(letters, start=1) if letter not in (MAMBA, MLP, MOE)]
    else:
        numbers = [*range(1, len(letters) // 2 + 1 + depths)]
    return tuple(entry_of_layer(dest, record.get(dest), number) for number in numbers)


def by_sublayer(record: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the flags of NUMBERED_FLAGS of a GPT model, as a hybrid model with the same layers has them."""
    numbers = range(2, len(layer_letters(record)) + 2)
    return {
        dest: [entry_of_layer(dest, record[dest], number // 2) for number in numbers]
        for dest in NUMBERED_FLAGS
        if record.get(dest) and isinstance(record[dest], int | list | tuple)
    }
