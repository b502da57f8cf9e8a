"""config.json of a Hugging Face model to and from flags, by the tables of its family (family.py).

Writing is checked by reading: the flags of the written config.json must equal the original ones, so a model that a
family cannot express is rejected with the flag.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from arguments.checkpoint_args import SHAPE, meaning, same_meaning
from arguments.container import OPTIONS
from arguments.layer_pattern import MAMBA, MLP, MOE, hybrid_letters
from arguments.mechanisms.sublayers import GATED_DELTA_NET, variant_of
from arguments.program import other_command
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.attention import INDEXER
from moe_trainer.checkpoint.hf.converters.converter import Config, Flags, ReadKeys
from moe_trainer.checkpoint.hf.converters.layer_patterns import (
    expert_layers,
    layer_bases,
    layers_without_rope,
    linear_layers,
    sliding_layers,
)
from moe_trainer.checkpoint.hf.families import ALIASES, FAMILIES, IGNORED, Families, get_family
from moe_trainer.checkpoint.hf.family import NEEDED, Family

# flags of the record that do not change the function of the model
_FREE = frozenset(
    "moe_grouped_gemm make_vocab_size_divisible_by padded_vocab_size vocab_size rope_type "
    "group_query_attention num_query_groups kv_channels mtp_use_repeated_layer dsa_indexer_rotate_activation".split()
)
_SHOWN_TYPES = 3
_LATENT_ONLY = frozenset(
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale "
    "mscale_all_dim".split()
)
# numbers of what no model is without, by which others are divided
_POSITIVE = frozenset("hidden_size num_attention_heads vocab_size linear_num_key_heads linear_num_value_heads".split())
# keys that converters read, by the kind of their values
_KINDS = MappingProxyType(
    {
        "whole": "num_key_value_heads head_dim decoder_sparse_step sliding_window first_k_dense_replace "
        "n_shared_experts shared_expert_intermediate_size shared_intermediate_size moe_num_shared_experts "
        "moe_layer_start_index moe_layer_interval n_group topk_group num_nextn_predict_layers num_mtp_layers "
        "full_attention_interval index_n_heads index_head_dim index_topk mamba_n_heads mamba_expand "
        "attention_chunk_size floor_scale no_rope_layer_interval interleave_moe_layer_step",
        "number": "rope_theta partial_rotary_factor time_step_min attn_scale",
        "switch": "attention_bias",
        "table": "rope_scaling rope_parameters",
        "list": "layer_types mlp_layer_types mlp_only_layers layer_rope_theta no_rope_layers moe_layers",
    }
)


def read_config(
    config: Config, source: str = "config.json", families: Families = FAMILIES
) -> tuple[Family, Flags, list[str]]:
    """Return the flags by destination that describe the model of a config.json, and remarks for the user.

    Raises:
        CheckpointError: naming the key that no flag supports, or that is missing.
    """
    family = get_family(config, source, families)
    config = _with_defaults(family, {family.renamed.get(key, key): value for key, value in config.items()})
    flags: Flags = dict(family.fixed_flags)
    for required, values in family.required_values.items():
        if config.get(required, values[0]) not in (*values, None):
            raise CheckpointError(
                f"{source}: {required} is {config[required]!r}, and models of type {family.name} are read with "
                f"{' or '.join(map(repr, values))} only"
            )
    for key in family.keys:
        spellings = (key.name, ALIASES.get(key.name, key.name))
        actual = [config[name] for name in spellings if config.get(name) is not None]
        value = actual[0] if actual else key.default
        if value is NEEDED:
            spelled = {standard: own for own, standard in family.renamed.items()}
            raise CheckpointError(f"{source} lacks {spelled.get(key.name, key.name)}")
        kind = {"float": "number", "bool": "switch"}.get(OPTIONS[key.dest].type_name, "whole")
        kind = "positive" if key.dest in _POSITIVE else kind
        _check_kind(source, key.name, value, kind)
        flags[key.dest] = value
    for kind, names in _KINDS.items():
        for name in names.split():
            _check_kind(source, name, config.get(name), kind)
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name) is not None and len(config[name]) != flags["num_layers"]:
            raise CheckpointError(
                f"{source}: {name} names {len(config[name])} layers, and num_hidden_layers is {flags['num_layers']}"
            )
    seen = ReadKeys(config)
    try:
        for converter in family.converters:
            flags |= converter.read(seen)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{source} lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: {error}") from error
    if not flags["num_layers"]:  # converters may have counted them
        raise CheckpointError(f"{source}: num_hidden_layers is 0, and a whole number above zero is needed")
    known = {key.name for key in family.keys} | {*family.required_values, *IGNORED, *family.ignored, *seen.read}
    notes = [
        f"{source}: the key {key} is not known here and changes nothing"
        for key, value in config.items()
        if key not in known and value is not None
    ]
    return family, flags, notes + _remarks(family, flags)


def _with_defaults(family: Family, config: Config) -> dict[str, Any]:
    """Return the config with the family's values of missing keys.

    A rotary scaling has two keys, so its default holds only if both are missing or null.
    """
    tables = ("rope_scaling", "rope_parameters")
    if "rope_scaling" not in family.defaults:
        return {**family.defaults, **config}
    if any(config.get(key) for key in tables):
        return {**family.defaults, "rope_scaling": None, **config}
    return {**family.defaults, **{key: value for key, value in config.items() if key not in tables}}


def _check_kind(source: str, name: str, value: Any, kind: str) -> None:
    fits, expected = {
        "whole": (type(value) is int and value >= 0, "a whole number"),
        "positive": (type(value) is int and value > 0, "a whole number above zero"),
        "number": (type(value) in (int, float) and math.isfinite(value) and value >= 0, "a number, zero or above,"),
        "switch": (type(value) is bool, "true or false"),
        "table": (isinstance(value, Mapping), "a table"),
        "list": (isinstance(value, (list, tuple)), "a list"),
    }[kind]
    if value is not None and not fits:
        raise CheckpointError(f"{source}: {name} is {value!r}, and {expected} is needed")


def _remarks(family: Family, flags: Flags) -> list[str]:
    """Return where this program and the library compute something else from the same weights."""
    notes = []
    limit = flags.get("mamba_step_size_min")
    if limit is not None:
        notes.append(
            f"--mamba-step-size-min {limit}: transformers limits the step sizes of Mamba layers to at least this, "
            "and so does this program; Megatron-LM has no limit"
        )
    if INDEXER in family.converters:
        notes.append(
            "of keys with the same score (few heads: all at zero, behind the relu) the first are chosen here, "
            "any in transformers"
        )
    return notes


def write_config(
    flags: Mapping[str, Any], rows: int, kind: str | None = None, families: Families = FAMILIES
) -> tuple[Family, dict[str, Any]]:
    """Return the config.json of the model that the flags describe, with `rows` of the embedding.

    `kind` is the model type, by default the first that can express the model.

    Raises:
        CheckpointError: with what no type can express.
    """
    if kind is not None and kind not in families:
        raise CheckpointError(f"the model type {kind!r} cannot be written; there are {', '.join(families)}")
    if flags.get("use_mup"):
        raise CheckpointError(
            "the model is trained with --use-mup: no Hugging Face model type has its multipliers of embeddings, "
            "logits and scores"
        )
    refusals: list[tuple[float, str]] = []
    for family in families.values() if kind is None else (families[kind],):
        try:
            config = _write(family, flags, rows)
            differing = _differing(flags, read_config(config, families=families)[1])
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            refusals.append((math.inf, f"{family.name}: {error}"))  # which hides further differences
            continue
        if not differing:
            return family, config
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        refusals.append((len(differing), f"{family.name}: {'; '.join(differing[:3])}{more}"))
    nearest = sorted(refusals, key=lambda refusal: refusal[0])[:_SHOWN_TYPES]
    lines = [text for _, text in nearest]
    if any(count == 1 and "(mtp_num_layers)" in text for count, text in nearest):
        lines.append(f"{other_command('convert')} --drop-mtp leaves the layers of multi-token prediction out")
    if same_layers := _transformer_layers(flags):
        lines.append(
            f"it has the layers of a GPT model, which may be one of these types: load it with {same_layers} instead of "
            "--hybrid-layer-pattern, --ckpt-convert-format torch_dist and --ckpt-convert-save DIR, and convert DIR"
        )
    which = f" (the nearest {len(nearest)} of {len(refusals)})" if len(refusals) > len(nearest) else ""
    raise CheckpointError(
        f"no Hugging Face model type that is known here expresses this model{which}:\n  " + "\n  ".join(lines)
    )


def _transformer_layers(flags: Mapping[str, Any]) -> str:
    """Return the flags that describe the layers of a hybrid model as those of a GPT model; "" where none do."""
    letters = hybrid_letters(flags.get("hybrid_layer_pattern") or "")
    mixing, feed_forward = letters[::2], letters[1::2]
    in_pairs = len(mixing) == len(feed_forward) and {MLP, MOE}.issuperset(feed_forward)
    if not letters or not in_pairs or {MAMBA, MLP, MOE}.intersection(mixing):
        return ""
    routed = ",".join(str(int(letter == MOE)) for letter in feed_forward)
    return f"--num-layers {len(mixing)}" + (f" --moe-layer-freq [{routed}]" if "0" in routed and "1" in routed else "")


def write_notes(flags: Mapping[str, Any], config: Config, families: Families = FAMILIES) -> list[str]:
    """Return what the written config.json, or transformers, has another number for than the flags."""
    read, notes = read_config(config, families=families)[1:]
    ours, theirs = (each.get("attention_latent_norm_epsilon") or each["layernorm_epsilon"] for each in (flags, read))
    if flags.get("multi_latent_attention") and ours != theirs:
        notes.append(
            f"the norms of the latents of attention have the epsilon {ours} here (--attention-latent-norm-epsilon, or "
            f"--norm-epsilon), and {theirs} in transformers, which has no key for it"
        )
    return notes


def _write(family: Family, flags: Mapping[str, Any], rows: int) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name, **family.auto_map}
    unset = {"moe_ffn_hidden_size": flags.get("ffn_hidden_size"), "moe_router_topk_scaling_factor": 1.0}
    for key in family.keys:
        value = flags.get(key.dest)
        config[key.name] = unset.get(key.dest) if value is None else value
    for part in family.converters:
        config |= part.write(flags)
    config |= {key: values[0] for key, values in family.required_values.items()} | {"vocab_size": rows}
    spelled = {standard: key for key, standard in family.renamed.items()}
    return {spelled.get(key, key): value for key, value in config.items()}


def _differing(expected: Mapping[str, Any], actual: Flags) -> list[str]:
    """Return the architecture flags whose meaning a config.json has lost."""
    moe, latent = bool(expected.get("num_experts")), bool(expected.get("multi_latent_attention"))
    sparse = variant_of(expected).has_indexer
    differences = []
    for dest in (*SHAPE, "max_position_embeddings"):
        if (
            dest in _FREE
            or dest not in OPTIONS
            or (dest.startswith("moe_") and not moe)
            or (dest in _LATENT_ONLY and not latent)
            or (dest.startswith("dsa_") and not sparse)
        ):
            continue
        if not same_meaning(dest, expected, actual) and not _equal_patterns(dest, expected, actual):
            ours, theirs = (meaning(dest, flags) for flags in (expected, actual))
            differences.append(f"{OPTIONS[dest].spellings[0]} ({dest}) is {ours!r} here and {theirs!r} there")
    return differences


def _equal_patterns(dest: str, expected: Mapping[str, Any], actual: Flags) -> bool:
    if dest == "window_attn_skip_freq" and (expected.get("window_size") or expected.get("attention_chunk_size")):
        return sliding_layers(expected) == sliding_layers(actual)
    if dest == "no_rope_freq":
        return layers_without_rope(expected) == layers_without_rope(actual)
    if dest == "qk_l2_norm_rope_layers_only":
        return not any(layers_without_rope(expected)) or not expected.get("qk_l2_norm")
    if dest in ("attn_temperature_scale", "attn_temperature_floor"):
        return not expected.get("attn_temperature_tuning") and not actual.get("attn_temperature_tuning")
    if dest in ("rotary_base", "rotary_base_per_layer"):
        return layer_bases(expected) == layer_bases(actual)
    if dest == "moe_layer_freq":
        return expert_layers(expected) == expert_layers(actual)
    if dest == "hybrid_layer_pattern" and expected.get(dest) and actual.get(dest):
        return hybrid_letters(expected[dest]) == hybrid_letters(actual[dest])
    if dest == "mamba_num_heads":
        return not expected.get(dest) and 2 * expected["hidden_size"] == actual[dest] * actual["mamba_head_dim"]
    if dest == "linear_attention_freq":
        return linear_layers(expected) == linear_layers(actual)
    if dest == "mtp_num_layers" and variant_of(actual) is GATED_DELTA_NET:
        return expected.get(dest) in (None, 0, 1)  # the tensors determine it, not config.json
    if dest == "attention_latent_norm_epsilon":
        return True  # write_notes
    if dest in ("rope_scaling_factor", "rope_scaling_high_freq_factor"):
        return not expected.get("use_rope_scaling") and not actual.get("use_rope_scaling")
    if dest in ("mscale", "rotary_scaling_factor", "mscale_all_dim"):
        plain = expected.get("rope_type") == "rope" and actual.get("rope_type") == "rope"
        return plain and (dest != "mscale_all_dim" or _scales_logits(expected) == _scales_logits(actual))
    return False


def _scales_logits(flags: Mapping[str, Any]) -> bool:
    """Return whether latent attention multiplies its logits by a temperature."""
    factor = flags.get("rotary_scaling_factor", OPTIONS["rotary_scaling_factor"].default)
    return bool(flags.get("mscale_all_dim")) and factor > 1
