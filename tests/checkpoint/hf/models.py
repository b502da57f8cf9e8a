"""Tiny random models of transformers, one per convertible family, and functions to compare them with ours."""

import importlib
import re

import torch

import arguments
from moe_trainer.checkpoint.hf.families import FAMILIES
from moe_trainer.checkpoint.manager import load, read_saved_args
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.commands import convert
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState

LAYERS, VOCAB, SEQ = 3, 96, 32
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "vocab_size": VOCAB,
    "max_position_embeddings": 48,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
}
_HYBRID = {
    **_GROUPED,
    **_EXPERTS,
    "head_dim": 16,
    "shared_expert_intermediate_size": 20,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,
}
_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
# 16 heads, so that no score is exactly zero, among which the library takes any
_INDEXED = {
    **_LATENT,
    "q_lora_rank": 20,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 7,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_WINDOWED = ["full_attention", "sliding_attention", "sliding_attention"]
MODELS = {
    "llama": (
        "Llama",
        _GROUPED
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "mistral": ("Mistral", _GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        _GROUPED | {"head_dim": 12, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "mixtral": ("Mixtral", _GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "phimoe": (
        "Phimoe",
        _GROUPED
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        _GROUPED
        | {
            "head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "olmoe": ("Olmoe", _GROUPED | {"num_experts": 8, "num_experts_per_tok": 3}),
    "flex_olmo": ("FlexOlmo", _GROUPED | {"num_experts": 8, "num_experts_per_tok": 3}),
    "afmoe": (
        "Afmoe",
        _GROUPED
        | _EXPERTS
        | {
            "head_dim": 12,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
            "route_scale": 1.7,
            "sliding_window": 6,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
        },
    ),
    "qwen2_moe": ("Qwen2Moe", _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "finer_moe": (
        "FineRMoe",
        _GROUPED
        | {
            "num_experts": 24,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 40,
            "G_I": 4,
            "G_O": 2,
            "R_I": 1,
            "R_O": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": ("Qwen3Moe", _GROUPED | _EXPERTS | {"head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    # sinks, and positions only where there is a window
    "flint": (
        "Flint",
        _GROUPED
        | _EXPERTS
        | {
            "head_dim": 12,
            "layer_types": _WINDOWED,
            "shared_expert_intermediate_size": 40,
            "sliding_window": 6,
            "mlp_only_layers": [1],
        },
    ),
    "aria_text": ("AriaText", _GROUPED | {"moe_num_experts": 8, "moe_topk": 3}),
    "qwen3_next": ("Qwen3Next", _HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5Moe", _HYBRID),
    "granite": ("Granite", _GROUPED | _MULTIPLIERS),
    "granitemoe": ("GraniteMoe", _GROUPED | _MULTIPLIERS | {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "granitemoeshared": (
        "GraniteMoeShared",
        _GROUPED
        | _MULTIPLIERS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _GROUPED
        | _MULTIPLIERS
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 8,
            "mamba_n_groups": 4,
            "mamba_d_state": 10,
            "time_step_limit": [0.4, 0.9],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        _GROUPED
        | {
            "head_dim": 12,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
            "ssm_state_size": 10,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.5,
            "time_step_min": 0.6,
            "rescale_prenorm_residual": False,
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        _GROUPED
        | _MULTIPLIERS
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "sliding_window": 5,
            "layer_rope_theta": [0, 10000.0, 500.0],
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        _GROUPED
        | {
            "head_dim": 12,
            "v_head_dim": 8,
            "attention_value_scale": 0.6,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "layer_types": _WINDOWED,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "mellum": (
        "Mellum",
        _GROUPED
        | _EXPERTS
        | {
            "head_dim": 12,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "layer_types": _WINDOWED,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        _GROUPED
        | {
            "head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 2.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        _LATENT
        | {
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        _GROUPED
        | _SIGMOID
        | {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 3,
            "num_mtp_layers": 0,
        },
    ),
    "llama4_text": (
        "Llama4",
        _GROUPED
        | {
            "head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size": 24,
            "intermediate_size_mlp": 56,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 5,
            "floor_scale": 7,
            "attn_scale": 0.5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral4": (
        "Mistral4",
        _LATENT
        | {
            "q_lora_rank": 20,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.6, "original_max_position_embeddings": 7},
        },
    ),
    "ministral3": (
        "Ministral3",
        _GROUPED
        | {
            "head_dim": 12,
            "sliding_window": 9,
            "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.6, "original_max_position_embeddings": 7},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        _LATENT | _SIGMOID | {"rms_norm_eps": 1e-3, "num_key_value_heads": 4, "q_lora_rank": 20},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        _GROUPED
        | _EXPERTS
        | {
            "head_dim": 12,
            "num_experts_per_tok": 4,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        _GROUPED
        | {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        _GROUPED
        | {
            "head_dim": 12,
            "num_experts": 8,
            "moe_topk": [3, 3, 3],
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0, "factor": 1.0},
        },
    ),
    "hy_v3": (
        "HYV3",
        _GROUPED | _EXPERTS | {"head_dim": 12, "num_shared_experts": 2, "router_scaling_factor": 1.7},
    ),
    "solar_open": ("SolarOpen", _GROUPED | _SIGMOID | {"head_dim": 12, "attention_bias": True}),
    "dots1": (
        "Dots1",
        _GROUPED
        | _SIGMOID
        | {
            "head_dim": 12,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _LATENT
        | {
            "q_lora_rank": 20,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v32": ("DeepseekV32", _INDEXED | {"n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": ("GlmMoeDsa", _INDEXED | {"rms_norm_eps": 1e-3}),
    # 16 indexer heads, as above; the second layer selects 5 of 8 compressed keys
    "deepseek_v4": (
        "DeepseekV4",
        {
            "moe_intermediate_size": 24,
            "head_dim": 12,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 20,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "sliding_window": 5,
            "o_groups": 2,
            "o_lora_rank": 6,
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 5,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            "swiglu_limit": 2.0,
        },
    ),
    # as deepseek_v3, with one group of experts and yarn
    "kimi_k2": (
        "DeepseekV3",
        _LATENT
        | {
            "q_lora_rank": 20,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_mtp_layers": 0,
            "routed_scaling_factor": 2.827,
            "rope_parameters": _YARN,
        },
    ),
    # no query rank
    "moonlight": (
        "DeepseekV3",
        _LATENT
        | {
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_mtp_layers": 0,
            "routed_scaling_factor": 2.446,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        _GROUPED
        | _EXPERTS
        | {
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "routed_scaling_factor": 1.5,
            "conv_L_cache": 3,
        },
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        {key: value for key, value in _LATENT.items() if key != "n_routed_experts"}
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 8,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_mtp_layers": 0,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {key: value for key, value in _LATENT.items() if key != "n_routed_experts"}
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rms_norm_eps": 1e-6,
        },
    ),
}
"""Family or model -> (prefix of its classes, its configuration)."""


def make(name, seed=1, **changes):
    """Return a model of transformers with random norms, biases and buffers."""
    import transformers

    prefix, config = MODELS[name]
    torch.manual_seed(seed)
    has_code = name in FAMILIES and FAMILIES[name].code_files
    classes = (
        importlib.import_module(f"moe_trainer.checkpoint.hf.remote_code.modeling_{name}") if has_code else transformers
    )
    model_class = getattr(classes, f"{prefix}ForCausalLM")
    model = model_class(model_class.config_class(**_SIZES | config | changes))
    for param_name, param in model.named_parameters():
        if param.dim() == 1 or param_name.endswith("_bias"):
            param.data += 0.3 * torch.randn(param.shape)
    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name or "expert_bias" in buffer_name:
            buffer += 0.1 * torch.randn(buffer.shape)
        if "tid2eid" in buffer_name:  # distinct experts of every token
            buffer.copy_(torch.rand(len(buffer), config["n_routed_experts"]).argsort(-1)[:, : buffer.shape[1]])
    return model


# transformers adds its prefix to names of published files, and changes some
_PUBLISHED = {
    "deepseek_v4": (
        (r"^model\.", ""),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
    ),
    "kimi_linear": ((r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1"),),  # of dense layers
}


def published_names(name, tensors):
    """Return the tensors that transformers saves, with the names of published files."""
    for old, new in _PUBLISHED.get(name, ()):
        tensors = {re.sub(old, new, key): value for key, value in tensors.items()}
    return tensors


def run_convert(*words):
    return convert.main([*map(str, words)])


def flags_for(folder, *more, hf_mapping=None):
    """A run that takes its architecture from `folder`."""
    argv = [
        "--load",
        str(folder),
        "--use-checkpoint-args",
        "--seq-length",
        str(SEQ),
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "2",
        "--train-iters",
        "1",
        "--lr",
        "1e-3",
        "--mock-data",
        "--eval-iters",
        "0",
        "--transformer-impl",
        "local",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--no-rope-fusion",
        *more,
    ]
    return arguments.parse_args(argv, world_size=1, checkpoint=read_saved_args(folder, hf_mapping=hf_mapping))


def load_ours(folder, *more):
    """Our model with the weights of a folder (a checkpoint of either kind), on one rank."""
    args = flags_for(folder, *more)
    ps = ParallelState.single()
    (model,) = build_chunks(args, ps, VOCAB)
    found = load(
        folder,
        [model],
        None,
        ps,
        LoadOptions(args=args.as_dict(), load_optim=False, load_rng=False, strictness="raise_all"),
    )
    assert found is not None and found.iteration == 0
    return model


def batch(seed=3):
    """tokens, labels and positions, [2, SEQ]."""
    tokens = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:], torch.arange(SEQ).expand(2, SEQ)


DRAW_EXPERTS = [
    "phimoe",
]
"""Model types that draw experts at random in training."""


def train(model):
    """Set the mode in which transformers trains, without a random choice of experts."""
    return model.train(model.config.model_type not in DRAW_EXPERTS)


def compute_logits(model, tokens_BS):
    with torch.no_grad():
        return model.eval()(tokens_BS).logits
