"""config.json of a Hugging Face model <-> flags: one table per family.

A family says which flags always hold, which values of config.json must hold, and which keys are which flags; what is more than a
name for another (rotary scalings, patterns of layers, shared experts) has a function per direction. Flags are values by destination.

Writing is checked by reading: the flags that the written config.json gives must be those that were asked for, so a model that a
family cannot express is refused with the flag, not written wrongly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arguments.checkpoint_args import SHAPE
from arguments.container import OPTIONS
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.shape.layers import linear_layer_pattern, moe_layer_pattern

Flags = dict[str, Any]
Config = Mapping[str, Any]
_NEEDED = "(needed)"


@dataclass(frozen=True)
class Key:
    """One key of config.json and the flag that it is. default: where the key is missing."""

    theirs: str
    ours: str
    default: Any = _NEEDED


@dataclass(frozen=True)
class Part:
    """What takes more than a name. read: config -> flags; write: flags -> config. Both raise CheckpointError."""

    read: Callable[[Config], Flags]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A model type. always: flags. must: values that keys of config.json may have where they are there, the first one is written."""

    name: str
    architecture: str
    keys: tuple[Key, ...]
    parts: tuple[Part, ...]
    always: Mapping[str, Any]
    must: Mapping[str, tuple[Any, ...]]
    ignored: tuple[str, ...] = ()


# ---- parts


