"""The families of Hugging Face models that can be converted: one table each of config.json keys and flags.

A family lists the flags that always hold, the required values of config.json, the keys that correspond to flags, and
its converters (config_converters.py). Flags are by destination.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf import config_converters as converters
from moe_trainer.checkpoint.hf.config_converters import ConfigConverter
from moe_trainer.checkpoint.hf.rotary import Config

NEEDED = "(needed)"


@dataclass(frozen=True)
class Key:
    """A key of config.json and its flag; `default` if the key is missing."""

    name: str
    dest: str
    default: Any = NEEDED


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        fixed_flags: flags that always hold.
        required_values: accepted values of keys of config.json, if present; the first one is written.
        defaults: values that transformers uses for missing keys, if they differ from those of the key or its converter.
        class_prefix: of its classes in transformers; "" for the name in their spelling.
    """

    name: str
    keys: tuple[Key, ...]
    converters: tuple[ConfigConverter, ...]
    fixed_flags: Mapping[str, Any]
    required_values: Mapping[str, tuple[Any, ...]]
    ignored: tuple[str, ...]
    defaults: Mapping[str, Any]
    class_prefix: str = ""

    @property
    def architecture(self) -> str:
        """Name of the class in transformers: Qwen3MoeForCausalLM of qwen3_moe."""
        prefix = self.class_prefix or "".join(part.capitalize() for part in self.name.split("_"))
        return f"{prefix}ForCausalLM"


