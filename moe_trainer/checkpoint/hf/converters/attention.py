"""Converters of softmax attention: key-value heads, indexers, and what Llama 4 and DeepSeek-V4 have."""

from collections.abc import Mapping
from typing import Any

from arguments.layer_pattern import OVERLAPPING_RATIO
from arguments.mechanisms.sublayers import COMPRESSED_ATTENTION, SPARSE_ATTENTION, variant_of
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config, ConfigConverter, Flags
from moe_trainer.checkpoint.hf.converters.layer_patterns import (
    layer_type_names,
    layers_without_rope,
    marks,
    sliding_layers,
)
from moe_trainer.checkpoint.hf.converters.rotary import read_rotary, write_rotary


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


def _read_attention_biases(config: Config) -> Flags:
    return dict.fromkeys(("add_qkv_bias", "add_attention_output_bias"), bool(config.get("attention_bias")))


def _write_attention_biases(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": bool(flags.get("add_attention_output_bias"))}


def _read_latent_heads(config: Config) -> Flags:
    """Return the head size if Megatron-LM cannot derive it; latent attention does not use it."""
    return {"kv_channels": config["v_head_dim"]} if config["hidden_size"] % config["num_attention_heads"] else {}


def _write_latent_heads(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Write a key per head; the library's defaults are those of one model."""
    return {"num_key_value_heads": flags["num_attention_heads"]}


def _read_llama4_attention(config: Config) -> Flags:
    """Read layers without rotary positions, layers with chunks (those with positions, unless listed), norms, factors.

    Norms act with positions only, factors of queries without.
    """
    layers, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    has_rope = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    skipped = [int(not each) for each in has_rope[:layers]]
    chunked = [not each for each in skipped]
    if config.get("layer_types") is not None:
        chunked = [bool(mark) for mark in marks(config["layer_types"], "chunked_attention")]
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
        "layer_types": layer_type_names(chunked, "chunked_attention"),
        "use_qk_norm": bool(flags.get("qk_l2_norm")),
        "attn_temperature_tuning": flags.get("attn_temperature_tuning") == "llama4",
        "attn_scale": flags.get("attn_temperature_scale", 0.1),
        "floor_scale": flags.get("attn_temperature_floor", 8192),
    }


_SPARSE_KINDS = frozenset(("indexed_attention", "deepseek_sparse_attention"))


def _read_indexer(config: Config) -> Flags:
    """Read the indexers, which every layer has.

    The library leaves out the Hadamard rotation, on which no score depends; here it is on if possible.
    """
    kinds, experts = config.get("layer_types"), config.get("mlp_layer_types")
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
    if kinds is not None and not {*kinds} <= _SPARSE_KINDS:
        raise CheckpointError(
            f"config.json: layer_types has {', '.join(sorted(set(kinds)))}; 'indexed_attention' is needed in "
            "every layer"
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
    if not variant_of(flags).selects_keys:
        raise CheckpointError(
            f"a DeepSeek-V3.2 or GLM-5 model has sparse attention; {SPARSE_ATTENTION.words} is needed"
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
    length = config.get("max_position_embeddings")
    flags = read_rotary({"rope_parameters": scaling, "rope_theta": theta, "max_position_embeddings": length, **latent})
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
    if not variant_of(flags).compresses_keys:
        raise CheckpointError(f"a DeepSeek-V4 model needs {COMPRESSED_ATTENTION.words}")
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


GROUPED = ConfigConverter(_read_groups, _write_groups)
ATTENTION_BIASES = ConfigConverter(_read_attention_biases, _write_attention_biases)
LATENT_HEADS = ConfigConverter(_read_latent_heads, _write_latent_heads)
LLAMA4_ATTENTION = ConfigConverter(_read_llama4_attention, _write_llama4_attention)
INDEXER = ConfigConverter(_read_indexer, _write_indexer)
COMPRESSED = ConfigConverter(_read_compressed, _write_compressed)
