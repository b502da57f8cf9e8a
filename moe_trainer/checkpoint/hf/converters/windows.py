"""Converters of sliding windows: which layers have one."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.layer_patterns import layer_type_names, marks, sliding_layers, windowed_layers
from moe_trainer.checkpoint.hf.converters.rotary_by_layer import read_typed_rotary, write_typed_rotary


def _read_window(config: Config) -> Flags:
    """Read the window of Mistral and Mixtral: every layer has it, unless `layer_types` differs."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    pattern = [1] if kinds is None else marks(kinds, "sliding_attention")
    if not window or not any(pattern):
        return {}
    return {"window_size": (window - 1, 0)} | ({} if all(pattern) else {"window_attn_skip_freq": pattern})


def _read_listed_window(config: Config, window: int, slides: Iterable[bool]) -> Flags:
    """Read the window of the layers in `layer_types`; `window` and `slides` are what missing keys mean."""
    layer_types = config.get("layer_types") or layer_type_names(slides, "sliding_attention")
    return _read_window({"sliding_window": config.get("sliding_window", window), "layer_types": layer_types})


def _write_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": flags["window_size"][0] + 1 if flags.get("window_size") else None}


def _write_listed_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    return _write_window(flags) | {"layer_types": layer_type_names(windowed_layers(flags), "sliding_attention")}


def _read_qwen_window(config: Config) -> Flags:
    """Read a window that acts only with `use_sliding_window`, in the layers from `max_window_layers` on.

    `layer_types` may list other ones.
    """
    first = config.get("max_window_layers", 28)
    return _read_switched_window(config, (layer >= first for layer in range(config["num_hidden_layers"])))


def _read_qwen2_moe_window(config: Config) -> Flags:
    """Read the same of every second layer before `max_window_layers`."""
    first = config.get("max_window_layers", 28)
    slides = (layer % 2 == 0 and layer < first for layer in range(config["num_hidden_layers"]))
    return _read_switched_window(config, slides)


def _read_switched_window(config: Config, slides: Iterable[bool]) -> Flags:
    return _read_listed_window(config, 4096, slides) if config.get("use_sliding_window") else {}


def _read_qwen3_moe_window(config: Config) -> Flags:
    """Read the same of all layers: transformers does not read `layer_types` here."""
    if not config.get("use_sliding_window"):
        return {}
    return _read_window({"sliding_window": config.get("sliding_window", 4096)})


def _write_qwen_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    window = flags.get("window_size")
    config: dict[str, Any] = {"use_sliding_window": bool(window)}
    if window:
        config |= {
            "sliding_window": window[0] + 1,
            "max_window_layers": 0,
            "layer_types": layer_type_names(sliding_layers(flags), "sliding_attention"),
        }
    return config


def _read_late_window(config: Config) -> Flags:
    """Read the window of dots1: layers from `max_window_layers` on have it, unless `layer_types` differs."""
    first = config.get("max_window_layers", 62)
    late = (layer >= first for layer in range(config["num_hidden_layers"]))
    return _read_listed_window(config, 4096, late)


