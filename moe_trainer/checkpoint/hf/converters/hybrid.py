"""Converters of hybrid models: layers of one sublayer each, and Mamba-2."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from arguments.layer_pattern import ATTENTION, MAMBA, MLP, MOE, hybrid_letters
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.ops.state_space import NORM_EPS

_BLOCK_LETTERS = MappingProxyType(
    {
        "linear_attention": MAMBA,
        "full_attention": ATTENTION,
        "mlp": MLP,
        "moe": MOE,
        "mamba": MAMBA,
        "attention": ATTENTION,
    }
)
_OF_EXPERTS = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size")
NO_STEP_LIMIT = 1e-30
"""Smaller step sizes leave a state as it is, in fp32."""


def _read_block_types(config: Config) -> Flags:
    """Read the layers of one sublayer each, which files list by name or, older ones, as letters."""
    kinds, letters = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if kinds is None and letters is None:
        kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    key, found, known = (
        ("hybrid_override_pattern", letters, {letter: letter for letter in _BLOCK_LETTERS.values()})
        if kinds is None
        else ("layers_block_type", kinds, _BLOCK_LETTERS)
    )
    if not found or not isinstance(found, (str, list, tuple)) or any(each not in known for each in found):
        raise CheckpointError(f"config.json: {key} is {found!r}, and one of {', '.join(known)} per layer is needed")
    return _hybrid_flags([known[each] for each in found])


def _hybrid_flags(letters: Sequence[str]) -> Flags:
    flags: Flags = {"hybrid_layer_pattern": "".join(letters), "num_layers": len(letters)}
    if MOE not in letters:
        return flags | dict.fromkeys(_OF_EXPERTS)
    return flags | {"moe_layer_freq": [int(letter == MOE) for letter in letters]}


def _write_block_types(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write both spellings: programs read one or the other."""
    letters = _letters(flags)
    names = {letter: name for name, letter in list(_BLOCK_LETTERS.items())[::-1]}  # the first spelling of each
    return {
        "layers_block_type": [names[letter] for letter in letters],
        "hybrid_override_pattern": letters,
        "n_routed_experts": flags.get("num_experts") or 8,  # without experts any number, not null
        "moe_shared_expert_intermediate_size": flags.get("moe_shared_expert_intermediate_size") or 8,
    }


def _letters(flags: Mapping[str, Any]) -> str:
    letters = hybrid_letters(flags.get("hybrid_layer_pattern") or "")
    if not letters:
        raise CheckpointError("such a model has layers of one sublayer each; --hybrid-layer-pattern is needed")
    return letters


def _read_granite_layers(config: Config) -> Flags:
    """Read layers of Mamba-2 or attention, each followed by experts and a shared MLP, or by this MLP alone."""
    count = config["num_hidden_layers"]
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["linear_attention"] * count
    mixers = [_BLOCK_LETTERS.get(kind, "") for kind in kinds]
    if len(mixers) != count or not {*mixers} <= {MAMBA, ATTENTION}:
        raise CheckpointError(
            f"config.json: layer_types is {list(kinds)}, and linear_attention or full_attention for each of {count} "
            "layers is needed"
        )
    has_experts = bool(config.get("num_local_experts", 8))
    letters = [letter for mixer in mixers for letter in (mixer, MOE if has_experts else MLP)]
    heads, width = config.get("mamba_n_heads", 128), config.get("mamba_d_head", "auto")
    if width == "auto":
        width = config.get("mamba_expand", 2) * config["hidden_size"] // heads
    if type(width) is not int:
        raise CheckpointError(f"config.json: mamba_d_head is {width!r}, and a whole number or 'auto' is needed")
    rotates = config.get("position_embedding_type") == "rope"
    return _hybrid_flags(letters) | {
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "position_embedding_type": "rope" if rotates else "none",
        # without experts the other width is that of nothing
        "ffn_hidden_size": config["intermediate_size" if has_experts else "shared_intermediate_size"],
    }


def _write_granite_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    letters = _letters(flags)
    mixers, others = letters[::2], letters[1::2]
    if (
        len(mixers) != len(others)
        or not {*mixers} <= {MAMBA, ATTENTION}
        or others
        not in (
            MOE * len(others),
            MLP * len(others),
        )
    ):
        raise CheckpointError(
            f"--hybrid-layer-pattern {letters}: such a model has Mamba-2 (M) or attention (*), and after each of them "
            "experts (E), or after each a feed-forward layer (-)"
        )
    width, heads, hidden = flags["mamba_head_dim"], state_space_heads(flags), flags["hidden_size"]
    if heads * width % hidden:
        raise CheckpointError(
            f"--mamba-num-heads {heads} x --mamba-head-dim {width}: such a model needs a multiple of --hidden-size "
            f"{hidden}"
        )
    names = {MAMBA: "linear_attention", ATTENTION: "full_attention"}
    return {
        "num_hidden_layers": len(mixers),
        "layer_types": [names[letter] for letter in mixers],
        "num_local_experts": flags.get("num_experts") or 0,
        "shared_intermediate_size": flags.get("moe_shared_expert_intermediate_size") or flags["ffn_hidden_size"],
        "position_embedding_type": "rope" if flags.get("position_embedding_type") == "rope" else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_expand": heads * width // hidden,
    }


def _read_state_space(config: Config) -> Flags:
    """Read what Mamba-2 layers must have; here nothing limits their step sizes, as in Megatron-Core."""
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    if (low, high) != (0.0, math.inf):
        raise CheckpointError(
            f"config.json: time_step_limit is {[low, high]}, and [0.0, Infinity], no limit, is needed"
        )
    key = "layer_norm_epsilon" if "layer_norm_epsilon" in config else "rms_norm_eps"
    if config.get(key, NORM_EPS) != NORM_EPS:
        raise CheckpointError(
            f"config.json: {key} is {config[key]}, and {NORM_EPS} is needed, that of the gated norm of Mamba layers"
        )
    return {}


def _write_state_space(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"mamba_num_heads": state_space_heads(flags), "time_step_min": NO_STEP_LIMIT}


def state_space_heads(flags: Mapping[str, Any]) -> int:
    """Return the heads of a Mamba-2 layer."""
    return flags.get("mamba_num_heads") or 2 * flags["hidden_size"] // flags["mamba_head_dim"]


BLOCK_TYPES = ConfigConverter(_read_block_types, _write_block_types)
GRANITE_LAYERS = ConfigConverter(_read_granite_layers, _write_granite_layers)
STATE_SPACE = ConfigConverter(_read_state_space, _write_state_space)
