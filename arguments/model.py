"""ModelArgs: the shape and mathematics of the transformer.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag, int_pair, layer_pattern


@dataclass(frozen=True)
class ModelArgs:
    """The shape and mathematics of the transformer."""

    # ---- flags
    perform_initialization: bool = flag(True, off=("--no-initialization",))
    use_cpu_initialization: bool | None = None
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: Literal["native", "te"] = "native"
    num_layers: int | None = None
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    mtp_use_repeated_layer: bool = False
    mtp_detach_heads: bool = False
    mtp_hsm: bool = False
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    flash_attention_version: Literal[2, 3, 4] | None = None
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    num_query_groups: int = 1
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = False
    apply_residual_connection_post_layernorm: bool = False
    layernorm_epsilon: float = flag(1e-05, "--norm-epsilon")
    layernorm_zero_centered_gamma: bool = flag(False, "--apply-layernorm-1p")
    add_bias_linear: bool = flag(True, off=("--disable-bias-linear",))
    add_qkv_bias: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    rotary_interleaved: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    qk_clip: bool = False
    qk_clip_alpha: float = 0.5
    qk_clip_threshold: float = 100.0
    attention_output_gate: bool = False
    multi_latent_attention: bool = False
    experimental_attention_variant: Literal["gdn", "gdn2", "dsa", "gated_delta_net"] | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    dsa_indexer_loss_coeff: float | None = None
    dsa_indexer_use_sparse_loss: bool = False
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] = "none"
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_rotate_activation: bool = flag(
        True, off=("--no-dsa-indexer-rotate-activation", "--disable-dsa-indexer-rotate-activation",)
    )
    dsa_indexer_scoring_relu: bool = flag(
        True, off=("--no-dsa-indexer-scoring-relu", "--disable-dsa-indexer-scoring-relu",)
    )
    dsa_indexer_k_norm_epsilon: float | None = None
    dsa_indexer_k_norm_fp32: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    init_method_std: float = 0.02
    embedding_init_method_std: float | None = None
    init_model_with_meta_device: bool = False
    apply_query_key_layer_scaling: bool = False
    use_fused_weighted_squared_relu: bool = False
    fused_residual_rmsnorm: bool = False
    use_transformer_engine_op_fuser: bool = False
    use_grouped_gemm_for_shared_expert: bool = False
    use_grouped_gemm_for_dense_mlp: bool = False
    use_te_activation_func: bool = False
    group_query_attention: bool = False
    window_size: tuple[int, int] | None = flag(None, parse=int_pair)
    window_attn_skip_freq: int | list[int] | None = flag(None, parse=layer_pattern)
    max_position_embeddings: int | None = None
    position_embedding_type: Literal[
        "learned_absolute", "rope", "yarn", "mrope", "relative", "none",
    ] = "learned_absolute"
    yarn_original_max_position_embeddings: int | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_correction_range_round_to_int: bool | None = flag(
        None, "--yarn-correction-range-round-to-int", off=("--no-yarn-correction-range-round-to-int",)
    )
    use_rotary_position_embeddings: bool = False
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_seq_len_interpolation_factor: int | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    no_rope_freq: int | list[int] | None = flag(None, parse=layer_pattern)
    add_position_embedding: bool = flag(True, off=("--no-position-embedding",))
    make_vocab_size_divisible_by: int = 128
    squared_relu: bool = False
    swiglu: bool = False
    quick_geglu: bool = False
    untie_embeddings_and_output_weights: bool = False
    masked_softmax_fusion: bool = flag(True, off=("--no-masked-softmax-fusion",))
    bias_gelu_fusion: bool = flag(True, off=("--no-bias-gelu-fusion",))
    bias_swiglu_fusion: bool = flag(True, off=("--no-bias-swiglu-fusion",))
    bias_dropout_fusion: bool = flag(True, off=("--no-bias-dropout-fusion",))
    apply_rope_fusion: bool = flag(True, off=("--no-rope-fusion",))
    rope_type: Literal["rope", "yarn"] | None = None
    use_flash_attn: bool = False
    no_persist_layer_norm: bool = False
    deprecated_use_mcore_models: bool = flag(False, "--use-mcore-models")
    init_method_xavier_uniform: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    mla_down_proj_fusion: bool = False
    linear_attention_freq: int | list[int] | None = flag(None, parse=layer_pattern)
