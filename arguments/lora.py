"""Which linears get low-rank adapters (--lora-dim), by their global names. No torch: estimates count them too."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

ALL_LINEAR = "all-linear"
LINEARS = (
    "linear_qkv",
    "linear_proj",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_gate",
    "linear_fc1",
    "linear_fc2",
    "in_proj",
    "out_proj",
    "decay_down_proj",
    "decay_up_proj",
    "gate_down_proj",
    "gate_up_proj",
)
"""Linears of attention (softmax and linear), Mamba-2, feed-forward layers and experts: what `all-linear` selects."""

LORA_A, LORA_B = "lora_A", "lora_B"
"""Names of an adapter's two linears inside its linear."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its global name or its key in a checkpoint, belongs to an adapter."""
    return f".{LORA_A}.weight" in name or f".{LORA_B}.weight" in name


def is_lora_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether a linear of a decoder layer gets an adapter.

    Args:
        name: global name, e.g. "decoder.layers.0.self_attention.linear_qkv". That of all experts' linears has no number
            of an expert: "decoder.layers.0.mlp.experts.linear_fc1".
        targets: --lora-target-modules. A word without a dot is the last part of a name; others are patterns of names.
    """
    leaf = name.rpartition(".")[2]
    if not name.startswith("decoder.layers.") or leaf not in LINEARS:
        return False
    return any(target == ALL_LINEAR or fnmatchcase(name if "." in target else leaf, target) for target in targets)