def _read_rope(config: Config) -> Flags:
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or config.get("rope_theta") or _BASES.get(config.get("model_type"), 10000.0)
    if float(base) != int(base):
        raise CheckpointError(f"config.json: rope_theta {base} is no whole number, and --rotary-base takes one")
    flags: Flags = {"rotary_base": int(base)}
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share not in (None, 1, 1.0):
        flags["rotary_percent"] = float(share)
    latent = "kv_lora_rank" in config
    if latent:
        flags["rope_type"] = "yarn" if kind == "yarn" else "rope"
    if kind == "yarn":
        if rope.get("attention_factor") is not None:
            raise CheckpointError("config.json: attention_factor of the rotary scaling has no flag; --mscale and --mscale-all-dim decide it")
        if not rope.get("factor"):
            raise CheckpointError("config.json: the rotary scaling yarn has no factor")
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        if not latent:
            flags["position_embedding_type"] = "yarn"
        if latent and rope.get("mscale_all_dim") and not both:
            raise CheckpointError("config.json: mscale_all_dim of the rotary scaling is given, and mscale is not")
        return flags | {
            "rotary_scaling_factor": float(rope["factor"]),
            "mscale": float(rope["mscale"]) if both else 1.0, "mscale_all_dim": float(rope["mscale_all_dim"]) if both else 0.0,
            "yarn_original_max_position_embeddings": rope.get("original_max_position_embeddings"),
            "yarn_beta_fast": float(rope.get("beta_fast") or 32), "yarn_beta_slow": float(rope.get("beta_slow") or 1),
            "yarn_correction_range_round_to_int": rope.get("truncate", True)}
    if kind == "linear" and not latent and float(rope["factor"]) == int(rope["factor"]):
        return flags | {"rotary_seq_len_interpolation_factor": int(rope["factor"])}
    if kind == "llama3" and not latent:
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(float(rope.get(name, value)) != value for name, value in fixed.items()):
            raise CheckpointError(f"config.json: --use-rope-scaling means {fixed}, and the model has {rope}")
        return flags | {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if kind != "default":
        raise CheckpointError(f"config.json: no flag stands for the rotary scaling {rope}")
    return flags


_BASES = MappingProxyType({"mixtral": 1000000.0, "gpt_oss": 150000.0})  # where a config.json is silent, as the library


def _write_rope(flags: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": float(flags.get("rotary_base") or 10000), "rope_scaling": None}
    latent = flags.get("multi_latent_attention")
    if flags.get("rotary_percent") not in (None, 1.0):
        config["partial_rotary_factor"] = flags["rotary_percent"]
    if (flags.get("rope_type") != "rope") if latent else flags.get("position_embedding_type") == "yarn":
        scaling = {"type": "yarn", "rope_type": "yarn", "factor": flags.get("rotary_scaling_factor") or 1.0,
                   "original_max_position_embeddings": flags.get("yarn_original_max_position_embeddings") or 4096,
                   "beta_fast": flags.get("yarn_beta_fast") or 32.0, "beta_slow": flags.get("yarn_beta_slow") or 1.0}
        if flags.get("mscale_all_dim"):
            scaling |= {"mscale": flags.get("mscale", 1.0), "mscale_all_dim": flags["mscale_all_dim"]}
        if flags.get("yarn_correction_range_round_to_int") is False:
            scaling["truncate"] = False
        config["rope_scaling"] = scaling
    elif flags.get("use_rope_scaling") and not latent:
        config["rope_scaling"] = {"type": "llama3", "rope_type": "llama3", "factor": flags["rope_scaling_factor"], "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif (flags.get("rotary_seq_len_interpolation_factor") or 1) != 1 and not latent:
        config["rope_scaling"] = {"type": "linear", "rope_type": "linear", "factor": float(flags["rotary_seq_len_interpolation_factor"])}
    return config


def _read_tied(config: Config) -> Flags:
    return {"untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False)}


def _write_tied(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"tie_word_embeddings": not flags.get("untie_embeddings_and_output_weights")}


def _read_groups(config: Config) -> Flags:
    heads = config["num_attention_heads"]
    return {"group_query_attention": True, "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or config["hidden_size"] // heads}


def _write_groups(flags: Mapping[str, Any]) -> dict[str, Any]:
    heads = flags["num_attention_heads"]
    return {"num_key_value_heads": flags["num_query_groups"] if flags.get("group_query_attention") else heads,
            "head_dim": flags.get("kv_channels") or flags["hidden_size"] // heads}


def _read_window(config: Config) -> Flags:
    """Mistral and Mixtral slide in every layer; Qwen where `use_sliding_window` and `layer_types` say so."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False or (kinds is not None and set(kinds) == {"full_attention"}):
        return {}
    if config.get("use_sliding_window") and kinds is None:
        raise CheckpointError("config.json: use_sliding_window without layer_types does not say which layers slide")
    if kinds is None and config.get("model_type") not in ("mistral", "mixtral"):
        return {}
    pattern = None if kinds is None else [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (window - 1, 0)} | ({} if pattern is None or all(pattern) else {"window_attn_skip_freq": pattern})


def _write_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": flags["window_size"][0] + 1 if flags.get("window_size") else None}


def _write_qwen_window(flags: Mapping[str, Any]) -> dict[str, Any]:
    window = flags.get("window_size")
    config: dict[str, Any] = {"use_sliding_window": bool(window)}
    if window:
        config |= {"sliding_window": window[0] + 1, "max_window_layers": 0,
                   "layer_types": ["sliding_attention" if slides else "full_attention" for slides in _slides(flags)]}
    return config


def _slides(flags: Mapping[str, Any]) -> list[bool]:
    """Which layers have the window, where there is one."""
    pattern, layers = flags.get("window_attn_skip_freq"), flags["num_layers"]
    if isinstance(pattern, int):
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    return [bool(slides) for slides in pattern or [1] * layers]


def _read_alternating(config: Config) -> Flags:
    """gpt-oss slides in every second layer, from the first on, where it does not say otherwise."""
    kinds = config.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(config["num_hidden_layers"])]
    return _read_window({"sliding_window": config.get("sliding_window", 128), "layer_types": kinds})


def _write_alternating(flags: Mapping[str, Any]) -> dict[str, Any]:
    config = _write_qwen_window(flags)
    return {"sliding_window": config.get("sliding_window"), "layer_types": config.get("layer_types") or ["full_attention"] * flags["num_layers"]}


def _read_normalized(config: Config) -> Flags:
    return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


def _write_normalized(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": not flags.get("moe_router_pre_softmax")}


def _read_sparse_step(config: Config) -> Flags:
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_sparse_step(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, is_moe in enumerate(_pattern(flags)) if not is_moe]}


def _pattern(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    return moe_layer_pattern(flags["num_layers"], flags.get("num_experts"), flags.get("moe_layer_freq") or 1)


def _read_first_dense(config: Config) -> Flags:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    return {"moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1}


def _write_first_dense(flags: Mapping[str, Any]) -> dict[str, Any]:
    pattern = _pattern(flags)
    return {"first_k_dense_replace": pattern.index(True) if any(pattern) else len(pattern)}


def _read_shared(config: Config) -> Flags:
    return {"moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"] or None}


def _write_shared(flags: Mapping[str, Any]) -> dict[str, Any]:
    width, expert = flags.get("moe_shared_expert_intermediate_size") or 0, flags.get("moe_ffn_hidden_size") or flags["ffn_hidden_size"]
    if not width or width % expert:
        raise CheckpointError(f"--moe-shared-expert-intermediate-size {width or None}: a DeepSeek model has shared experts of the width of the others; "
                              f"a multiple of --moe-ffn-hidden-size {expert} is needed")
    return {"n_shared_experts": width // expert}


def _read_groups_of_experts(config: Config) -> Flags:
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    limited = groups > 1 and best < groups and config.get("topk_method") != "greedy"
    return {"moe_router_num_groups": groups, "moe_router_group_topk": best} if limited else {}


def _write_groups_of_experts(flags: Mapping[str, Any]) -> dict[str, Any]:
    limited = bool(flags.get("moe_router_group_topk"))
    config = {"n_group": flags["moe_router_num_groups"] if limited else 1, "topk_group": flags["moe_router_group_topk"] if limited else 1}
    if flags.get("moe_router_score_function") == "sigmoid":
        return config | {"topk_method": "noaux_tc"}
    return config | {"topk_method": "group_limited_greedy" if limited else "greedy"}


def _write_latent_heads(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention has a key per head; the library's defaults are those of one model."""
    return {"num_key_value_heads": flags["num_attention_heads"]}


def _read_nothing(config: Config) -> Flags:
    del config
    return {}


def _read_next(config: Config) -> Flags:
    """The layers with linear attention. Where a config.json is silent, a quarter of each head is rotated."""
    kinds, every = config.get("layer_types"), config.get("full_attention_interval") or 4
    layers = config["num_hidden_layers"]
    pattern = [int((layer + 1) % every != 0) for layer in range(layers)] if kinds is None else [int(kind == "linear_attention") for kind in kinds]
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
    return {"linear_attention_freq": pattern, "rotary_percent": float(share)}


def _write_next(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": ["linear_attention" if linear else "full_attention" for linear in _linear_pattern(flags)],
            "partial_rotary_factor": flags.get("rotary_percent", 1.0)}


def _linear_pattern(flags: Mapping[str, Any]) -> tuple[bool, ...]:
    return linear_layer_pattern(flags["num_layers"], flags.get("experimental_attention_variant"), flags.get("linear_attention_freq"))


def _read_mtp(config: Config) -> Flags:
    return {"mtp_num_layers": config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or None}


def _write_mtp(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_nextn_predict_layers": flags.get("mtp_num_layers") or 0}


ROPE, TIED, GROUPED = Part(_read_rope, _write_rope), Part(_read_tied, _write_tied), Part(_read_groups, _write_groups)
WINDOW, QWEN_WINDOW = Part(_read_window, _write_window), Part(_read_window, _write_qwen_window)
ALTERNATING = Part(_read_alternating, _write_alternating)
NORMALIZED, SPARSE_STEP = Part(_read_normalized, _write_normalized), Part(_read_sparse_step, _write_sparse_step)
FIRST_DENSE, SHARED = Part(_read_first_dense, _write_first_dense), Part(_read_shared, _write_shared)
NEXT = Part(_read_next, _write_next)
LATENT_HEADS = Part(_read_nothing, _write_latent_heads)
EXPERT_GROUPS, MTP = Part(_read_groups_of_experts, _write_groups_of_experts), Part(_read_mtp, _write_mtp)

# ---- tables

_KEYS = (
    Key("num_hidden_layers", "num_layers"), Key("hidden_size", "hidden_size"), Key("intermediate_size", "ffn_hidden_size"),
    Key("num_attention_heads", "num_attention_heads"), Key("vocab_size", "vocab_size"),
    Key("max_position_embeddings", "max_position_embeddings"), Key("rms_norm_eps", "layernorm_epsilon", 1e-6),
    Key("initializer_range", "init_method_std", 0.02), Key("attention_dropout", "attention_dropout", 0.0))
_LATENT_KEYS = (
    Key("q_lora_rank", "q_lora_rank", None), Key("kv_lora_rank", "kv_lora_rank"), Key("qk_nope_head_dim", "qk_head_dim"),
    Key("qk_rope_head_dim", "qk_pos_emb_head_dim"), Key("v_head_dim", "v_head_dim"))
_DEEPSEEK_KEYS = _LATENT_KEYS + (
    Key("n_routed_experts", "num_experts"), Key("num_experts_per_tok", "moe_router_topk"), Key("moe_intermediate_size", "moe_ffn_hidden_size"),
    Key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0))
_QWEN_MOE_KEYS = (Key("num_experts_per_tok", "moe_router_topk"), Key("moe_intermediate_size", "moe_ffn_hidden_size"))
_ALWAYS = MappingProxyType({
    "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 1})
_MOE = MappingProxyType({"moe_grouped_gemm": True, "moe_router_score_function": "softmax"})
_GPT_OSS = MappingProxyType({
    "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable"})
_DEEPSEEK = MappingProxyType({
    **_ALWAYS, "multi_latent_attention": True, "qk_layernorm": True, "moe_grouped_gemm": True, "moe_router_dtype": "fp32"})
_MUST = MappingProxyType({"hidden_act": ("silu",), "mlp_bias": (False,), "attention_bias": (False,)})
_DEEPSEEK_MUST = MappingProxyType({
    "hidden_act": ("silu",), "attention_bias": (False,), "moe_layer_freq": (1,), "rope_interleave": (True,)})
# keys that say nothing about the mathematics of the model
_IGNORED = (
    "_name_or_path", "architectures", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype", "ep_size", "eos_token_id", "id2label", "label2id",
    "max_window_layers", "model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "quantization_config", "rope_parameters",
    "rope_scaling", "rope_theta", "full_attention_interval", "router_aux_loss_coef", "router_jitter_noise", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
    "unsloth_version", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "is_encoder_decoder",
    "num_key_value_heads", "head_dim", "qk_head_dim", "num_local_experts", "num_mtp_layers", "num_experts", "n_group", "topk_group", "layer_types",
    "sliding_window", "use_sliding_window", "tie_word_embeddings", "partial_rotary_factor", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers", "topk_method", "scoring_func", "use_mtp",
    "use_return_dict", "torchscript", "sep_token_id", "decoder_start_token_id", "is_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "num_return_sequences", "task_specific_params", "finetuning_task", "tokenizer_class", "prefix", "pruned_heads", "per_layer_config")


def _dense(name: str, architecture: str, always: Mapping[str, Any], must: Mapping[str, Sequence], *parts: Part) -> Family:
    return Family(name, architecture, _KEYS, (ROPE, TIED, GROUPED, *parts), _ALWAYS | always, _MUST | must)


FAMILIES = MappingProxyType({family.name: family for family in (
    _dense("llama", "LlamaForCausalLM", {}, {}),
    _dense("mistral", "MistralForCausalLM", {}, {}, WINDOW),
    _dense("qwen2", "Qwen2ForCausalLM", {"add_qkv_bias": True}, {}, QWEN_WINDOW),
    _dense("qwen3", "Qwen3ForCausalLM", {"qk_layernorm": True}, {}, QWEN_WINDOW),
    Family("mixtral", "MixtralForCausalLM", (*_KEYS, Key("num_local_experts", "num_experts"), Key("num_experts_per_tok", "moe_router_topk")),
           (ROPE, TIED, GROUPED, WINDOW), _ALWAYS | _MOE, _MUST),
    Family("qwen2_moe", "Qwen2MoeForCausalLM",
           (*_KEYS, *_QWEN_MOE_KEYS, Key("num_experts", "num_experts"),
            Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")),
           (ROPE, TIED, GROUPED, QWEN_WINDOW, NORMALIZED, SPARSE_STEP), _ALWAYS | _MOE | {"add_qkv_bias": True, "moe_shared_expert_gate": True},
           _MUST | {"qkv_bias": (True,)}),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", (*_KEYS, *_QWEN_MOE_KEYS, Key("num_experts", "num_experts")),
           (ROPE, TIED, GROUPED, QWEN_WINDOW, NORMALIZED, SPARSE_STEP), _ALWAYS | _MOE | {"qk_layernorm": True}, _MUST),
    Family("qwen3_next", "Qwen3NextForCausalLM",
           (*_KEYS, *_QWEN_MOE_KEYS, Key("num_experts", "num_experts"),
            Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *(Key(name, name) for name in ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
                                           "linear_num_value_heads"))),
           (ROPE, TIED, GROUPED, NORMALIZED, SPARSE_STEP, NEXT),
           _ALWAYS | _MOE | {"qk_layernorm": True, "moe_shared_expert_gate": True, "attention_output_gate": True, "moe_router_dtype": "fp32",
                             "layernorm_zero_centered_gamma": True, "experimental_attention_variant": "gdn"}, _MUST),
    Family("gpt_oss", "GptOssForCausalLM",
           (*_KEYS, Key("num_local_experts", "num_experts"), Key("num_experts_per_tok", "moe_router_topk"),
            Key("swiglu_limit", "activation_func_clamp_value", 7.0)),
           (ROPE, TIED, GROUPED, ALTERNATING), _ALWAYS | _MOE | _GPT_OSS,
           {"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,)}, ("experts_per_token", "initial_context_length")),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", (*_KEYS, *_DEEPSEEK_KEYS), (ROPE, TIED, LATENT_HEADS, FIRST_DENSE, SHARED, EXPERT_GROUPS),
           _DEEPSEEK | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
           _DEEPSEEK_MUST | {"scoring_func": ("softmax",), "mlp_bias": (False,), "norm_topk_prob": (False,)}),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", (*_KEYS, *_DEEPSEEK_KEYS), (ROPE, TIED, LATENT_HEADS, FIRST_DENSE, SHARED, EXPERT_GROUPS, MTP),
           _DEEPSEEK | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
           _DEEPSEEK_MUST | {"scoring_func": ("sigmoid",), "norm_topk_prob": (True,)}),
)})
OTHER_NAMES = MappingProxyType({"kimi_k2": "deepseek_v3"})
# flags of the record that do not change the function of the model
_FREE = frozenset({"moe_grouped_gemm", "make_vocab_size_divisible_by", "padded_vocab_size", "vocab_size", "rope_type", "group_query_attention",
                   "num_query_groups", "kv_channels", "mtp_use_repeated_layer"})
# flags that mean what their value here means where they are not set
_UNSET = MappingProxyType({"moe_router_topk_scaling_factor": 1.0, "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
                           "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True})


def family_of(config: Config, source: str) -> Family:
    """The family of a config.json. Raises: CheckpointError for a model type that has no table."""
    kind = config.get("model_type")
    family = FAMILIES.get(OTHER_NAMES.get(kind, kind))
    if family is None:
        raise CheckpointError(f"{source}: the model type {kind!r} cannot be converted; there are {', '.join([*FAMILIES, *OTHER_NAMES])}")
    return family


def read_config(config: Config, source: str = "config.json") -> tuple[Family, Flags, list[str]]:
    """Flags by destination that describe the model of a config.json, and remarks for the user.

    Raises: CheckpointError naming the key that no flag stands for, or that is missing.
    """
    family = family_of(config, source)
    flags: Flags = dict(family.always)
    for key, values in family.must.items():
        if config.get(key, values[0]) not in (*values, None):
            raise CheckpointError(f"{source}: {key} is {config[key]!r}, and models of type {family.name} are read with {' or '.join(map(repr, values))} only")
    for key in family.keys:
        value = config.get(key.theirs, config.get(_ALIASES.get(key.theirs, ""), key.default))
        if value is _NEEDED:
            raise CheckpointError(f"{source} lacks {key.theirs}")
        flags[key.ours] = value
    for part in family.parts:
        try:
            flags |= part.read(config)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{source} lacks {error}" if isinstance(error, KeyError) else f"{source}: {error}") from error
    known = {key.theirs for key in family.keys} | {*family.must, *_IGNORED, *family.ignored}
    notes = [f"{source}: the key {key} is not known here and changes nothing" for key in config if key not in known]
    return family, flags, notes + _remarks(family, flags)


_ALIASES = MappingProxyType({"num_experts": "num_local_experts", "num_local_experts": "num_experts", "n_routed_experts": "num_local_experts"})


def _remarks(family: Family, flags: Flags) -> list[str]:
    """Where this program and the library compute something else from the same weights."""
    notes = []
    if family.name in ("deepseek_v2", "deepseek_v3"):
        if flags["layernorm_epsilon"] != 1e-6:
            notes.append(f"rms_norm_eps {flags['layernorm_epsilon']}: transformers normalises the latents of attention with 1e-06, "
                         "here (as in Megatron-LM) all norms have the one")
        best = flags.get("moe_router_group_topk")
        here, there = (flags["moe_router_topk"] // best if best else 0), (1 if family.name == "deepseek_v2" else 2)
        if best and here != there:
            notes.append(f"groups of experts are chosen by their {here} best experts here (top-k / groups, as in Megatron-LM), by {there} in transformers")
    return notes


def write_config(flags: Mapping[str, Any], rows: int, kind: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The config.json of a model that flags describe. rows: of its embedding. kind: the model type; None takes the first that can express it.

    Raises: CheckpointError with what no type can express.
    """
    if kind is not None and kind not in FAMILIES:
        raise CheckpointError(f"the model type {kind!r} cannot be written; there are {', '.join(FAMILIES)}")
    refusals = []
    for family in FAMILIES.values() if kind is None else (FAMILIES[kind],):
        try:
            config = _write(family, flags, rows)
            differing = _differing(flags, read_config(config)[1])
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            refusals.append(f"{family.name}: {error}")
            continue
        if not differing:
            return family, config
        refusals.append(f"{family.name}: {'; '.join(differing[:3])}")
    raise CheckpointError("no Hugging Face model type that is known here expresses this model:\n  " + "\n  ".join(refusals))


def _write(family: Family, flags: Mapping[str, Any], rows: int) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.name}
    for key in family.keys:
        value = flags.get(key.ours)
        if value is None:
            value = {"moe_ffn_hidden_size": flags.get("ffn_hidden_size"), "moe_router_topk_scaling_factor": 1.0}.get(key.ours)
        config[key.theirs] = value
    for part in family.parts:
        config |= part.write(flags)
    return config | {key: values[0] for key, values in family.must.items()} | {"vocab_size": rows}


def _differing(wanted: Mapping[str, Any], given: Flags) -> list[str]:
    """The flags of the architecture whose meaning a config.json has lost."""
    moe, latent = bool(wanted.get("num_experts")), bool(wanted.get("multi_latent_attention"))
    found = []
    for dest in SHAPE:
        if dest in _FREE or dest not in OPTIONS or (dest.startswith("moe_") and not moe) or (dest in _LATENT_ONLY and not latent):
            continue
        default = OPTIONS[dest].default
        here, there = (_meaning(dest, values.get(dest, default), default) for values in (wanted, given))
        if here != there and not _equal_patterns(dest, wanted, given):
            found.append(f"{OPTIONS[dest].spellings[0]} ({dest}) is {here!r} here and {there!r} there")
    return found


_LATENT_ONLY = frozenset({"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor", "mscale",
                          "mscale_all_dim"})


def _meaning(dest: str, value: Any, default: Any) -> Any:
    if value is None:
        value = _UNSET.get(dest, default)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return value or None


def _equal_patterns(dest: str, wanted: Mapping[str, Any], given: Flags) -> bool:
    if dest == "window_attn_skip_freq" and wanted.get("window_size"):
        return _slides(wanted) == _slides(given)
    if dest == "moe_layer_freq":
        return _pattern(wanted) == _pattern(given)
    if dest == "linear_attention_freq":
        return _linear_pattern(wanted) == _linear_pattern(given)
    if dest == "mtp_num_layers" and given.get("experimental_attention_variant") == "gdn":
        return wanted.get(dest) in (None, 0, 1)  # the tensors say it, not config.json
    if dest == "moe_ffn_hidden_size":
        return (wanted.get(dest) or wanted.get("ffn_hidden_size")) == (given.get(dest) or given.get("ffn_hidden_size"))
    if dest in ("moe_router_num_groups", "moe_router_group_topk"):  # all groups are no limit
        return not _limits(wanted) and not _limits(given)
    if dest in ("rope_scaling_factor", "mscale", "rotary_scaling_factor"):
        switch = "use_rope_scaling" if dest == "rope_scaling_factor" else None
        if switch is not None:
            return not wanted.get(switch) and not given.get(switch)
        return wanted.get("rope_type") == "rope" and given.get("rope_type") == "rope"
    return False


def _limits(flags: Mapping[str, Any]) -> bool:
    best = flags.get("moe_router_group_topk")
    return bool(best) and best < (flags.get("moe_router_num_groups") or 1)
