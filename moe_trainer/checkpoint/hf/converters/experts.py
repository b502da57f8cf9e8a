"""Converters of experts: which layers have them, how many are shared, and how they are chosen."""

from collections.abc import Mapping
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.layer_patterns import expert_layers, marks


def _read_sparse_step(config: Config) -> Flags:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_sparse_step(flags: Mapping[str, Any]) -> dict[str, Any]:
    dense = [layer for layer, is_moe in enumerate(expert_layers(flags)) if not is_moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _read_first_dense(config: Config) -> Flags:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    return {"moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1}


def _write_first_dense(flags: Mapping[str, Any]) -> dict[str, Any]:
    pattern = expert_layers(flags)
    return {"first_k_dense_replace": pattern.index(True) if any(pattern) else len(pattern)}


def _read_listed_dense(config: Config) -> Flags:
    """Read a list of "dense" and "sparse" layers; without it the first ones are dense, by default one."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return _read_first_dense({"first_k_dense_replace": 1, **config})
    return {"moe_layer_freq": marks(kinds, "sparse", "dense", "mlp_layer_types")}


def _read_sparse_unless_listed(config: Config) -> Flags:
    pattern = marks(config.get("mlp_layer_types") or (), "sparse", "dense", "mlp_layer_types")
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_listed_dense(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in expert_layers(flags)]}


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


def _groups_of_experts(scored: int) -> ConfigConverter:
    """Return the converter of groups whose score is the sum of their `scored` best experts."""

    def read(config: Config) -> Flags:
        groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
        if groups <= 1 or best >= groups or config.get("topk_method") == "greedy":
            return {}
        flags: Flags = {"moe_router_num_groups": groups, "moe_router_group_topk": best}
        is_default = config.get("num_experts_per_tok", 0) // best == scored
        return flags | ({} if is_default else {"moe_router_group_score_topk": scored})

    def write(flags: Mapping[str, Any]) -> dict[str, Any]:
        best = flags.get("moe_router_group_topk")
        method = "group_limited_greedy" if best else "greedy"
        return {
            "n_group": flags["moe_router_num_groups"] if best else 1,
            "topk_group": best or 1,
            "topk_method": "noaux_tc" if flags.get("moe_router_score_function") == "sigmoid" else method,
        }

    return ConfigConverter(read, write)


def _read_hash_layers(config: Config) -> Flags:
    """Read which layers are routed by token: the first ones, three by default."""
    kinds, layers = config.get("mlp_layer_types"), config["num_hidden_layers"]
    count = min(layers, config.get("num_hash_layers", 3)) if kinds is None else list(kinds).count("hash_moe")
    if kinds is not None and list(kinds) != _mlp_kinds(count, layers):
        raise CheckpointError(f"config.json: mlp_layer_types has {kinds}; layers of hash_moe must come first, then moe")
    return {"moe_n_hash_layers": count}


def _write_hash_layers(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_layer_types": _mlp_kinds(flags.get("moe_n_hash_layers") or 0, flags["num_layers"])}


def _mlp_kinds(count: int, layers: int) -> list[str]:
    return ["hash_moe"] * count + ["moe"] * (layers - count)


SPARSE_STEP = ConfigConverter(_read_sparse_step, _write_sparse_step)
LISTED_DENSE = ConfigConverter(_read_listed_dense, _write_listed_dense)
LISTED_SPARSE = ConfigConverter(_read_sparse_unless_listed, _write_listed_dense)
FIRST_DENSE = ConfigConverter(_read_first_dense, _write_first_dense)
LLAMA4_EXPERTS = ConfigConverter(_read_llama4_experts, _write_llama4_experts)
HUNYUAN_EXPERTS = ConfigConverter(_read_hunyuan_experts, _write_hunyuan_experts)
ERNIE_LAYERS = ConfigConverter(_read_ernie_layers, _write_ernie_layers)
SHARED, NUM_SHARED = _shared("n_shared_experts"), _shared("num_shared_experts")
ARIA_SHARED = _shared("moe_num_shared_experts", width_key="intermediate_size")
ERNIE_SHARED = _shared("moe_num_shared_experts", optional=True)
OPTIONAL_SHARED = ConfigConverter(
    lambda config: {"moe_shared_expert_intermediate_size": config.get("shared_intermediate_size") or None},
    lambda flags: {"shared_intermediate_size": flags.get("moe_shared_expert_intermediate_size") or 0},
)
OPTIONAL_GATED_SHARED = ConfigConverter(_read_gated_shared, _write_gated_shared)
EXPERT_GROUPS, GREEDY_GROUPS = _groups_of_experts(2), _groups_of_experts(1)
HASH_LAYERS = ConfigConverter(_read_hash_layers, _write_hash_layers)
