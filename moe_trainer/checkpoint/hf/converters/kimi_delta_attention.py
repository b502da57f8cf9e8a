"""Converters of Kimi delta attention: Kimi-Linear and Ling 3.0."""

from collections.abc import Mapping
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.experts import FIRST_DENSE
from moe_trainer.checkpoint.hf.converters.layer_patterns import layer_type_names, linear_layers, marks


def _read_kimi_linear(config: Config) -> Flags:
    """Read which layers have Kimi delta attention, and its sizes: from keys of transformers or from one table."""
    table, layers = config.get("linear_attn_config") or {}, range(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is not None:
        pattern = [int(kind == "linear_attention") for kind in kinds]
    elif "kda_layers" in table:  # counted from 1
        pattern = [int(layer + 1 in table["kda_layers"]) for layer in layers]
    else:
        pattern = [int(not layer or layer % 4 != 0) for layer in layers]
    heads = table.get("num_heads", config.get("linear_num_heads", 32))
    width = table.get("head_dim", config.get("linear_head_dim", 128))
    return {
        "linear_attention_freq": pattern,
        "linear_conv_kernel_dim": table.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        "kda_gate_rank": width,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
    }


def _write_kimi_linear(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write the table of the published models, which vLLM reads too."""
    linear = linear_layers(flags)
    return {
        "linear_attn_config": {
            "kda_layers": [layer + 1 for layer, is_kda in enumerate(linear) if is_kda],
            "full_attn_layers": [layer + 1 for layer, is_kda in enumerate(linear) if not is_kda],
            "num_heads": flags["linear_num_key_heads"],
            "head_dim": flags["linear_key_head_dim"],
            "short_conv_kernel_size": flags["linear_conv_kernel_dim"],
        },
        **FIRST_DENSE.write(flags),
    }


def _read_bailing_hybrid(config: Config) -> Flags:
    """Read which layers have Kimi delta attention, its sizes, and its bound of decays.

    Raises:
        CheckpointError: for a model with lightning attention, which has the same type (Ling and Ring 2.5), and for
            limits of SwiGLU in single layers.
    """
    classes = [name for name in config.get("architectures") or () if "MoeV2" in name]
    if classes:
        raise CheckpointError(
            f"config.json: architectures has {classes[0]}, whose linear attention is lightning attention, which is not "
            "built; a model with Kimi delta attention is needed (BailingMoeV3ForCausalLM)"
        )
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(config.get(key) or ()):
            raise CheckpointError(
                f"config.json: {key} limits SwiGLU in single layers, which is not built. transformers ignores the key: "
                "without it, the model is converted as transformers computes it"
            )
    layers, every, kinds = config["num_hidden_layers"], config.get("layer_group_size", 6), config.get("layer_types")
    if kinds is None and layers % every:
        raise CheckpointError(
            f"config.json: {layers} layers are not whole groups of layer_group_size {every}, and programs differ in "
            "what the last layers are; layer_types is needed"
        )
    pattern = [int((layer + 1) % every != 0) for layer in range(layers)]
    if kinds is not None:
        pattern = marks(kinds, "linear_attention")
    heads = config.get("linear_num_heads", config["num_attention_heads"])
    width = config.get("linear_head_dim", config.get("head_dim", 128))
    return {
        "rotary_percent": 1.0,  # of the rotary part of a head, whatever partial_rotary_factor says
        "linear_attention_freq": pattern,
        "linear_conv_kernel_dim": config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4)),
        "kda_decay_lower_bound": config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
    }


def _write_bailing_hybrid(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write the keys of the published models, and those of transformers that they lack."""
    linear, bound = linear_layers(flags), flags.get("kda_decay_lower_bound")
    every = linear.index(False) + 1 if False in linear else 1
    group = (True,) * (every - 1) + (False,)
    is_regular = linear == group * (len(linear) // every)
    return {
        "layer_types": layer_type_names(linear, "linear_attention"),
        **({"layer_group_size": every} if is_regular else {}),
        "head_dim": flags["linear_key_head_dim"],
        "linear_num_heads": flags["linear_num_key_heads"],
        "short_conv_kernel_size": flags["linear_conv_kernel_dim"],
        "kda_safe_gate": bound is not None,
        **({} if bound is None else {"kda_lower_bound": bound}),
        **FIRST_DENSE.write(flags),
    }


KIMI_LINEAR = ConfigConverter(_read_kimi_linear, _write_kimi_linear)
BAILING_HYBRID = ConfigConverter(_read_bailing_hybrid, _write_bailing_hybrid)
