"""Conversions between config.json and flags that take more than another name: one pair of functions per topic.

Layer patterns (experts, windows, linear attention), key-value groups, shared experts, expert groups, tied embeddings,
multi-token prediction; rotary positions have a separate file. A reader gets the full config.json and returns flags
by destination, a writer gets all flags and returns keys. Mapping files list the converters of each family.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arguments.layer_pattern import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    OVERLAPPING_RATIO,
    hybrid_letters,
    linear_layer_pattern,
    moe_layer_pattern,
)
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.rotary import (
    Config,
    Flags,
    read_alpha_rotary,
    read_rotary,
    read_rotary_and_temperature,
    write_explicit_rotary,
    write_rotary,
    write_rotary_and_temperature,
)
from moe_trainer.checkpoint.hf.rotary_by_layer import (
    read_listed_rotary,
    read_typed_rotary,
    write_listed_rotary,
    write_typed_rotary,
)
from moe_trainer.ops.state_space import NORM_EPS


@dataclass(frozen=True)
class ConfigConverter:
    """A pair of functions, config -> flags and flags -> config, which may raise CheckpointError."""

    read: Callable[[Config], Flags]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]


def _negated(key: str, dest: str) -> ConfigConverter:
    """Return the converter of a switch that is on where its flag is off."""
    return ConfigConverter(lambda config: {dest: not config.get(key, False)}, lambda flags: {key: not flags.get(dest)})


def _read_groups(config: Config) -> Flags:
    heads = config["num_attention_heads"]
    return {
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
    }


def _write_groups(flags: Mapping[str, Any]) -> dict[str, Any]:
    heads = flags["num_attention_heads"]
    return {
        "num_key_value_heads": flags["num_query_groups"] if flags.get("group_query_attention") else heads,
        "head_dim": flags.get("kv_channels") or flags["hidden_size"] // heads,
    }


def _read_window(config: Config) -> Flags:
    """Read the window of Mistral and Mixtral: every layer has it, unless `layer_types` differs."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    pattern = [1] if kinds is None else _marks(kinds, "sliding_attention")
    if not window or not any(pattern):
        return {}
    return {"window_size": (window - 1, 0)} | ({} if all(pattern) else {"window_attn_skip_freq": pattern})


def _marks(kinds: Sequence[str], special: str, other: str = "full_attention", key: str = "layer_types") -> list[int]:
    """Return 1 for layers of the special kind, 0 for those of the other one; no third kind is accepted."""
    unknown = [kind for kind in kinds if kind not in (special, other)]
    if unknown:
        raise CheckpointError(f"config.json: {key} has {unknown[0]!r}; {special} or {other} is needed in every layer")
    return [int(kind == special) for kind in kinds]


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


def _layer_types(pattern: Iterable[bool], special: str) -> list[str]:
    return [special if is_special else "full_attention" for is_special in pattern]


def _write_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": flags["window_size"][0] + 1 if flags.get("window_size") else None}


