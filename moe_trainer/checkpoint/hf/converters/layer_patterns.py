"""Which layers have what, from the flags of a model; and lists of kinds of layers in config.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from arguments.layer_pattern import moe_layer_pattern, recorded_linear_layers
from moe_trainer.checkpoint.errors import CheckpointError


def layers_without_rope(flags: Mapping[str, Any]) -> list[bool]:
    """Return which layers have no rotary positions."""
    pattern, layers = flags.get("no_rope_freq"), flags["num_layers"]
    if isinstance(pattern, int):
        return [(layer + 1) % pattern == 0 for layer in range(layers)]
    return [bool(skips) for skips in pattern or [0] * layers]


def sliding_layers(flags: Mapping[str, Any]) -> list[bool]:
    """Return which layers have the window or the chunks, if there are any."""
    pattern, layers = flags.get("window_attn_skip_freq"), flags["num_layers"]
    if isinstance(pattern, int):
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    return [bool(slides) for slides in pattern or [1] * layers]


def windowed_layers(flags: Mapping[str, Any]) -> list[bool]:
    return sliding_layers(flags) if flags.get("window_size") else [False] * flags["num_layers"]


def layer_bases(flags: Mapping[str, Any]) -> list[float]:
    """Return the rotary base of every decoder layer."""
    bases = flags.get("rotary_base_per_layer")
    return [float(base) for base in bases or [flags.get("rotary_base") or 10000] * flags["num_layers"]]


def expert_layers(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    return moe_layer_pattern(flags["num_layers"], flags.get("num_experts"), flags.get("moe_layer_freq") or 1)


def linear_layers(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have linear attention."""
    return recorded_linear_layers(flags, flags["num_layers"])


def marks(kinds: Sequence[str], special: str, other: str = "full_attention", key: str = "layer_types") -> list[int]:
    """Return 1 for layers of the special kind, 0 for those of the other one; no third kind is accepted."""
    unknown = [kind for kind in kinds if kind not in (special, other)]
    if unknown:
        raise CheckpointError(f"config.json: {key} has {unknown[0]!r}; {special} or {other} is needed in every layer")
    return [int(kind == special) for kind in kinds]


def layer_type_names(pattern: Iterable[bool], special: str) -> list[str]:
    return [special if is_special else "full_attention" for is_special in pattern]
