"""Converters of linear attention: gated DeltaNet of Qwen3-Next, short convolutions."""

from collections.abc import Mapping
from typing import Any

from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
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


def _read_conv_layers(config: Config) -> Flags:
    """Read which layers have short convolutions."""
    return {"linear_attention_freq": marks(config["layer_types"], "conv")}


def _write_conv_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": layer_type_names(linear_layers(flags), "conv")}


NEXT = ConfigConverter(_read_next, _write_next)
CONV_LAYERS = ConfigConverter(_read_conv_layers, _write_conv_layers)
