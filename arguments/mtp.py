"""Multi-token prediction of a model: number of depths and their layers, from the flags of either kind of model."""

from collections.abc import Mapping
from typing import Any

DEPTH = "/"
"""What begins a depth in --hybrid-layer-pattern, after the layers of the decoder."""


def mtp_depths(pattern: str) -> tuple[str, ...]:
    """Return the letters of every depth of a --hybrid-layer-pattern; nothing if none has a letter."""
    depths = tuple(pattern.split(DEPTH)[1:])
    return depths if any(depths) else ()


def mtp_letters(pattern: str) -> str:
    """Return one letter per layer of a depth; all depths have the same."""
    return next(iter(mtp_depths(pattern)), "")


def num_mtp_depths(flags: Mapping[str, Any]) -> int:
    """Return the number of depths that flags describe, by destination; some may be missing, or text.

    A hybrid model has them in its pattern; of another --mtp-num-layers is their number.
    """
    pattern = flags.get("hybrid_layer_pattern")
    return len(mtp_depths(pattern)) if isinstance(pattern, str) and pattern else int(flags.get("mtp_num_layers") or 0)


def without_mtp(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags, by destination, of the same model without multi-token prediction."""
    pattern = flags.get("hybrid_layer_pattern")
    decoder = {"hybrid_layer_pattern": pattern.partition(DEPTH)[0]} if isinstance(pattern, str) else {}
    return {**flags, **decoder, "mtp_num_layers": None}
