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
_LARGEST_FP32 = 3.4e38
_NO_FLOOR = 1e-30
"""Smaller step sizes leave a state as it is, in fp32."""
_NO_CEILING = 1e308
"""Written for infinity, which JSON has no number for."""


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
    if not {*letters} <= {*names}:
        raise CheckpointError(f"--hybrid-layer-pattern {letters}: such a model has the letters {', '.join(names)} only")
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
    """Read the limits of step sizes of Mamba-2 layers, and check the epsilon of their norm."""
    return _check_norms(config) | _limit_flags(*_step_limits(config))


def _write_state_space(flags: Mapping[str, Any]) -> dict[str, Any]:
    low, high = flags.get("mamba_step_size_min"), flags.get("mamba_step_size_max")
    limits = {} if low is high is None else {"time_step_limit": [low or 0.0, high or _NO_CEILING]}
    return {"mamba_num_heads": state_space_heads(flags), **limits}


def _read_floored_state_space(config: Config) -> Flags:
    """Read the same where `time_step_min` is the limit in transformers, which does not read `time_step_limit`.

    Raises:
        CheckpointError: if `time_step_limit` limits more.
    """
    (low, high), floor = _step_limits(config), config.get("time_step_min", 0.001) or 0.0
    if low > floor or high < _LARGEST_FP32:
        raise CheckpointError(
            f"config.json: time_step_limit is {[low, high]}, and transformers, which does not read it, takes "
            f"time_step_min {floor} and no upper limit"
        )
    return _check_norms(config) | _limit_flags(floor, math.inf)


def _write_floored_state_space(flags: Mapping[str, Any]) -> dict[str, Any]:
    if flags.get("mamba_step_size_max") is not None:
        raise CheckpointError(
            f"--mamba-step-size-max {flags['mamba_step_size_max']}: such a model has a lower limit only"
        )
    floor = flags.get("mamba_step_size_min") or _NO_FLOOR
    return {"mamba_num_heads": state_space_heads(flags), "time_step_min": floor}


def _step_limits(config: Config) -> tuple[float, float]:
    limits = config.get("time_step_limit") or (0.0, math.inf)
    is_pair = isinstance(limits, (list, tuple)) and len(limits) == 2
    if not is_pair or not all(type(each) in (int, float) for each in limits) or not 0 <= limits[0] < limits[1]:
        raise CheckpointError(f"config.json: time_step_limit is {limits!r}, and two rising numbers are needed")
    return limits[0], limits[1]


def _limit_flags(low: float, high: float) -> Flags:
    return {
        "mamba_step_size_min": low if low > _NO_FLOOR else None,
        "mamba_step_size_max": high if high < _LARGEST_FP32 else None,
    }


def _check_norms(config: Config) -> Flags:
    for key in ("layer_norm_epsilon" if "layer_norm_epsilon" in config else "rms_norm_eps", "norm_eps"):
        if config.get(key, NORM_EPS) != NORM_EPS:
            raise CheckpointError(
                f"config.json: {key} is {config[key]}, and {NORM_EPS} is needed, that of the gated norm of Mamba layers"
            )
    return {}


def state_space_heads(flags: Mapping[str, Any]) -> int:
    """Return the heads of a Mamba-2 layer."""
    return flags.get("mamba_num_heads") or 2 * flags["hidden_size"] // flags["mamba_head_dim"]


BLOCK_TYPES = ConfigConverter(_read_block_types, _write_block_types)
GRANITE_LAYERS = ConfigConverter(_read_granite_layers, _write_granite_layers)
STATE_SPACE = ConfigConverter(_read_state_space, _write_state_space)
FLOORED_STATE_SPACE = ConfigConverter(_read_floored_state_space, _write_floored_state_space)