def _write_qwen_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    window = flags.get("window_size")
    config: dict[str, Any] = {"use_sliding_window": bool(window)}
    if window:
        config |= {
            "sliding_window": window[0] + 1,
            "max_window_layers": 0,
            "layer_types": _layer_types(sliding_layers(flags), "sliding_attention"),
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
        layer_types = _layer_types(kinds, "sliding_attention")
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
    unrotated = [int(not each) for each in _windowed_layers(flags | {"num_layers": layers})]
    return flags | ({"no_rope_freq": unrotated} if any(unrotated) else {})


def _write_flint_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    config = _write_listed_window(flags)
    return {key: value for key, value in config.items() if value is not None}  # the library takes no null


def _read_llama4_attention(config: Config) -> Flags:
    """Read layers without rotary positions, layers with chunks (those with positions, unless listed), norms, factors.

    Norms act with positions only, factors of queries without.
    """
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    skipped = [int(not each) for each in has_rope[:layers]]
    chunked = [not each for each in skipped]
    if config.get("layer_types") is not None:
        chunked = [bool(mark) for mark in _marks(config["layer_types"], "chunked_attention")]
    flags: Flags = {"no_rope_freq": skipped} if any(skipped) else {}
    if config.get("attention_chunk_size") and any(chunked):
        flags["attention_chunk_size"] = config["attention_chunk_size"]
        flags |= {} if all(chunked) else {"window_attn_skip_freq": [int(each) for each in chunked]}
    if config.get("use_qk_norm", True) and not all(skipped):
        flags |= {"qk_l2_norm": True, "qk_l2_norm_rope_layers_only": True}
    if config.get("attn_temperature_tuning", True) and any(skipped):
        flags |= {
            "attn_temperature_tuning": "llama4",
            "attn_temperature_scale": config.get("attn_scale", 0.1),
            "attn_temperature_floor": config.get("floor_scale", 8192),
        }
    return flags


def _write_llama4_attention(flags: Mapping[str, Any]) -> dict[str, Any]:
    skipped, size = layers_without_rope(flags), flags.get("attention_chunk_size")
    chunked = sliding_layers(flags) if size else [False] * len(skipped)
    # all ones would mean the default in some versions of the library, which takes no empty list
    return {
        "no_rope_layers": [int(not each) for each in skipped],
        "attention_chunk_size": size,
        "layer_types": _layer_types(chunked, "chunked_attention"),
        "use_qk_norm": bool(flags.get("qk_l2_norm")),
        "attn_temperature_tuning": flags.get("attn_temperature_tuning") == "llama4",
        "attn_scale": flags.get("attn_temperature_scale", 0.1),
        "floor_scale": flags.get("attn_temperature_floor", 8192),
    }


def _read_llama4_experts(config: Config) -> Flags:
    """Read which layers have experts; experts and the shared expert have `intermediate_size`."""
    layers, every = config["num_hidden_layers"], config.get("interleave_moe_layer_step") or 1
    listed = config.get("moe_layers")
    sparse = range(every - 1, layers, every) if listed is None else listed
    pattern = [int(layer in sparse) for layer in range(layers)]
    width = config["intermediate_size"]
    return {
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
    }


def _write_llama4_experts(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_layers": [layer for layer, is_moe in enumerate(expert_layers(flags)) if is_moe],
        "intermediate_size": flags.get("moe_ffn_hidden_size") or flags["ffn_hidden_size"],
    }


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


def _read_alternating(config: Config) -> Flags:
    """Read the window of gpt-oss: every second layer from the first has it, unless `layer_types` differs."""
    alternating = (layer % 2 == 0 for layer in range(config["num_hidden_layers"]))
    return _read_listed_window(config, 128, alternating)


def _read_listed_window(config: Config, window: int, slides: Iterable[bool]) -> Flags:
    """Read the window of the layers in `layer_types`; `window` and `slides` are what missing keys mean."""
    layer_types = config.get("layer_types") or _layer_types(slides, "sliding_attention")
    return _read_window({"sliding_window": config.get("sliding_window", window), "layer_types": layer_types})


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


def _mimo_layer_types(config: Config) -> list[str]:
    full = ((layer + 1) % 6 == 0 or layer == 0 for layer in range(config["num_hidden_layers"]))
    return config.get("layer_types") or _layer_types((not each for each in full), "sliding_attention")


def _write_typed_rotary(flags: Mapping[str, Any]) -> dict[str, Any]:
    return write_typed_rotary(flags, _windowed_layers(flags))


def _windowed_layers(flags: Mapping[str, Any]) -> list[bool]:
    return sliding_layers(flags) if flags.get("window_size") else [False] * flags["num_layers"]


def _write_listed_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    return _write_window(flags) | {"layer_types": _layer_types(_windowed_layers(flags), "sliding_attention")}


def _read_sparse_step(config: Config) -> Flags:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_sparse_step(flags: Mapping[str, Any]) -> dict[str, Any]:
    dense = [layer for layer, is_moe in enumerate(expert_layers(flags)) if not is_moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def expert_layers(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    return moe_layer_pattern(flags["num_layers"], flags.get("num_experts"), flags.get("moe_layer_freq") or 1)


def _read_first_dense(config: Config) -> Flags:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    return {"moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1}


def _read_listed_dense(config: Config) -> Flags:
    """Read a list of "dense" and "sparse" layers; without it the first ones are dense, by default one."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _read_first_dense({"first_k_dense_replace": 1, **config})
    return {"moe_layer_freq": _marks(kinds, "sparse", "dense", "mlp_layer_types")}


def _read_sparse_unless_listed(config: Config) -> Flags:
    pattern = _marks(config.get("mlp_layer_types") or (), "sparse", "dense", "mlp_layer_types")
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_listed_dense(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in expert_layers(flags)]}


def _write_first_dense(flags: Mapping[str, Any]) -> dict[str, Any]:
    pattern = expert_layers(flags)
    return {"first_k_dense_replace": pattern.index(True) if any(pattern) else len(pattern)}


def _read_hunyuan_experts(config: Config) -> Flags:
    """Read numbers that files may repeat for every layer; one shared expert is as wide as the others."""
    numbers = {}
    for key in ("num_experts", "moe_topk", "num_shared_expert"):
        value = config.get(key, 1)
        values = set(value) if isinstance(value, (list, tuple)) else {value}
        if len(values) != 1:
            raise CheckpointError(f"config.json: {key} is {value!r}, and the same number in all layers is needed")
        numbers[key] = values.pop()
    if numbers["num_shared_expert"] != 1:
        raise CheckpointError(f"config.json: num_shared_expert is {numbers['num_shared_expert']}, and 1 is needed")
    return {
        "num_experts": numbers["num_experts"],
        "moe_router_topk": numbers["moe_topk"],
        "moe_shared_expert_intermediate_size": config["intermediate_size"],
    }


def _write_hunyuan_experts(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_experts": flags["num_experts"], "moe_topk": flags["moe_router_topk"]}


def _read_ernie_layers(config: Config) -> Flags:
    """Read which layers have experts: those of a range whose number is a multiple of an interval."""
    layers, every = config["num_hidden_layers"], config.get("moe_layer_interval") or 1
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    pattern = [int((layer + 1) % every == 0 and first <= layer <= last) for layer in range(layers)]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_ernie_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    sparse = [layer for layer, is_moe in enumerate(expert_layers(flags)) if is_moe]
    if not sparse:
        raise CheckpointError("an ERNIE model has experts; --num-experts is needed")
    return {
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }


def _shared(key: str, optional: bool = False, width_key: str = "moe_intermediate_size") -> ConfigConverter:
    """Return the converter of a number of shared experts; `optional`: there may be none."""

    def read(config: Config) -> Flags:
        width = (config.get(key) or 0) * config[width_key]
        return {"moe_shared_expert_intermediate_size": width or None}

    def write(flags: Mapping[str, Any]) -> dict[str, Any]:
        return {key: 0 if optional and not flags.get("moe_shared_expert_intermediate_size") else _num_shared(flags)}

    return ConfigConverter(read, write)


def _num_shared(flags: Mapping[str, Any]) -> int:
    width = flags.get("moe_shared_expert_intermediate_size") or 0
    expert = flags.get("moe_ffn_hidden_size") or flags["ffn_hidden_size"]
    if not width or width % expert:
        raise CheckpointError(
            f"--moe-shared-expert-intermediate-size {width or None}: a DeepSeek model has shared experts of the width "
            f"of the others; a multiple of --moe-ffn-hidden-size {expert} is needed"
        )
    return width // expert


def _read_gated_shared(config: Config) -> Flags:
    width = config["shared_expert_intermediate_size"] or None  # 0: none
    return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": width is not None}


def _write_gated_shared(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": flags.get("moe_shared_expert_intermediate_size") or 0}


def _read_groups_of_experts(config: Config) -> Flags:
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    limited = groups > 1 and best < groups and config.get("topk_method") != "greedy"
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best} if limited else {}


def _write_groups_of_experts(flags: Mapping[str, Any]) -> dict[str, Any]:
    best = flags.get("moe_router_group_topk")
    method = "group_limited_greedy" if best else "greedy"
    return {
        "n_group": flags["moe_router_num_groups"] if best else 1,
        "topk_group": best or 1,
        "topk_method": "noaux_tc" if flags.get("moe_router_score_function") == "sigmoid" else method,
    }


def _write_latent_heads(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write a key per head; the library's defaults are those of one model."""
    return {"num_key_value_heads": flags["num_attention_heads"]}


def _read_latent_heads(config: Config) -> Flags:
    """Return the head size if Megatron-LM cannot derive it; latent attention does not use it."""
    return {"kv_channels": config["v_head_dim"]} if config["hidden_size"] % config["num_attention_heads"] else {}


def _read_next(config: Config) -> Flags:
    """Read the layers with linear attention. By default a quarter of each head is rotated."""
    layer_types, every = config.get("layer_types"), config.get("full_attention_interval") or 4
    if layer_types is None:
        layer_types = _layer_types(
            ((layer + 1) % every != 0 for layer in range(config["num_hidden_layers"])), "linear_attention"
        )
    pattern = _marks(layer_types, "linear_attention")
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
    return {"linear_attention_freq": pattern, "rotary_percent": float(share)}


def _write_next(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(linear_layers(flags), "linear_attention"),
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
        **_write_first_dense(flags),
    }


def _read_conv_layers(config: Config) -> Flags:
    """Read which layers have short convolutions."""
    return {"linear_attention_freq": [int(kind == "conv") for kind in config["layer_types"]]}


def _write_conv_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": _layer_types(linear_layers(flags), "conv")}


def linear_layers(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have linear attention."""
    return linear_layer_pattern(
        flags["num_layers"], flags.get("experimental_attention_variant"), flags.get("linear_attention_freq")
    )


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


NO_STEP_LIMIT = 1e-30
"""Smaller step sizes leave a state as it is, in fp32."""


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


def _read_indexer(config: Config) -> Flags:
    """Read the indexers, which every layer has.

    The library leaves out the Hadamard rotation, on which no score depends; here it is on if possible.
    """
    kinds, experts = config.get("layer_types"), config.get("mlp_layer_types")
    if kinds is not None and set(kinds) != {"indexed_attention"}:
        raise CheckpointError(
            f"config.json: layer_types has {', '.join(sorted(set(kinds)))}; 'indexed_attention' is needed in "
            "every layer"
        )
    pattern = config.get("index_topk_pattern") or ""
    if (
        "shared" in (config.get("indexer_types") or ())
        or (config.get("index_topk_freq") or 1) > 1
        or any(kind in ("S", "shared") for kind in pattern)
    ):
        raise CheckpointError(
            "config.json: some layers take the choice of an earlier indexer (indexer_types, index_topk_freq or "
            "index_topk_pattern); an indexer in every layer is needed"
        )
    dense = config.get("first_k_dense_replace") or 0
    if experts is not None and list(experts) != ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense):
        raise CheckpointError(
            f"config.json: mlp_layer_types is not first_k_dense_replace {dense} dense layers, and then sparse ones"
        )
    for key in ("index_n_heads", "index_head_dim", "index_topk"):
        if config[key] is None:
            raise KeyError(key)
    width = config["index_head_dim"]
    return {
        "dsa_indexer_n_heads": config["index_n_heads"],
        "dsa_indexer_head_dim": width,
        "dsa_indexer_topk": config["index_topk"],
        "dsa_indexer_rotate_activation": not width & (width - 1),
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


def _write_indexer(flags: Mapping[str, Any]) -> dict[str, Any]:
    if flags.get("experimental_attention_variant") != "dsa":
        raise CheckpointError(
            "a DeepSeek-V3.2 or GLM-5 model has sparse attention; --experimental-attention-variant dsa is needed"
        )
    if not flags.get("q_lora_rank"):
        raise CheckpointError(
            "the indexer of a DeepSeek-V3.2 or GLM-5 model reads the latent of queries; --q-lora-rank is needed"
        )
    return {
        "index_n_heads": flags["dsa_indexer_n_heads"],
        "index_head_dim": flags["dsa_indexer_head_dim"],
        "index_topk": flags["dsa_indexer_topk"],
    }


def _read_scaled_embedding(config: Config) -> Flags:
    """Read the switch of AFMoE: embeddings times the root of the hidden size."""
    return {"embedding_multiplier": config["hidden_size"] ** 0.5} if config.get("mup_enabled") else {}


def _write_scaled_embedding(flags: Mapping[str, Any]) -> dict[str, Any]:
    factor, root = flags.get("embedding_multiplier") or 1.0, flags["hidden_size"] ** 0.5
    if factor not in (1.0, root):
        raise CheckpointError(
            f"--embedding-multiplier {factor}: an AFMoE model has 1 or the root of --hidden-size {root}"
        )
    return {"mup_enabled": factor == root}


_SLIDING, _INDEXED, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def _read_compressed(config: Config) -> Flags:
    """Read DeepSeek-V4's kinds of layers and its two rotary embeddings."""
    rates = dict(config.get("compress_rates") or {})
    indexed = rates.get(_INDEXED, config.get("compress_rate_csa", OVERLAPPING_RATIO))
    if indexed != OVERLAPPING_RATIO:
        raise CheckpointError(
            f"config.json: {_INDEXED} compresses {indexed} tokens, and {OVERLAPPING_RATIO} are needed"
        )
    by_kind = {_SLIDING: 0, _INDEXED: indexed, _HEAVY: rates.get(_HEAVY, config.get("compress_rate_hca", 128))}
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    ratios = config.get("compress_ratios") if kinds is None else [by_kind[kind] for kind in kinds]
    if ratios is None:
        ratios = [by_kind[_HEAVY if layer < 2 or layer % 2 == 0 else _INDEXED] for layer in range(layers)]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    main, scaling = rope.get("main") or {}, dict(rope.get("compress") or rope)
    if scaling.pop("attention_factor", None) not in (None, 1.0):
        raise CheckpointError("config.json: attention_factor of the rotary scaling must be 1.0, as published")
    share = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    width, base = config.get("head_dim") or 512, scaling.pop("rope_theta", None)
    rotated = config.get("qk_rope_head_dim") or int(width * (share or 0.125))
    theta = main.get("rope_theta") or config.get("rope_theta") or 10000.0
    # of latent attention, whose rotated channels are all of their own head
    latent = {"kv_lora_rank": None, "qk_rope_head_dim": rotated, "qk_nope_head_dim": 0}
    flags = read_rotary({"rope_parameters": scaling, "rope_theta": theta, **latent})
    own_base = {"csa_compress_rotary_base": float(base)} if rope.get("compress") and base else {}
    return (
        flags
        | own_base
        | {
            "csa_compress_ratios": list(ratios[:layers]),
            "qk_pos_emb_head_dim": rotated,
            "kv_channels": width,
            "dsa_indexer_rotate_activation": False,
        }
    )


def _write_compressed(flags: Mapping[str, Any]) -> dict[str, Any]:
    if flags.get("experimental_attention_variant") != "dsv4_hybrid":
        raise CheckpointError("a DeepSeek-V4 model needs --experimental-attention-variant dsv4_hybrid")
    if flags.get("csa_dense_mode"):
        raise CheckpointError("--csa-dense-mode: a DeepSeek-V4 model has an indexer in every layer of ratio 4")
    ratios = flags["csa_compress_ratios"][: flags["num_layers"]]
    heavy = sorted({ratio for ratio in ratios if ratio not in (0, OVERLAPPING_RATIO)})
    if len(heavy) > 1:
        raise CheckpointError(f"--csa-compress-ratios has {heavy}; a DeepSeek-V4 model has 0, 4 and one other number")
    kinds = {0: _SLIDING, OVERLAPPING_RATIO: _INDEXED}
    share = flags["qk_pos_emb_head_dim"] / flags["v_head_dim"]
    rope = write_rotary(flags)
    scaling = rope["rope_scaling"]
    both = {"rope_theta": float(flags["csa_compress_rotary_base"]), "partial_rotary_factor": share}
    compress = {"rope_type": "default"} if scaling is None else {**scaling, "attention_factor": 1.0}
    compress.pop("type", None)
    return {
        "layer_types": [kinds.get(ratio, _HEAVY) for ratio in ratios],
        "compress_rates": {_INDEXED: OVERLAPPING_RATIO, _HEAVY: heavy[0] if heavy else 128},
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": share,
        "qk_rope_head_dim": flags["qk_pos_emb_head_dim"],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": rope["rope_theta"], "partial_rotary_factor": share},
            "compress": {**compress, **both},
        },
    }


def _read_hash_layers(config: Config) -> Flags:
    """Read which layers are routed by token: the first ones, three by default."""
    kinds, layers = config.get("mlp_layer_types"), config["num_hidden_layers"]
    count = min(layers, config.get("num_hash_layers", 3)) if kinds is None else list(kinds).count("hash_moe")
    if kinds is not None and list(kinds) != _mlp_kinds(count, layers):
        raise CheckpointError(f"config.json: mlp_layer_types has {kinds}; layers of hash_moe must come first, then moe")
    return {"moe_n_hash_layers": count}


def _mlp_kinds(count: int, layers: int) -> list[str]:
    return ["hash_moe"] * count + ["moe"] * (layers - count)


def _write_hash_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_layer_types": _mlp_kinds(flags.get("moe_n_hash_layers") or 0, flags["num_layers"])}


def _read_mtp(config: Config) -> Flags:
    return {"mtp_num_layers": config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or None}


def _write_mtp(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_nextn_predict_layers": flags.get("mtp_num_layers") or 0}


ROPE = ConfigConverter(read_rotary, write_rotary)
ALPHA_ROPE = ConfigConverter(read_alpha_rotary, write_rotary)
EXPLICIT_ROPE = ConfigConverter(read_rotary, write_explicit_rotary)
TYPED_ROPE = ConfigConverter(read_typed_rotary, _write_typed_rotary)
MIMO_ROPE = ConfigConverter(
    lambda config: read_typed_rotary({**config, "layer_types": _mimo_layer_types(config)}), _write_typed_rotary
)
LISTED_ROPE = ConfigConverter(read_listed_rotary, write_listed_rotary)
TEMPERED_ROPE = ConfigConverter(read_rotary_and_temperature, write_rotary_and_temperature)
TIED = _negated("tie_word_embeddings", "untie_embeddings_and_output_weights")
GROUPED = ConfigConverter(_read_groups, _write_groups)
WINDOW = ConfigConverter(_read_window, _write_window)
QWEN_WINDOW = ConfigConverter(_read_qwen_window, _write_qwen_window)
QWEN2_MOE_WINDOW = ConfigConverter(_read_qwen2_moe_window, _write_qwen_window)
QWEN3_MOE_WINDOW = ConfigConverter(_read_qwen3_moe_window, _write_qwen_window)
LATE_WINDOW = ConfigConverter(_read_late_window, _write_listed_window)
FLINT_WINDOW = ConfigConverter(_read_flint_window, _write_flint_window)
HYBRID_WINDOW = ConfigConverter(_read_hybrid_window, _write_hybrid_window)
ALTERNATING = ConfigConverter(_read_alternating, _write_listed_window)
LLAMA4_ATTENTION = ConfigConverter(_read_llama4_attention, _write_llama4_attention)
LLAMA4_EXPERTS = ConfigConverter(_read_llama4_experts, _write_llama4_experts)
LISTED_WINDOW = ConfigConverter(_read_full_unless_listed, _write_listed_window)
QUARTER_WINDOW = ConfigConverter(_read_quarter_window, _write_listed_window)
MIMO_WINDOW = ConfigConverter(_read_mimo_window, _write_listed_window)
NORMALIZED = _negated("norm_topk_prob", "moe_router_pre_softmax")
SPARSE_STEP = ConfigConverter(_read_sparse_step, _write_sparse_step)
LISTED_DENSE = ConfigConverter(_read_listed_dense, _write_listed_dense)
LISTED_SPARSE = ConfigConverter(_read_sparse_unless_listed, _write_listed_dense)
FIRST_DENSE = ConfigConverter(_read_first_dense, _write_first_dense)
SHARED, NUM_SHARED = _shared("n_shared_experts"), _shared("num_shared_experts")
OPTIONAL_GATED_SHARED = ConfigConverter(_read_gated_shared, _write_gated_shared)
OPTIONAL_SHARED = ConfigConverter(
    lambda config: {"moe_shared_expert_intermediate_size": config.get("shared_intermediate_size") or None},
    lambda flags: {"shared_intermediate_size": flags.get("moe_shared_expert_intermediate_size") or 0},
)
HUNYUAN_EXPERTS = ConfigConverter(_read_hunyuan_experts, _write_hunyuan_experts)
ARIA_SHARED = _shared("moe_num_shared_experts", width_key="intermediate_size")
ERNIE_SHARED = _shared("moe_num_shared_experts", optional=True)
ERNIE_LAYERS = ConfigConverter(_read_ernie_layers, _write_ernie_layers)
EXPERT_GROUPS = ConfigConverter(_read_groups_of_experts, _write_groups_of_experts)
LATENT_HEADS = ConfigConverter(_read_latent_heads, _write_latent_heads)
BLOCK_TYPES = ConfigConverter(_read_block_types, _write_block_types)
GRANITE_LAYERS = ConfigConverter(_read_granite_layers, _write_granite_layers)
STATE_SPACE = ConfigConverter(_read_state_space, _write_state_space)
INDEXER = ConfigConverter(_read_indexer, _write_indexer)
NEXT = ConfigConverter(_read_next, _write_next)
SCALED_EMBEDDING = ConfigConverter(_read_scaled_embedding, _write_scaled_embedding)
COMPRESSED = ConfigConverter(_read_compressed, _write_compressed)
HASH_LAYERS = ConfigConverter(_read_hash_layers, _write_hash_layers)
CONV_LAYERS = ConfigConverter(_read_conv_layers, _write_conv_layers)
KIMI_LINEAR = ConfigConverter(_read_kimi_linear, _write_kimi_linear)
# the default of transformers is a row of the published vocabulary, which this one may not have
NO_PADDING = ConfigConverter(lambda _: {}, lambda _: {"pad_token_id": None})
MTP = ConfigConverter(_read_mtp, _write_mtp)
CONVERTERS: Mapping[str, ConfigConverter] = MappingProxyType(
    {name.lower(): value for name, value in list(globals().items()) if isinstance(value, ConfigConverter)}
)
"""The converters above, by the names that mapping files have for them."""
