"""Convert rotary position settings of config.json: base, rotated share, and the scalings yarn, llama3 and linear."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.ops.rope import yarn_mscale

_LLAMA3_SCALING = MappingProxyType({"low_freq_factor": 1.0, "original_max_position_embeddings": 8192})


def read_rotary(config: Config) -> Flags:
    """Convert config.json to flags.

    Raises:
        CheckpointError: for a scaling that no flag supports.
    """
    rope = _rotary_table(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if float(base) != int(base):
        raise CheckpointError(f"config.json: rope_theta {base} is not an integer, as --rotary-base needs")
    flags: Flags = {"rotary_base": int(base)}
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if not share and config.get("rotary_dim"):  # files of MiniMax-M2
        share = config["rotary_dim"] / config["head_dim"]
    latent = "kv_lora_rank" in config
    rotated = config.get("qk_rope_head_dim") or 0
    if latent and share == rotated / (rotated + config.get("qk_nope_head_dim", 1)):
        share = None  # of whole heads: the sizes say it already
    if share not in (None, 1, 1.0):
        flags["rotary_percent"] = float(share)
    if latent:
        flags["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        if not rope.get("factor"):
            raise CheckpointError("config.json: the rotary scaling yarn has no factor")
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        _check_attention_factor(rope, (rope["mscale"], rope["mscale_all_dim"]) if both else (1.0, 0.0))
        if not latent:
            flags["position_embedding_type"] = "yarn"
        if latent and rope.get("mscale_all_dim") and not both:
            raise CheckpointError("config.json: mscale_all_dim of the rotary scaling is given, and mscale is not")
        return flags | {
            "rotary_scaling_factor": float(rope["factor"]),
            "mscale": float(rope["mscale"]) if both else 1.0,
            "mscale_all_dim": float(rope["mscale_all_dim"]) if both else 0.0,
            "yarn_original_max_position_embeddings": rope.get("original_max_position_embeddings"),
            "yarn_beta_fast": float(rope.get("beta_fast") or 32),
            "yarn_beta_slow": float(rope.get("beta_slow") or 1),
            "yarn_correction_range_round_to_int": rope.get("truncate", True),
        }
    if kind == "linear" and not latent and float(rope["factor"]) == int(rope["factor"]):
        return flags | {"rotary_seq_len_interpolation_factor": int(rope["factor"])}
    if kind == "llama3" and not latent:
        if any(float(rope.get(name) or value) != value for name, value in _LLAMA3_SCALING.items()):
            raise CheckpointError(
                f"config.json: --use-rope-scaling means {dict(_LLAMA3_SCALING)}, and the model has {rope}"
            )
        high = float(rope.get("high_freq_factor", 4.0))
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
        return flags | ({} if high == 4.0 else {"rope_scaling_high_freq_factor": high})
    if kind == "longrope":
        raise CheckpointError(
            "config.json: the rotary scaling longrope (short_factor, long_factor) has no flag: a factor for every "
            "channel, which changes with the length of the sequence"
        )
    if kind != "default":
        raise CheckpointError(f"config.json: no flag stands for the rotary scaling {rope}")
    return flags


def _rotary_table(config: Config) -> dict[str, Any]:
    """Return the table of rotary settings; without a length before scaling, that is the model's, as in transformers."""
    key = "original_max_position_embeddings"
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    lengths = (config.get(key), rope.get(key), config.get("max_position_embeddings"))
    return rope | {key: next((length for length in lengths if length is not None), None)}


def _check_attention_factor(rope: Config, mscales: tuple[float, float]) -> None:
    given, factor = rope.get("attention_factor"), float(rope["factor"])
    computed = yarn_mscale(factor, mscales[0]) / yarn_mscale(factor, mscales[1])
    if given is not None and not math.isclose(given, computed, rel_tol=1e-6):
        raise CheckpointError(
            f"config.json: attention_factor of the rotary scaling is {given}, which has no flag; {computed:.6g} is "
            "needed, which follows from factor, mscale and mscale_all_dim"
        )