def _read_hybrid_window(config: Config) -> Flags:
    """Read the window of EXAONE: all layers but every fourth have it, and only these have rotary positions."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        every = config.get("sliding_window_pattern", 4)
        if not isinstance(every, int):
            raise CheckpointError(
                f"config.json: sliding_window_pattern {every!r} without layer_types; a number is needed"
            )
        kinds = ((layer + 1) % every != 0 for layer in range(config["num_hidden_layers"]))
        layer_types = layer_type_names(kinds, "sliding_attention")
    window = config.get("sliding_window", 4096)
    flags = _read_window({"sliding_window": window, "layer_types": layer_types})
    if window and "full_attention" in layer_types:
        flags["no_rope_freq"] = [int(kind == "full_attention") for kind in layer_types]
    return flags


def _write_hybrid_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    config = _write_listed_window(flags)
    every = 4 if flags.get("window_size") else 0
    return config | {"sliding_window_pattern": every}


def _read_flint_window(config: Config) -> Flags:
    """Read the window of Flint; only layers with a window have rotary positions.

    Without `layer_types`, the first, the last and every fourth layer have none.
    """
    layers = config["num_hidden_layers"]
    slides = (layer >= 2 and layer % 4 != 1 and layer != layers - 1 for layer in range(layers))
    flags = _read_listed_window(config, 513, slides)
    unrotated = [int(not each) for each in windowed_layers(flags | {"num_layers": layers})]
    return flags | ({"no_rope_freq": unrotated} if any(unrotated) else {})


def _write_flint_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    config = _write_listed_window(flags)
    return {key: value for key, value in config.items() if value is not None}  # the library takes no null


def _read_alternating(config: Config) -> Flags:
    """Read the window of gpt-oss: every second layer from the first has it, unless `layer_types` differs."""
    alternating = (layer % 2 == 0 for layer in range(config["num_hidden_layers"]))
    return _read_listed_window(config, 128, alternating)


def _read_full_unless_listed(config: Config) -> Flags:
    return _read_listed_window(config, 0, (False for _ in range(config["num_hidden_layers"])))


def _read_quarter_window(config: Config) -> Flags:
    """Read the window of Granite: all layers but every fourth from the first, unless `layer_types` differs."""
    return _read_listed_window(config, 128, (layer % 4 != 0 for layer in range(config["num_hidden_layers"])))


def _read_mimo_window(config: Config) -> Flags:
    """Read the layers with a window, which have twice the key-value heads and attention sinks.

    Without `layer_types` the first layer and every sixth have full attention. `sliding_window_size` leaves the query
    out.
    """
    size = config.get("sliding_window_size")
    window = config.get("sliding_window", 129) if size is None else size + 1
    flags = _read_window({"sliding_window": window, "layer_types": _mimo_layer_types(config)})
    if flags:
        flags["window_num_query_groups"] = 2 * config["num_key_value_heads"]
        flags["window_softmax_type"] = "learnable"
    return flags


def _check_mimo_keys(config: Config) -> Flags:
    """Check the keys of published files, which transformers does not read, against what it takes instead.

    Raises:
        CheckpointError: naming the key that says something else.
    """
    slides = [int(kind == "sliding_attention") for kind in _mimo_layer_types(config)]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (config["num_hidden_layers"] - 1)
    tables = config["rope_parameters"]
    taken = {
        "hybrid_layer_pattern": slides,
        "moe_layer_freq": [int(kind == "sparse") for kind in kinds],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config.get("v_head_dim", 128),
        "swa_rope_theta": tables.get("sliding_attention", {}).get("rope_theta"),
        "rope_theta": tables.get("full_attention", {}).get("rope_theta"),
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-5),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for key, value in taken.items():
        if value is not None and config.get(key, value) not in (value, None):
            raise CheckpointError(
                f"config.json: {key} is {config[key]!r}, and transformers, which does not read it, takes {value!r}"
            )
    return {}


def _mimo_layer_types(config: Config) -> list[str]:
    full = ((layer + 1) % 6 == 0 or layer == 0 for layer in range(config["num_hidden_layers"]))
    return config.get("layer_types") or layer_type_names((not each for each in full), "sliding_attention")


WINDOW = ConfigConverter(_read_window, _write_window)
QWEN_WINDOW = ConfigConverter(_read_qwen_window, _write_qwen_window)
QWEN2_MOE_WINDOW = ConfigConverter(_read_qwen2_moe_window, _write_qwen_window)
QWEN3_MOE_WINDOW = ConfigConverter(_read_qwen3_moe_window, _write_qwen_window)
LATE_WINDOW = ConfigConverter(_read_late_window, _write_listed_window)
FLINT_WINDOW = ConfigConverter(_read_flint_window, _write_flint_window)
HYBRID_WINDOW = ConfigConverter(_read_hybrid_window, _write_hybrid_window)
ALTERNATING = ConfigConverter(_read_alternating, _write_listed_window)
LISTED_WINDOW = ConfigConverter(_read_full_unless_listed, _write_listed_window)
QUARTER_WINDOW = ConfigConverter(_read_quarter_window, _write_listed_window)
MIMO_WINDOW = ConfigConverter(_read_mimo_window, _write_listed_window)
MIMO_KEYS = ConfigConverter(_check_mimo_keys, lambda flags: {})
MIMO_ROPE = ConfigConverter(
    lambda config: read_typed_rotary({**config, "layer_types": _mimo_layer_types(config)}), write_typed_rotary
)
