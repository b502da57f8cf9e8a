"""A key missing in config.json has the default of transformers."""

import importlib

import pytest

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.config import read_config, write_config
from moe_trainer.checkpoint.hf.families import FAMILIES

pytest.importorskip("transformers")
_SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 4,
    "q_lora_rank": 20,
    "head_dim": 12,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-4,
    "first_k_dense_replace": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "swiglu_limit": 3.0,
    "G_I": 4,
    "G_O": 2,
    "R_I": 1,
    "R_O": 2,
    "moe_k": 4,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
    "moe_num_shared_experts": 3,
}
_EXPERTS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "llama4_text": "num_local_experts",
    "mistral4": "n_routed_experts",
    "minimax_m2": "num_local_experts",
    "phimoe": "num_local_experts",
    "olmoe": "num_experts",
    "flex_olmo": "num_experts",
    "afmoe": "num_experts",
    "granitemoe": "num_local_experts",
    "granitemoeshared": "num_local_experts",
    "granitemoe_swa": "num_local_experts",
    "mellum": "num_experts",
    "mimo_v2_flash": "n_routed_experts",
    "qwen2_moe": "num_experts",
    "finer_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "flint": "num_experts",
    "aria_text": "moe_num_experts",
    "qwen3_vl_moe_text": "num_experts",
    "qwen3_next": "num_experts",
    "qwen3_5_moe_text": "num_experts",
    "granitemoehybrid": "num_local_experts",
    "nemotron_h": "n_routed_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "deepseek_v4": "n_routed_experts",
    "deepseek_v32": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
    "glm4_moe_lite": "n_routed_experts",
    "glm_moe_dsa": "n_routed_experts",
    "dots1": "n_routed_experts",
    "solar_open": "n_routed_experts",
    "exaone_moe": "num_experts",
    "hy_v3": "num_experts",
    "hunyuan_v1_moe": "num_experts",
    "ernie4_5_moe": "moe_num_experts",
    "kimi_linear": "num_experts",
    "bailing_hybrid": "num_experts",
    "lfm2_moe": "num_experts",
}
_TEMPERED = {
    "rope_type": "default",
    "rope_theta": 500000.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.2,
}
_VARIANTS = {
    "mistral": [{"sliding_window": 9}],
    "mixtral": [{"sliding_window": 9}],
    "phimoe": [{"num_experts_per_tok": 2}, {"num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}],
    "deepseek_v2": [{"topk_method": "group_limited_greedy"}],
    "deepseek_v4": [
        {},
        {"compress_ratios": [0, 4, 128, 4, 0, 128, 4, 4], "num_hash_layers": 2, "qk_rope_head_dim": 6},
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
    ],
    "exaone_moe": [{}, {"sliding_window": 9, "sliding_window_pattern": 3, "num_shared_experts": 2}],
    "afmoe": [{}, {"num_dense_layers": 3, "num_shared_experts": 1, "mup_enabled": True, "sliding_window": 9}],
    "minimax_m2": [{}, {"rotary_dim": 6}],
    "mistral4": [
        {"n_group": 1, "topk_group": 1},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": _TEMPERED},
    ],
    "ministral3": [{}, {"sliding_window": 9, "rope_parameters": _TEMPERED}],
    "llama4_text": [
        {"num_experts_per_tok": 1},
        {
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "use_qk_norm": False,
            "floor_scale": 99,
            "attn_scale": 0.3,
            "intermediate_size_mlp": 80,
        },
        {"num_experts_per_tok": 1, "attn_temperature_tuning": False, "attention_chunk_size": None},
    ],
    "ernie4_5_moe": [
        {},
        {"moe_num_shared_experts": 0, "moe_layer_end_index": 6},
        {"moe_layer_start_index": 2, "moe_layer_interval": 3},
    ],
    "hunyuan_v1_moe": [{"moe_topk": 4}, {"moe_topk": [2] * 8, "num_key_value_heads": 2}],
    "dots1": [{}, {"sliding_window": 9, "max_window_layers": 5}],
    "finer_moe": [
        {"shared_expert_intermediate_size": 0},
        {"shared_expert_intermediate_size": 48, "R_I": 2, "G_I": 2},
    ],
    "granitemoehybrid": [
        {"rms_norm_eps": 1e-5, "mamba_n_heads": 96, "mamba_expand": 4} | changes
        for changes in (
            {"layer_types": ["mamba", "attention"] * 4, "position_embedding_type": "rope"},
            {"mamba_n_groups": 2, "mamba_d_state": 16},
        )
    ],
    "nemotron_h": [
        {"layers_block_type": ["mamba", "mlp", "attention", "linear_attention"]},
        {"hybrid_override_pattern": "ME*-ME", "moe_latent_size": 24},
    ],
    "mimo_v2_flash": [{}, {"sliding_window_size": 9}],
    "flint": [
        {},
        {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 9, "mlp_only_layers": []},
    ],
    "mellum": [{}, {"layer_types": ["full_attention", "sliding_attention"] * 4}],
    "granitemoe_swa": [{}, {"shared_intermediate_size": 0}, {"layer_rope_theta": [0] + [10000.0] * 6 + [500.0]}],
    "lfm2_moe": [{"layer_types": ["conv", "full_attention"] * 4, "num_dense_layers": 1, "conv_L_cache": 2}],
    "kimi_linear": [{"model_max_length": 64, "num_experts_per_token": 4, "num_expert_group": 4, "topk_group": 2}],
    "bailing_hybrid": [
        {
            "model_max_length": 64,
            "num_experts_per_token": 4,
            "layer_group_size": 4,
            "partial_rotary_factor": 0.5,
        },
        {
            "model_max_length": 64,
            "num_experts_per_token": 4,
            "num_expert_group": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 5,
            "kda_safe_gate": False,
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "short_conv_kernel_size": 3,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
        },
    ],
    "glm4_moe": [{"attention_bias": True, "use_qk_norm": True}],
    "glm4_moe_lite": [{"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5}],
}
_WINDOWS = [{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}]
# transformers builds no such layer and so has no default that would matter: the tensors of the folder decide
_BY_TENSORS = "num_nextn_predict_layers"


def _completed(kind, config):
    """Return the config.json that transformers saves after reading this one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = FAMILIES[kind]
    if family.code_files:
        code = importlib.import_module(f"moe_trainer.checkpoint.hf.remote_code.configuration_{kind}")
        config_class = getattr(code, family.architecture.replace("ForCausalLM", "Config"))
    else:
        config_class = CONFIG_MAPPING[kind]
    return config_class(**{key: value for key, value in config.items() if key != "model_type"}).to_dict()


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"deepseek"}))  # transformers has no such class
def test_missing_config_keys_have_transformers_defaults(kind):
    family = FAMILIES[kind]
    variants = _VARIANTS.get(kind, []) + (
        _WINDOWS
        if kind.startswith("qwen") and kind not in ("qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text")
        else []
    ) or [{}]
    compared = 0
    for variant in variants:
        used = {key.name for key in family.keys} | set(family.defaults) | {"tie_word_embeddings"}
        used -= {"tie_word_embeddings"} & family.required_values.keys()
        used -= set(family.renamed.values())
        used |= {"n_group", "topk_group"} if kind == "deepseek_v2" else set()
        used |= (
            {name for name in _SIZES if name.startswith("index_")} if kind in ("deepseek_v32", "glm_moe_dsa") else set()
        )
        config = {"model_type": kind} | {name: value for name, value in _SIZES.items() if name in used} | variant
        if kind in _EXPERTS:
            config[_EXPERTS[kind]] = 16
        if kind == "deepseek_v2":
            config["norm_topk_prob"] = False
        for missing in [None, *config]:
            if missing == "model_type":
                continue
            fewer = {name: value for name, value in config.items() if name != missing}
            try:
                read = read_config(fewer)[1]
            except CheckpointError as error:
                assert missing is not None and missing in str(error)
                continue
            completed = _completed(kind, fewer) | {_BY_TENSORS: 0}
            completed.pop("sliding_window_size", None)  # kept with the key that it is read into
            assert read == read_config(completed)[1], missing
            compared += 1
    assert compared >= 3


def test_gpt_oss_export_without_rope_scaling_stays_unscaled():
    config = {"model_type": "gpt_oss", "num_local_experts": 8} | {
        name: _SIZES[name]
        for name in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "num_experts_per_tok",
        )
    }
    plain = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    flags = read_config(plain)[1]
    assert flags["position_embedding_type"] == "rope"
    _, written = write_config(flags, 211, "gpt_oss")
    assert _completed("gpt_oss", written)["rope_parameters"]["rope_type"] == "default"
    for silent in (config, config | {"rope_scaling": None}):  # both are yarn there
        assert (
            _completed("gpt_oss", silent)["rope_parameters"]["factor"]
            == read_config(silent)[1]["rotary_scaling_factor"]
            == 32.0
        )


def test_partial_sliding_windows_are_rejected_if_unsupported():
    config = {"model_type": "qwen3_moe", "num_experts": 16} | {
        name: _SIZES[name]
        for name in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
            "num_experts_per_tok",
            "moe_intermediate_size",
        )
    }
    flags = read_config(config | {"use_sliding_window": True, "sliding_window": 9})[1]
    assert flags["window_size"] == (8, 0) and "window_attn_skip_freq" not in flags
    write_config(flags, 211, "qwen3_moe")
    with pytest.raises(CheckpointError, match="window"):
        write_config(flags | {"window_attn_skip_freq": [1, 0] * 4}, 211, "qwen3_moe")


def test_language_models_of_larger_ones_have_defaults_of_their_own():
    import transformers

    glm, qwen_vl, qwen_omni = (
        FAMILIES[name].text_parts[kind]
        for name, kind in (
            ("glm4_moe", "glm4v_moe"),
            ("qwen3_vl_moe_text", "qwen3_vl_moe"),
            ("qwen3_moe", "qwen3_omni_moe"),
        )
    )
    text = transformers.Glm4vMoeConfig().text_config
    assert glm.read({"text_config": {}})["attention_bias"] is text.attention_bias
    whole = transformers.Qwen3VLMoeConfig()
    assert qwen_vl.read({"text_config": {}})["tie_word_embeddings"] is whole.tie_word_embeddings
    text = transformers.Qwen3OmniMoeThinkerConfig().text_config
    found = qwen_omni.read({"thinker_config": {"text_config": {}}})
    assert found["norm_topk_prob"] is text.norm_topk_prob and found["rope_theta"] == text.default_theta