_KEYS = (
    Key("num_hidden_layers", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("vocab_size", "vocab_size"),
    Key("max_position_embeddings", "max_position_embeddings"),
    Key("rms_norm_eps", "layernorm_epsilon", 1e-6),
    Key("initializer_range", "init_method_std", 0.02),
    Key("attention_dropout", "attention_dropout", 0.0),
)
_LATENT_KEYS = (
    Key("q_lora_rank", "q_lora_rank", None),
    Key("kv_lora_rank", "kv_lora_rank"),
    Key("qk_nope_head_dim", "qk_head_dim"),
    Key("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Key("v_head_dim", "v_head_dim"),
)
_ROUTED_KEYS = (
    Key("n_routed_experts", "num_experts"),
    Key("num_experts_per_tok", "moe_router_topk"),
    Key("moe_intermediate_size", "moe_ffn_hidden_size"),
    Key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
)
_DEEPSEEK_KEYS = _LATENT_KEYS + _ROUTED_KEYS
_LOCAL_EXPERT_KEYS = (Key("num_local_experts", "num_experts"), Key("num_experts_per_tok", "moe_router_topk"))
_QWEN_MOE_KEYS = (
    Key("num_experts_per_tok", "moe_router_topk"),
    Key("moe_intermediate_size", "moe_ffn_hidden_size"),
    Key("num_experts", "num_experts"),
)
_SHARED_EXPERT_KEY = Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_FIXED_FLAGS = MappingProxyType(
    {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
        "make_vocab_size_divisible_by": 1,
    }
)
_MOE = MappingProxyType({"moe_grouped_gemm": True, "moe_router_score_function": "softmax"})
_DEEPSEEK = MappingProxyType(
    {"multi_latent_attention": True, "qk_layernorm": True, "moe_grouped_gemm": True, "moe_router_dtype": "fp32"}
)
_BIASED_SIGMOID = MappingProxyType({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True})
_GROUPED_SIGMOID = MappingProxyType({"moe_grouped_gemm": True, "moe_router_dtype": "fp32", **_BIASED_SIGMOID})
_SIGMOID_REQUIRED = MappingProxyType({"hidden_act": ("silu",), "norm_topk_prob": (True,)})
_REQUIRED = MappingProxyType({"hidden_act": ("silu",), "mlp_bias": (False,), "attention_bias": (False,)})
_DEEPSEEK_REQUIRED = MappingProxyType(
    {"hidden_act": ("silu",), "attention_bias": (False,), "moe_layer_freq": (1,), "rope_interleave": (True,)}
)
_DEEPSEEK_V3_DEFAULTS = MappingProxyType(
    {
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    }
)
_LINEAR_ATTENTION_FLAGS = tuple(
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads".split()
)
_QWEN_NEXT_KEYS = (*_QWEN_MOE_KEYS, _SHARED_EXPERT_KEY, *tuple(Key(name, name) for name in _LINEAR_ATTENTION_FLAGS))
_QWEN_NEXT = MappingProxyType(
    {
        "qk_layernorm": True,
        "moe_shared_expert_gate": True,
        "attention_output_gate": True,
        "moe_router_dtype": "fp32",
        "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gdn",
        **_MOE,
    }
)
_QWEN_MOE = (converters.GROUPED, converters.QWEN_WINDOW, converters.NORMALIZED, converters.SPARSE_STEP)
_DEEPSEEK_CONVERTERS = (converters.LATENT_HEADS, converters.FIRST_DENSE, converters.SHARED, converters.EXPERT_GROUPS)
# keys without influence on the function of the model
IGNORED = tuple(
    "_name_or_path architectures auto_map aux_loss_alpha bos_token_id dtype ep_size eos_token_id id2label "
    "label2id max_window_layers model_type output_router_logits pad_token_id pretraining_tp "
    "quantization_config rope_parameters rope_scaling rope_theta full_attention_interval router_aux_loss_coef "
    "router_jitter_noise seq_aux torch_dtype transformers_version use_cache unsloth_version problem_type "
    "return_dict output_attentions output_hidden_states chunk_size_feed_forward is_encoder_decoder "
    "num_key_value_heads head_dim qk_head_dim num_local_experts num_mtp_layers num_experts n_group topk_group "
    "layer_types sliding_window use_sliding_window tie_word_embeddings partial_rotary_factor norm_topk_prob "
    "decoder_sparse_step mlp_only_layers first_k_dense_replace n_shared_experts num_nextn_predict_layers "
    "topk_method scoring_func use_mtp mlp_layer_types use_return_dict torchscript sep_token_id "
    "decoder_start_token_id is_decoder add_cross_attention cross_attention_hidden_size num_return_sequences "
    "task_specific_params finetuning_task tokenizer_class prefix pruned_heads per_layer_config".split()
)


_EMPTY: Mapping[str, Any] = MappingProxyType({})


def _family(
    name: str,
    *special: ConfigConverter,
    keys: tuple[Key, ...] = (),
    flags: Mapping[str, Any] = _EMPTY,
    required: Mapping[str, tuple[Any, ...]] = _REQUIRED,
    ignored: tuple[str, ...] = (),
    defaults: Mapping[str, Any] = _EMPTY,
    rope: ConfigConverter = converters.ROPE,
    class_prefix: str = "",
) -> Family:
    """Return a family with what all of them have in common, and with its own keys, converters and flags."""
    return Family(
        name,
        _KEYS + keys,
        (rope, converters.TIED, *special),
        _FIXED_FLAGS | flags,
        required,
        ignored,
        defaults,
        class_prefix,
    )


FAMILIES = MappingProxyType(
    {
        family.name: family
        for family in (
            _family("llama", converters.GROUPED),
            _family(
                "mistral",
                converters.GROUPED,
                converters.WINDOW,
                defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            ),
            _family(
                "qwen2",
                converters.GROUPED,
                converters.QWEN_WINDOW,
                flags={"add_qkv_bias": True},
                defaults={"num_key_value_heads": 32},
            ),
            _family(
                "qwen3",
                converters.GROUPED,
                converters.QWEN_WINDOW,
                flags={"qk_layernorm": True},
                defaults={"num_key_value_heads": 32, "head_dim": 128},
            ),
            _family(
                "mixtral",
                converters.GROUPED,
                converters.WINDOW,
                keys=_LOCAL_EXPERT_KEYS,
                flags=_MOE,
                defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            ),
            _family(
                "minimax_m2",
                converters.GROUPED,
                keys=_LOCAL_EXPERT_KEYS,
                flags=_GROUPED_SIGMOID | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
                required={"hidden_act": ("silu",), "scoring_func": ("sigmoid",), "use_qk_norm": (True,)},
                ignored=("rotary_dim", "num_mtp_modules", "mtp_transformer_layers", "use_routing_bias", "qk_norm_type"),
                defaults={"num_key_value_heads": 8, "head_dim": 128},
                class_prefix="MiniMaxM2",
            ),
            _family(
                "olmoe",
                converters.GROUPED,
                converters.NORMALIZED,
                keys=(Key("num_experts_per_tok", "moe_router_topk", 8), Key("num_experts", "num_experts", 64)),
                flags=_MOE | {"qk_layernorm": True, "qk_layernorm_all_heads": True},
                required=_REQUIRED | {"clip_qkv": (None,)},
                defaults={"rms_norm_eps": 1e-5},
            ),
            _family(
                "qwen2_moe",
                *_QWEN_MOE,
                keys=(*_QWEN_MOE_KEYS, _SHARED_EXPERT_KEY),
                flags=_MOE | {"add_qkv_bias": True, "moe_shared_expert_gate": True},
                required=_REQUIRED | {"qkv_bias": (True,)},
                defaults={"num_key_value_heads": 16},
            ),
            _family(
                "qwen3_moe",
                *_QWEN_MOE,
                keys=_QWEN_MOE_KEYS,
                flags=_MOE | {"qk_layernorm": True},
                defaults={"num_key_value_heads": 4},
            ),
            _family(
                "qwen3_next",
                converters.GROUPED,
                converters.NORMALIZED,
                converters.SPARSE_STEP,
                converters.NEXT,
                keys=_QWEN_NEXT_KEYS,
                flags=_QWEN_NEXT,
                defaults={"num_key_value_heads": 2, "head_dim": 256, "norm_topk_prob": True},
            ),
            _family(
                "qwen3_5_moe_text",
                converters.GROUPED,
                converters.NEXT,
                keys=_QWEN_NEXT_KEYS,
                flags=_QWEN_NEXT,
                defaults={
                    "num_key_value_heads": 2,
                    "head_dim": 256,
                    "intermediate_size": 5632,  # every layer has experts
                },
                class_prefix="Qwen3_5Moe",
            ),
            _family(
                "gpt_oss",
                converters.GROUPED,
                converters.ALTERNATING,
                rope=converters.EXPLICIT_ROPE,
                keys=(*_LOCAL_EXPERT_KEYS, Key("swiglu_limit", "activation_func_clamp_value", 7.0)),
                flags=_MOE
                | {
                    "swiglu": False,
                    "quick_geglu": True,
                    "glu_linear_offset": 1.0,
                    "add_bias_linear": True,
                    "add_qkv_bias": True,
                    "softmax_type": "learnable",
                },
                required={"hidden_act": ("silu",), "attention_bias": (True,), "swiglu_alpha": (1.702,)},
                ignored=("experts_per_token", "initial_context_length"),
                defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
            ),
            _family(
                "deepseek_v2",
                *_DEEPSEEK_CONVERTERS,
                keys=_DEEPSEEK_KEYS,
                flags=_DEEPSEEK | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
                required=_DEEPSEEK_REQUIRED
                | {"scoring_func": ("softmax",), "mlp_bias": (False,), "norm_topk_prob": (False,)},
                defaults={"q_lora_rank": 1536, "n_shared_experts": 2, "topk_method": "greedy"},
            ),
            _family(
                "deepseek_v3",
                *_DEEPSEEK_CONVERTERS,
                converters.MTP,
                keys=_DEEPSEEK_KEYS,
                flags=_DEEPSEEK | _BIASED_SIGMOID,
                required=_DEEPSEEK_REQUIRED | {"scoring_func": ("sigmoid",), "norm_topk_prob": (True,)},
                defaults=_DEEPSEEK_V3_DEFAULTS,
            ),
            _family(
                "deepseek_v32",
                *_DEEPSEEK_CONVERTERS,
                converters.INDEXER,
                converters.MTP,
                keys=_DEEPSEEK_KEYS,
                flags=_DEEPSEEK | _BIASED_SIGMOID | {"experimental_attention_variant": "dsa"},
                required=_DEEPSEEK_REQUIRED
                | {"scoring_func": ("sigmoid",), "norm_topk_prob": (True,), "mlp_bias": (False,)},
                ignored=("index_n_heads", "index_head_dim", "index_topk"),
                defaults=_DEEPSEEK_V3_DEFAULTS,
            ),
            _family(
                "glm4_moe",
                converters.GROUPED,
                converters.FIRST_DENSE,
                converters.SHARED,
                converters.EXPERT_GROUPS,
                converters.MTP,
                keys=(
                    *_ROUTED_KEYS,
                    Key("attention_bias", "add_qkv_bias", False),
                    Key("use_qk_norm", "qk_layernorm", False),
                ),
                flags=_GROUPED_SIGMOID,
                required=_SIGMOID_REQUIRED,
                defaults={
                    "num_key_value_heads": 8,
                    "rms_norm_eps": 1e-5,
                    "partial_rotary_factor": 0.5,
                    "n_shared_experts": 1,
                    "first_k_dense_replace": 1,
                },
            ),
            _family(
                "glm4_moe_lite",
                converters.LATENT_HEADS,
                converters.LISTED_DENSE,
                converters.SHARED,
                converters.EXPERT_GROUPS,
                converters.MTP,
                keys=_DEEPSEEK_KEYS,
                flags=_DEEPSEEK | _BIASED_SIGMOID,
                required=_SIGMOID_REQUIRED | {"attention_bias": (False,), "rope_interleave": (True,)},
                defaults={
                    "q_lora_rank": 768,
                    "rms_norm_eps": 1e-5,
                    "n_shared_experts": 1,
                    "routed_scaling_factor": 1.8,
                },
            ),
            _family(
                "exaone_moe",
                converters.GROUPED,
                converters.HYBRID_WINDOW,
                converters.LISTED_DENSE,
                converters.NUM_SHARED,
                converters.EXPERT_GROUPS,
                keys=(*_QWEN_MOE_KEYS, Key("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.5)),
                flags=_GROUPED_SIGMOID | {"qk_layernorm": True},
                required=_SIGMOID_REQUIRED,
                ignored=("sliding_window_pattern", "num_shared_experts"),
                defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "num_shared_experts": 1},
            ),
            _family(
                "solar_open",
                converters.GROUPED,
                converters.SHARED,
                converters.EXPERT_GROUPS,
                keys=(*_ROUTED_KEYS, Key("attention_bias", "add_qkv_bias", False)),
                flags=_GROUPED_SIGMOID,
                required=_SIGMOID_REQUIRED,
                defaults={
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "rms_norm_eps": 1e-5,
                    "n_shared_experts": 1,
                    "intermediate_size": 10240,  # every layer has experts
                },
            ),
            _family(
                "dots1",
                converters.GROUPED,
                converters.LATE_WINDOW,
                converters.FIRST_DENSE,
                converters.SHARED,
                converters.EXPERT_GROUPS,
                keys=_ROUTED_KEYS,
                flags=_GROUPED_SIGMOID | {"qk_layernorm": True},
                required=_SIGMOID_REQUIRED | {"attention_bias": (False,)},
                defaults={"num_key_value_heads": 32, "norm_topk_prob": False},
            ),
        )
    }
)
OTHER_NAMES = MappingProxyType({"kimi_k2": "deepseek_v3", "qwen3_5_moe": "qwen3_5_moe_text"})


@dataclass(frozen=True)
class TextPart:
    """The language model inside a model that also reads images: its tensors' prefix, and that of all others."""

    prefix: str
    others: str

    def rename(self, name: str) -> str | None:
        """Return the name that the tensor has in a language model alone; None if it is not of it."""
        if name.startswith(self.others):
            return None
        return f"model.{name.removeprefix(self.prefix)}" if name.startswith(self.prefix) else name


TEXT_PARTS = MappingProxyType({"qwen3_5_moe": TextPart("model.language_model.", "model.visual.")})
"""Model types of which only the language model is read; config.json describes it in "text_config"."""
ALIASES = MappingProxyType(
    {"num_experts": "num_local_experts", "num_local_experts": "num_experts", "n_routed_experts": "num_local_experts"}
)
"""Other spellings of keys."""


def get_family(config: Config, source: str) -> Family:
    """Return the family of a config.json.

    Raises:
        CheckpointError: for an unknown model type.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(OTHER_NAMES.get(kind, kind)) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{source}: the model type {kind!r} cannot be converted; there are {', '.join([*FAMILIES, *OTHER_NAMES])}"
        )
    return family