def read_alpha_rotary(config: Config) -> Flags:
    """Convert a dynamic scaling with a fixed `alpha`, which is another base.

    Rounded, the base differs by less than fp32 resolves.
    """
    rope = _rotary_table(config)
    if rope.get("alpha") and (rope.get("rope_type") or rope.get("type")) == "dynamic":
        base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        base = round(base * rope["alpha"] ** (width / (width - 2)))
        rope = {**rope, "rope_theta": base, "rope_type": "default"}
    return read_rotary({**config, "rope_scaling": None, "rope_parameters": rope})


def read_rotary_and_temperature(config: Config) -> Flags:
    """Convert positions and the factor of queries that Mistral 4 has among the rotary settings."""
    rope, flags = _rotary_table(config), read_rotary(config)
    if rope.get("llama_4_scaling_beta"):
        flags |= {
            "attn_temperature_tuning": "mistral4",
            "attn_temperature_scale": float(rope["llama_4_scaling_beta"]),
            "attn_temperature_floor": rope["original_max_position_embeddings"],
        }
    return flags


def write_rotary_and_temperature(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write the table that the library reads, without which it takes that of one model."""
    config = write_explicit_rotary(flags)
    table = {"rope_theta": config["rope_theta"], **config["rope_scaling"]}
    is_tuned = flags.get("attn_temperature_tuning") == "mistral4"
    table["llama_4_scaling_beta"] = flags.get("attn_temperature_scale", 0.1) if is_tuned else 0.0
    table.setdefault("original_max_position_embeddings", flags.get("attn_temperature_floor", 8192))
    return {"rope_parameters": table}


def write_rotary(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert flags to config.json, with the scaling under both of its key names."""
    config: dict[str, Any] = {"rope_theta": float(flags.get("rotary_base") or 10000), "rope_scaling": None}
    latent = flags.get("multi_latent_attention")
    if flags.get("rotary_percent") not in (None, 1.0):
        config["partial_rotary_factor"] = flags["rotary_percent"]
    if (flags.get("rope_type") != "rope") if latent else flags.get("position_embedding_type") == "yarn":
        scaling = {
            "factor": flags.get("rotary_scaling_factor") or 1.0,
            "original_max_position_embeddings": flags.get("yarn_original_max_position_embeddings") or 4096,
            "beta_fast": flags.get("yarn_beta_fast") or 32.0,
            "beta_slow": flags.get("yarn_beta_slow") or 1.0,
        }
        if flags.get("mscale_all_dim"):
            scaling |= {"mscale": flags.get("mscale", 1.0), "mscale_all_dim": flags["mscale_all_dim"]}
        if flags.get("yarn_correction_range_round_to_int") is False:
            scaling["truncate"] = False
        config["rope_scaling"] = _typed("yarn", scaling)
    elif flags.get("use_rope_scaling") and not latent:
        scaling = {"factor": flags["rope_scaling_factor"], **_LLAMA3_SCALING}
        scaling["high_freq_factor"] = flags.get("rope_scaling_high_freq_factor", 4.0)
        config["rope_scaling"] = _typed("llama3", scaling)
    elif (flags.get("rotary_seq_len_interpolation_factor") or 1) != 1 and not latent:
        factor = float(flags["rotary_seq_len_interpolation_factor"])
        config["rope_scaling"] = _typed("linear", {"factor": factor})
    return config


def _typed(kind: str, scaling: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "rope_type": kind, **scaling}


def write_explicit_rotary(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write the scaling even if there is none, for a family in which null means yarn."""
    config = write_rotary(flags)
    return config | {"rope_scaling": config["rope_scaling"] or _typed("default", {})}


ROPE = ConfigConverter(read_rotary, write_rotary)
ALPHA_ROPE = ConfigConverter(read_alpha_rotary, write_rotary)
EXPLICIT_ROPE = ConfigConverter(read_rotary, write_explicit_rotary)
TEMPERED_ROPE = ConfigConverter(read_rotary_and_temperature, write_rotary_and_temperature)
