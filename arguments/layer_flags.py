"""The decoder layers that a record of flags describes, whichever flags describe them: of a GPT model or a hybrid one.

What a flag has to do with them is its `layers` (flag_properties.py).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from arguments.container import OPTIONS
from arguments.flag_properties import LayerNumbers
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
from arguments.spelling import to_command_line

UNKNOWN = "?"
"""Of a sublayer that a hybrid model cannot have."""

LAYER_FLAGS = frozenset(dest for dest, option in OPTIONS.items() if option.layers == "kinds")
"""Flags that describe the same layers otherwise in a GPT model and in a hybrid one."""
NUMBERED_FLAGS = MappingProxyType(
    {dest: option.layers for dest, option in OPTIONS.items() if isinstance(option.layers, LayerNumbers)}
)
"""Flags of layers by their number, which in a hybrid model is that of a sublayer."""
TRANSLATED_FLAGS = frozenset((*LAYER_FLAGS, *NUMBERED_FLAGS))
"""Flags with other values for the same layers in the other flavor, which the differences below compare."""


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


def dense_layers(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags with an MLP in the place of the experts of each layer."""
    pattern = record.get("hybrid_layer_pattern")
    dense = {"hybrid_layer_pattern": pattern.replace(MOE, MLP)} if isinstance(pattern, str) else {}
    return {**record, **dense, "num_experts": None}


def entry_of_layer(dest: str, value: int | Sequence[float] | None, number: int) -> float | None:
    """Return what the value of a flag of NUMBERED_FLAGS says of a layer (counted from 1), as an entry of its list."""
    numbers = NUMBERED_FLAGS[dest]
    if not value:
        return numbers.unset
    if isinstance(value, int):
        return None if numbers.entry is None else numbers.entry(number, value)
    return value[min(number, len(value)) - 1]


def numbered_entries(record: Mapping[str, Any], dest: str) -> tuple[float | None, ...]:
    """Return what a flag of NUMBERED_FLAGS says of all layers that it is about.

    Those are the attention of the decoder and then of multi-token prediction, or the experts of the decoder, as depths
    are never among the first layers.
    """
    letters = layer_letters(record)
    pattern = record.get("hybrid_layer_pattern")
    if NUMBERED_FLAGS[dest].of == "experts":
        numbers = [at if pattern else at // 2 for at, letter in enumerate(letters, start=1) if letter == MOE]
    elif pattern:
        letters += mtp_letters(pattern) * num_mtp_depths(record)
        numbers = [number for number, letter in enumerate(letters, start=1) if letter not in (MAMBA, MLP, MOE)]
    else:
        numbers = [*range(1, len(letters) // 2 + 1 + num_mtp_depths(record))]
    return tuple(entry_of_layer(dest, record.get(dest), number) for number in numbers)


def by_sublayer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of NUMBERED_FLAGS of a GPT model, as a hybrid model with the same layers has them."""
    numbers = range(2, len(layer_letters(record)) + 2)
    return {
        dest: 2 * record[dest]
        if NUMBERED_FLAGS[dest].counts
        else [entry_of_layer(dest, record[dest], number // 2) for number in numbers]
        for dest in _given_numbers(record)
    }


def by_layer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of NUMBERED_FLAGS of a hybrid model of pairs of sublayers, as a GPT model has them."""
    numbers = range(1, len(layer_letters(record)), 2)
    return {
        dest: record[dest] // 2
        if NUMBERED_FLAGS[dest].counts
        else [entry_of_layer(dest, record[dest], number) for number in numbers]
        for dest in _given_numbers(record)
    }


def _given_numbers(record: Mapping[str, Any]) -> list[str]:
    return [
        dest
        for dest, numbers in NUMBERED_FLAGS.items()
        if record.get(dest) and isinstance(record[dest], int if numbers.counts else int | list | tuple)
    ]


def depth_letters(record: Mapping[str, Any]) -> str:
    """Return one letter per sublayer of a multi-token-prediction depth, "" without depths."""
    if record.get("hybrid_layer_pattern"):
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
    """Return which flag gives a layer something else in two models without a `difference`, None if none does."""
    for dest, numbers in NUMBERED_FLAGS.items():
        one, other = numbered_entries(saved, dest), numbered_entries(here, dest)
        if any(a != b for a, b in zip(one, other)):  # one of them may have no multi-token prediction
            flag = OPTIONS[dest].spellings[0]
            translated = by_layer(saved) if saved.get("hybrid_layer_pattern") else by_sublayer(saved)
            words = to_command_line({dest: translated[dest]}) if translated.get(dest) else []
            part = "attention" if numbers.of == "attention" else "MoE layer"
            return (
                f"{flag} numbers its layers, which are sublayers in a hybrid model: one entry for each {part} is "
                f"{[*one]} in the checkpoint, and {[*other]} with {flag} {here.get(dest)} of this run. "
                + (f"Give {' '.join(words)}" if words else f"Leave {flag} out")
            )
    return None
