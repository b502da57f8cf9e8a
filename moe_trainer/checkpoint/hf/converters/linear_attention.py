"""Converters of linear attention: gated DeltaNet of Qwen3-Next, Kimi delta attention, short convolutions."""

from collections.abc import Mapping
from typing import Any

from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.experts import FIRST_DENSE
from moe_trainer.checkpoint.hf.converters.layer_patterns import layer_type_names, linear_layers, marks


def _read_next(config: Config) -> Flags:
    """Read the layers with linear attention. By default a quarter of each head is rotated."""
    layer_types, every = config.get("layer_types"), config.get("full_attention_interval") or 4
    if layer_types is None:
        layer_types = layer_type_names(
            ((layer + 1) % every != 0 for layer in range(config["num_hidden_layers"])), "linear_attention"
        )
    pattern = marks(layer_types, "linear_attention")
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
    return {"linear_attention_freq": pattern, "rotary_percent": float(share)}


def _write_next(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": layer_type_names(linear_layers(flags), "linear_attention"),
        "partial_rotary_factor": flags.get("rotary_percent", 1.0),
    }


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


def _read_conv_layers(config: Config) -> Flags:
    """Read which layers have short convolutions."""
    return {"linear_attention_freq": marks(config["layer_types"], "conv")}


def _write_conv_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": layer_type_names(linear_layers(flags), "conv")}


NEXT = ConfigConverter(_read_next, _write_next)
KIMI_LINEAR = ConfigConverter(_read_kimi_linear, _write_kimi_linear)
CONV_LAYERS = ConfigConverter(_read_conv_layers, _write_conv_layers)
