"""TransformerArgs: what a transformer has, whatever its sublayers are.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.flag_properties import MAX_LAYERS, MAX_SIZE, LayerNumbers
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag, layer_pattern

ROTARY = "position_embedding_type=rope or position_embedding_type=yarn or multi_latent_attention"
YARN = "position_embedding_type=yarn or rope_type=yarn"
"""Conditions of flags of rotary embeddings."""
_GATED = "swiglu or quick_geglu"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TransformerArgs(Section):
    """Sizes, norms, activations and positions."""

    # ---- sizes
    num_layers: int = flag(
        None, restore=("always", "must agree"), bounds=">0", most=MAX_LAYERS, role="size", layers="kinds"
    )
    """Number of decoder layers, without multi-token-prediction layers."""
    hidden_size: int = flag(None, restore=("always", "must agree"), bounds=">0", most=MAX_SIZE, role="size")
    """Width of the residual stream, which every layer reads and writes."""
    ffn_hidden_size: int = flag(None, restore="always", bounds=">0", most=MAX_SIZE, role="size")
    """Width of a dense feed-forward layer. Unset: 4 x hidden size, or 8/3 x hidden size rounded down to a multiple
    of 64 with --swiglu."""
    num_attention_heads: int = flag(None, restore=("always", "must agree"), bounds=">0", most=MAX_SIZE, role="size")
    """Number of query heads."""
    kv_channels: int = flag(None, restore="always", bounds=">0", most=MAX_SIZE, role="size")
    """Number of channels of one attention head. Unset: hidden size / heads."""
    group_query_attention: bool = flag(False, restore="always", role="size")
    """Share each key/value head among a group of query heads."""
    num_query_groups: int = flag(
        1, restore="always", needs="group_query_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Number of key/value heads, with --group-query-attention."""
    window_num_query_groups: int | None = flag(
        None,
        restore="always",
        needs="window_size",
        bounds=">0",
        most=MAX_SIZE,
        role="size",
        demands=SublayerCapability.WINDOW_GROUPS,
    )
    """Number of key/value heads of layers with a window. Unset: --num-query-groups. A flag of this program."""
    value_channels: int | None = flag(
        None,
        restore="always",
        needs="attention",
        bounds=">0",
        most=MAX_SIZE,
        role="size",
        demands=SublayerCapability.VALUE_WIDTH,
    )
    """Number of channels of a value head. Unset: --kv-channels, as queries and keys have. A flag of this program."""
    max_position_embeddings: int = flag(None, restore="unless given", bounds=">0", role="size")
    """Largest number of positions the model may see, in tokens; at least --seq-length."""
    make_vocab_size_divisible_by: int = flag(128, restore="storage", bounds=">0", most=MAX_SIZE, role="size")
    """Pad the vocabulary size to a multiple of this number times the tensor-parallel size."""
    untie_embeddings_and_output_weights: bool = flag(False, restore="always")
    """Give the output layer its own weights instead of the embedding's."""

    # ---- normalization and activations
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", restore="always")
    """Kind of normalization before attention, before the feed-forward layer and at the end."""
    layernorm_epsilon: float = flag(1e-05, "--norm-epsilon", restore="always", bounds=">0")
    """Constant added to the variance before its square root is taken."""
    layernorm_zero_centered_gamma: bool = flag(False, "--apply-layernorm-1p", restore="always", draws=(True,))
    """Store the norm's gain minus one, so that weight decay pulls it towards one."""
    apply_residual_connection_post_layernorm: bool = flag(
        False, restore="always", demands=SublayerCapability.NORMED_RESIDUAL
    )
    """Take the residual after the norm instead of before it (the original transformer)."""
    pre_layernorm: bool = flag(True, off=("--disable-pre-layernorm",), restore="always")
    """Normalize the input of attention and of the feed-forward layer. A flag of this program."""
    post_self_attn_layernorm: bool = flag(False, restore="always", demands=SublayerCapability.NORM_AFTER)
    """Normalize the output of attention before it is added to the residual stream. A flag of this program."""
    post_mlp_layernorm: bool = flag(False, restore="always")
    """Normalize the output of the feed-forward layer or of all experts before it is added to the residual stream. A
    flag of this program."""
    fp32_residual_connection: bool = flag(False, restore="unless given", role="precision")
    """Keep the residual stream in fp32."""
    qk_layernorm: bool = flag(False, restore="always", needs="attention")
    """Normalize the queries and keys of each head."""
    qk_layernorm_all_heads: bool = flag(False, restore="always", demands=SublayerCapability.NORMS_OF_ALL_HEADS)
    """Normalize queries over all heads together, and keys (OLMoE, MiniMax-M2), instead of each head."""
    qk_layernorm_after_rope: bool = flag(False, restore="always", demands=SublayerCapability.NORMS_AFTER_ROPE)
    """Normalize queries and keys after they are rotated (Hunyuan), instead of before."""
    qk_l2_norm: bool = flag(False, restore="always", needs="attention")
    """Normalize queries and keys by their length, without a learned gain (Llama 4)."""
    qk_l2_norm_rope_layers_only: bool = flag(False, restore="always")
    """Normalize them so only in layers with rotary positions (see --no-rope-freq), as published Llama 4 models do. A
    flag of this program."""
    swiglu: bool = flag(False, restore="always")
    """Use gated SiLU feed-forward layers (dense and experts)."""
    squared_relu: bool = flag(False, restore="always")
    """Use squared ReLU in feed-forward layers instead of GELU."""
    quick_geglu: bool = flag(False, restore="always")
    """Use gated feed-forward layers with the sigmoid approximation of GELU."""
    glu_linear_offset: float = flag(0.0, restore="always", needs=_GATED, bounds="any")
    """Constant added to the linear half of a gated feed-forward layer."""
    enable_hyper_connections: bool = flag(False, restore="always")
    """Use several residual streams instead of one; weights of every token mix them (DeepSeek-V4)."""
    num_residual_streams: int = flag(4, restore="always", needs="enable_hyper_connections", bounds=">0")
    """Number of residual streams of hyper-connections."""
    mhc_sinkhorn_iterations: int = flag(20, restore="always", needs="enable_hyper_connections", bounds=">0")
    """Number of normalizations that make a mixing matrix of streams doubly stochastic."""
    mhc_init_gating_factor: float = flag(0.01, restore="never", needs="enable_hyper_connections", bounds=">=0")
    """First value of the factors of what a hyper-connection computes from its token."""
    activation_func_clamp_value: float | None = flag(None, restore="always", needs=_GATED, bounds=">0")
    """Clamp both halves of a gated activation to this magnitude. Unset: no limit."""
    use_fused_weighted_squared_relu: bool = flag(False, restore="never")
    """Fuse squared ReLU with the multiplication by the router's probability."""
    add_bias_linear: bool = flag(True, off=("--disable-bias-linear",), restore="always")
    """Biases in all linear layers."""
    add_qkv_bias: bool = flag(False, restore="always")
    """Add biases to the query/key/value projection only."""
    add_attention_output_bias: bool = flag(
        False, restore="always", needs="attention", demands=SublayerCapability.OUTPUT_BIAS
    )
    """Add a bias to the output projection of attention, also with --disable-bias-linear. A flag of this program."""
    add_output_layer_bias: bool = flag(False, restore="always")
    """Add a bias to every logit, one per row of the vocabulary. A flag of this program."""
    hidden_dropout: float = flag(0.1, restore="unless given", bounds="[0,1)", role="noise")
    """Dropout probability on the residual branches, from 0 to below 1."""
    attention_dropout: float = flag(0.1, restore="unless given", bounds="[0,1)", role="noise")
    """Dropout probability on the attention weights, from 0 to below 1."""

    # ---- positions
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = flag(
        "learned_absolute", restore=("always", "must agree")
    )
    """Kind of position embedding: a learned table, rotary (rope), YaRN, or none."""
    use_rotary_position_embeddings: bool = flag(False, restore="never")
    """Deprecated spelling of --position-embedding-type rope."""
    add_position_embedding: bool = flag(True, off=("--no-position-embedding",), restore="never")
    """Add a learned position table (Megatron's old switch; only rope ignores it)."""
    rotary_base: int = flag(10000, restore="always", needs=ROTARY, bounds=">0")
    """Base of the rotary frequencies."""
    rotary_percent: float = flag(
        1.0,
        restore="always",
        needs=(ROTARY, "!multi_latent_attention or rope_type=rope"),
        bounds="(0,1]",
        demands=SublayerCapability.ROTARY_PERCENT,
    )
    """Fraction of each head's channels that is rotated, above 0 and at most 1."""
    rotary_interleaved: bool = flag(False, restore="always", needs=ROTARY)
    """Rotate neighboring pairs of channels instead of the two halves."""
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, restore="always", needs=("position_embedding_type=rope", "!multi_latent_attention"), bounds=">0"
    )
    """Divide positions by this factor (linear interpolation)."""
    use_rope_scaling: bool = flag(
        False, restore="always", needs=("position_embedding_type=rope", "!multi_latent_attention")
    )
    """Scale rotary frequencies as Llama 3 does, low ones most."""
    rope_scaling_factor: float = flag(8.0, restore="always", needs="use_rope_scaling", bounds=">0")
    """Factor by which --use-rope-scaling extends the context."""
    rope_scaling_high_freq_factor: float = flag(4.0, restore="always", needs="use_rope_scaling", bounds=">0")
    """Rotations per 8192 tokens above which --use-rope-scaling leaves a channel alone: 4 in Llama 3, 1 in Llama 4
    Scout. A flag of this program."""
    rope_type: Literal["rope", "yarn"] | None = flag(None, restore="always", needs="multi_latent_attention")
    """Rotary kind of multi-head latent attention. Unset: yarn with MLA, rope otherwise."""
    no_rope_freq: int | list[int] | None = flag(
        None,
        parse=layer_pattern,
        restore="always",
        needs=ROTARY,
        role="size",
        demands=SublayerCapability.LAYERS_WITHOUT_ROPE,
        layers=LayerNumbers("attention", unset=0, entry=lambda number, every: int(number % every == 0)),
    )
    """Layers without rotary embedding: every N-th, or a pattern with 1 for each of them and 0 for the others."""
    rotary_base_per_layer: list[float] | None = flag(
        None,
        restore="always",
        needs=ROTARY,
        bounds=">0",
        role="size",
        demands=SublayerCapability.LAYER_ROTARY_BASES,
        layers=LayerNumbers("attention"),
    )
    """Base of the rotary frequencies of each layer, one number for each. Unset: --rotary-base in all."""
    window_rotary_percent: float | None = flag(None, restore="always", needs="window_size", bounds="(0,1]")
    """Fraction of each head's channels that layers with a window rotate. Unset: --rotary-percent. A flag of this
    program."""
    window_rope_unscaled: bool = flag(False, restore="always", needs="window_size")
    """Leave positions of layers with a window as they are; YaRN and other scalings act on the others. A flag of this
    program."""
    yarn_original_max_position_embeddings: int | None = flag(
        None, restore="always", needs=(YARN, "rotary_scaling_factor"), bounds=">0", unset=4096
    )
    """Context length, in tokens, that YaRN extends."""
    yarn_beta_fast: float | None = flag(
        None, restore="always", needs=(YARN, "rotary_scaling_factor"), bounds=">0", unset=32.0
    )
    """YaRN: rotations per context above which a channel is left alone."""
    yarn_beta_slow: float | None = flag(
        None, restore="always", needs=(YARN, "rotary_scaling_factor"), bounds=">0", unset=1.0
    )
    """YaRN: rotations per context below which a channel is interpolated fully."""
    yarn_correction_range_round_to_int: bool | None = flag(
        None,
        "--yarn-correction-range-round-to-int",
        off=("--no-yarn-correction-range-round-to-int",),
        restore="always",
        needs=(YARN, "rotary_scaling_factor"),
        unset=True,
    )
    """YaRN: round the limits of the blended channel range to integers."""

    @property
    def value_width(self) -> int:
        """Channels of a value head of attention that is not latent."""
        return self.value_channels or self.kv_channels

    @property
    def query_groups(self) -> int:
        """Number of key/value heads: --num-query-groups with --group-query-attention, else the number of heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads
