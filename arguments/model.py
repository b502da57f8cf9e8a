"""ModelArgs: kinds of attention and other sublayers, adapters, initialization, multipliers and loss of the transformer.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from arguments.flag_properties import MAX_SIZE, MAX_STD, LayerNumbers
from arguments.mechanisms import attention_backends
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import needs_support
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import VARIANTS, needs_variant
from arguments.mtp import num_mtp_depths
from arguments.mup import width_mult
from arguments.schema import flag, int_pair, layer_pattern
from arguments.transformer import ROTARY, YARN, TransformerArgs

_MIXERS = needs_variant(lambda each: each.in_some_layers)
_LINEAR = needs_variant(lambda each: each.has_delta_rule)
_BY_CHANNEL = needs_variant(lambda each: each.decays_by_channel)
_INDEXERS = needs_variant(lambda each: each.has_indexer)
_DSA = needs_variant(lambda each: each.selects_keys)
_COMPRESSED = needs_variant(lambda each: each.compresses_keys)

if TYPE_CHECKING:
    AttentionBackend = str
    AttentionVariant = str
else:
    AttentionBackend, AttentionVariant = Literal[attention_backends.NAMES], Literal[VARIANTS]


@dataclass(frozen=True, repr=False, eq=False)
class ModelArgs(TransformerArgs):
    """The shape and mathematics of the transformer."""

    # ---- attention
    attention_backend: AttentionBackend = flag("auto", restore="never", needs="cuda", role="method")
    """Kernel of attention on CUDA devices: flash (FlashAttention), fused (cuDNN), unfused (scores are stored), local
    (as unfused, and by the local layers), or auto. Sparse attention has its own; blocks of the local layers (context
    parallelism, packed documents, attention sinks) know flash and unfused only."""
    flash_attention_version: Literal[2, 3, 4] | None = flag(None, restore="never")
    """Generation of FlashAttention. All compute the same function."""
    use_flash_attn: bool = flag(False, restore="never")
    """Old request for FlashAttention, which nothing reads any more."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag(
        "vanilla", restore="always", needs="attention", demands=SublayerCapability.SINKS
    )
    """Attention softmax: plain, with one added to the denominator, or with a learned sink per head."""
    window_size: tuple[int, int] | None = flag(
        None,
        parse=int_pair,
        restore="always",
        needs="attention",
        bounds="any",
        role="size",
        demands=SublayerCapability.WINDOW,
    )
    """Attend to a sliding window only: LEFT,RIGHT tokens around the query; -1 is unlimited. Unset: no window."""
    attention_chunk_size: int | None = flag(
        None, restore="always", needs="attention", bounds=">0", role="size", demands=SublayerCapability.CHUNKS
    )
    """Cut sequences into chunks of this number of tokens, and attend to those of the query's chunk only (Llama 4).
    Unset: no chunks. A flag of this program."""
    window_attn_skip_freq: int | list[int] | None = flag(
        None,
        parse=layer_pattern,
        restore="always",
        needs="window_size or attention_chunk_size",
        role="size",
        layers=LayerNumbers("attention", unset=1, entry=lambda number, every: int(number % every != 0)),
    )
    """Layers with full attention instead of the window or the chunks: every N-th, or a pattern with 0 for each of them
    and 1 for the others."""
    attn_temperature_tuning: Literal["llama4", "mistral4"] | None = flag(
        None, restore="always", needs="attention", demands=SublayerCapability.TEMPERATURE
    )
    """Multiply queries by 1 + scale * log(1 + floor(p / floor)): p is the position plus one in layers without rotary
    positions (llama4; other layers have no factor), or the position in all layers (mistral4). Unset: no factor. A flag
    of this program."""
    attn_temperature_scale: float = flag(0.1, restore="always", needs="attn_temperature_tuning", bounds=">=0")
    """Scale of --attn-temperature-tuning. A flag of this program."""
    attn_temperature_floor: int = flag(
        8192, restore="always", needs="attn_temperature_tuning", bounds=">0", role="size"
    )
    """Number of positions after which --attn-temperature-tuning changes its factor. A flag of this program."""
    window_softmax_type: Literal["vanilla", "off-by-one", "learnable"] | None = flag(
        None, restore="always", needs="window_size", demands=SublayerCapability.WINDOW_SINKS
    )
    """Attention softmax of layers with a window. Unset: --softmax-type. A flag of this program."""
    attention_value_scale: float | None = flag(
        None, restore="always", needs="attention", bounds=">0", demands=SublayerCapability.VALUE_SCALE
    )
    """Factor of the values that attention sums. Unset: 1. A flag of this program."""
    head_wise_attn_gate: bool = flag(False, restore="always", needs="attention", demands=SublayerCapability.HEAD_GATES)
    """Multiply the output of every head of latent attention by the sigmoid of one number, made of the layer's input."""
    attention_output_gate: bool = flag(
        False, restore="always", needs="attention", demands=SublayerCapability.CHANNEL_GATES
    )
    """Multiply the attention output by a sigmoid gate of the layer's input."""
    apply_query_key_layer_scaling: bool = flag(False, restore="never")
    """Divide attention scores by the layer number and multiply them back in the softmax."""
    qk_clip: bool = flag(False, restore="never", needs="attention", demands=SublayerCapability.QK_CLIP)
    """Rescale query and key weights when the largest attention logit passes a threshold (QK-Clip)."""
    qk_clip_alpha: float = flag(0.5, restore="never", needs="qk_clip", bounds="[0,1]")
    """Share of the rescaling that goes to the queries, above 0 and below 1; the rest goes to the keys."""
    qk_clip_threshold: float = flag(100.0, restore="never", needs="qk_clip", bounds=">0")
    """Attention logit above which --qk-clip rescales weights."""

    # ---- multi-head latent attention
    multi_latent_attention: bool = flag(False, restore="always")
    """Use DeepSeek's attention with low-rank compressed keys and values (MLA)."""
    q_lora_rank: int | None = flag(
        None, restore="always", needs="multi_latent_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Rank of the compressed queries. Unset: queries are projected directly."""
    kv_lora_rank: int = flag(
        32, restore="always", needs="multi_latent_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Rank of the compressed keys and values."""
    qk_head_dim: int = flag(
        128, restore="always", needs="multi_latent_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Number of channels of a query or key head that are not rotated."""
    qk_pos_emb_head_dim: int = flag(
        64, restore="always", needs="multi_latent_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Number of channels of a query or key head that are rotated."""
    v_head_dim: int = flag(
        128, restore="always", needs="multi_latent_attention", bounds=">0", most=MAX_SIZE, role="size"
    )
    """Number of channels of a value head."""
    rotary_scaling_factor: float = flag(1.0, restore="always", needs=YARN, bounds=">0")
    """Factor by which YaRN extends the context."""
    mscale: float = flag(1.0, restore="always", needs=(YARN, "rotary_scaling_factor"), bounds=">=0")
    """Coefficient of YaRN's attention temperature for the rotated channels."""
    mscale_all_dim: float = flag(0.0, restore="always", needs=(YARN, "rotary_scaling_factor"), bounds=">=0")
    """Coefficient of YaRN's attention temperature for all channels; 0: none."""
    attention_latent_norm_epsilon: float | None = flag(
        None, restore="always", needs=("multi_latent_attention", "qk_layernorm"), bounds=">0", unset="layernorm_epsilon"
    )
    """Constant added to the variance in the norms of the compressed queries, keys and values. Unset: --norm-epsilon,
    as in Megatron-LM. A flag of this program."""
    mla_down_proj_fusion: bool = flag(
        False, restore="never", needs="q_lora_rank", role="method", demands=SublayerCapability.FUSED_DOWN_PROJ
    )
    """Compute the query and key/value down projections in one GEMM, of one parameter; checkpoints have both."""

    # ---- linear and sparse attention
    experimental_attention_variant: AttentionVariant | None = flag(None, restore="always")
    """Replace softmax attention in some layers by gated DeltaNet (gdn),
    Kimi delta attention (kda)
    or short convolutions (short_conv), select keys in all layers (dsa: DeepSeek sparse attention), or attend to a
    window and to compressed keys (dsv4_hybrid: DeepSeek-V4)."""
    linear_attention_freq: int | list[int] | None = flag(
        None,
        parse=layer_pattern,
        restore="always",
        needs=_MIXERS,
        role="size",
        demands=SublayerCapability.LINEAR_LAYERS,
        layers="kinds",
    )
    """Layers with linear attention or short convolutions: N keeps softmax attention in every N-th layer only, a
    pattern has 1 for each layer without it and 0 for the others."""
    linear_conv_kernel_dim: int = flag(4, restore="always", needs=_MIXERS, bounds=">0")
    """Width of the causal convolution of a layer with linear attention or short convolutions, in tokens."""
    linear_key_head_dim: int = flag(128, restore="always", needs=_LINEAR, bounds=">0", role="size")
    """Number of channels of a key head of a layer with linear attention."""
    linear_value_head_dim: int = flag(128, restore="always", needs=_LINEAR, bounds=">0", role="size")
    """Number of channels of a value head of a layer with linear attention."""
    linear_num_key_heads: int = flag(16, restore="always", needs=_LINEAR, bounds=">0", role="size")
    """Number of key heads of a layer with linear attention."""
    linear_num_value_heads: int = flag(32, restore="always", needs=_LINEAR, bounds=">0", role="size")
    """Number of value heads of a layer with linear attention."""
    kda_gate_rank: int | None = flag(None, restore="always", needs=_BY_CHANNEL, bounds=">0", role="size")
    """Kimi delta attention: number of channels of the latents from which decays and output gates are made. Unset: no
    latents, one matrix each. A flag of this program."""
    kda_decay_lower_bound: float | None = flag(None, restore="always", needs=_BY_CHANNEL, bounds="any")
    """Kimi delta attention: lower bound of the logarithm of a decay, which is then a sigmoid times the bound. Unset: no
    bound. A flag of this program."""
    hybrid_layer_pattern: str | None = flag(None, restore="always", role="size", layers="kinds")
    """Layers of one sublayer each, one letter per layer: {letters}. A | begins the next pipeline stage, and a / a depth
    of multi-token prediction, all with the same letters. Determines --num-layers, --moe-layer-freq, --mtp-num-layers
    and the variant of attention. Unset: transformer layers."""
    hybrid_override_pattern: str | None = flag(None, restore="never")
    """Deprecated spelling of --hybrid-layer-pattern."""
    mtp_hybrid_override_pattern: str | None = flag(None, restore="always", layers="kinds")
    """Deprecated: the letters of each of --mtp-num-layers depths of multi-token prediction, which
    --hybrid-layer-pattern has after a /."""
    is_hybrid_model: bool = flag(False, restore="never")
    """Deprecated: --hybrid-layer-pattern makes a model hybrid."""
    mamba_state_dim: int = flag(128, restore="always", needs="hybrid_layer_pattern", bounds=">0", role="size")
    """Number of channels of the state of a Mamba layer."""
    mamba_head_dim: int = flag(64, restore="always", needs="hybrid_layer_pattern", bounds=">0", role="size")
    """Number of channels of a head of a Mamba layer."""
    mamba_num_groups: int = flag(8, restore="always", needs="hybrid_layer_pattern", bounds=">0", role="size")
    """Number of groups of heads of a Mamba layer, which share what reads and writes the state."""
    mamba_num_heads: int | None = flag(None, restore="always", needs="hybrid_layer_pattern", bounds=">0", role="size")
    """Number of heads of a Mamba layer. Unset: 2 x hidden size / --mamba-head-dim."""
    mamba_step_size_min: float | None = flag(None, restore="always", needs="hybrid_layer_pattern", bounds=">=0")
    """Lower limit of the step sizes of a Mamba layer. Unset: none, as in Megatron-LM. A flag of this program."""
    mamba_step_size_max: float | None = flag(None, restore="always", needs="hybrid_layer_pattern", bounds=">0")
    """Upper limit of the step sizes of a Mamba layer. Unset: none, as in Megatron-LM. A flag of this program."""
    dsa_indexer_n_heads: int = flag(None, restore="always", needs=_INDEXERS, bounds=">0", role="size")
    """Sparse attention: number of heads of the indexer that selects keys."""
    dsa_indexer_head_dim: int = flag(None, restore="always", needs=_INDEXERS, bounds=">0", role="size")
    """Sparse attention: number of channels of an indexer head."""
    dsa_indexer_topk: int = flag(None, restore="always", needs=_INDEXERS, bounds=">0", role="size")
    """Sparse attention: number of keys that each query attends to."""
    dsa_indexer_topk_freq: int = flag(1, restore="always", bounds=">0")
    """Sparse attention: compute a new selection in every N-th layer, and reuse it in the others."""
    dsa_indexer_skip_topk_offset: int = flag(0, restore="always", bounds=">=0")
    """Sparse attention: first layer that may reuse a selection."""
    dsa_indexer_loss_coeff: float | None = flag(
        None, restore="to evaluate", needs=_DSA, bounds=">=0", demands=SublayerCapability.INDEXER_LOSS
    )
    """Sparse attention: weight of the indexer's KL loss. Unset or 0: the indexer does not learn."""
    dsa_indexer_warmup: bool = flag(False, restore="to evaluate", needs=_DSA)
    """Sparse attention, first stage: attention stays dense, the indexers learn from it, every other parameter is
    frozen. A flag of this program."""
    dsa_indexer_use_sparse_loss: bool = flag(False, restore="never", needs=_DSA)
    """Sparse attention: compute the KL loss over the selected keys only."""
    dsa_indexer_rope_interleaved: bool = flag(False, restore="always", needs=_DSA)
    """Sparse attention: rotate neighboring pairs of channels in the indexer, not its two halves."""
    dsa_indexer_rotate_activation: bool = flag(
        True,
        off=("--no-dsa-indexer-rotate-activation", "--disable-dsa-indexer-rotate-activation"),
        restore="always",
        needs=_INDEXERS,
    )
    """Sparse attention: apply a Hadamard rotation to indexer queries and keys."""
    dsa_indexer_scoring_relu: bool = flag(
        True,
        off=("--no-dsa-indexer-scoring-relu", "--disable-dsa-indexer-scoring-relu"),
        restore="always",
        needs=_INDEXERS,
    )
    """Sparse attention: apply ReLU to the indexer's scores."""
    dsa_indexer_k_norm_epsilon: float | None = flag(
        None, restore="always", needs=_DSA, bounds=">0", unset="layernorm_epsilon"
    )
    """Sparse attention: constant added to the variance in the norm of the indexer's keys. Unset: --norm-epsilon."""
    dsa_indexer_k_norm_fp32: bool = flag(False, restore="never")
    """Sparse attention: compute the indexer's key norm in fp32."""
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] = flag("none", restore="never", needs=_DSA)
    """Sparse attention: kernel library; none: torch's own GEMMs."""
    dsa_attention_form: Literal["auto", "masked", "gathered"] = flag("auto", restore="never", needs=_DSA, role="method")
    """Sparse attention: attend to all keys and mask the unselected ones, gather the latents of the selected ones, or
    whichever is cheaper for the shapes. A flag of this program."""

    csa_compress_ratios: int | list[int] | None = flag(
        None, parse=layer_pattern, restore="always", needs=_COMPRESSED, role="size"
    )
    """Compressed attention: tokens of a compressed key in each layer, as a list. 0: the window only; 4: overlapping
    windows, among which an indexer selects; more: all of them are visible."""
    csa_window_size: int = flag(128, restore="always", needs=_COMPRESSED, bounds=">0", role="size")
    """Compressed attention: number of recent tokens that a query sees uncompressed."""
    csa_compress_rotary_base: float = flag(40000.0, restore="always", needs=_COMPRESSED, bounds=">0")
    """Compressed attention: base of the rotary frequencies of layers with compressed keys."""
    csa_dense_mode: bool = flag(False, restore="always", needs=_COMPRESSED)
    """Compressed attention: no indexers; queries see all compressed keys of the past."""
    o_groups: int = flag(8, restore="always", needs=_COMPRESSED, bounds=">0", role="size")
    """Compressed attention: number of groups of heads with an output projection of low rank."""
    o_lora_rank: int = flag(1024, restore="always", needs=_COMPRESSED, bounds=">0", role="size")
    """Compressed attention: rank of the output projection of a group of heads."""

    # ---- low-rank adapters
    lora_dim: int | None = flag(None, restore="adapters", bounds=">0", demands=SublayerCapability.ADAPTERS)
    """LoRA: rank of the adapters, which are trained while every other parameter is frozen. Unset: none. A flag of this
    program."""
    lora_alpha: float = flag(32.0, restore=("adapters", "must agree"), needs="lora_dim", bounds=">0")
    """LoRA: an adapter's output is multiplied by this and divided by --lora-dim. A flag of this program."""
    lora_dropout: float = flag(0.0, restore="never", needs="lora_dim", bounds="[0,1)", role="noise")
    """LoRA: dropout probability of an adapter's input. A flag of this program."""
    lora_target_modules: list[str] = flag(["all-linear"], restore="adapters", needs="lora_dim")
    """LoRA: linears of the decoder layers that get an adapter: last parts of their names (linear_qkv linear_proj
    linear_fc1 linear_fc2), patterns of names with dots (*.mlp.experts.*), or all-linear. A flag of this program."""

    # ---- multi-token prediction
    mtp_num_layers: int | None = flag(
        None, restore="always", bounds=">=0", most=MAX_SIZE, role="size", demands=SublayerCapability.MTP
    )
    """Depth of multi-token prediction: number of extra layers, which predict 2, 3, ... tokens ahead. Unset or 0:
    none."""
    mtp_loss_scaling_factor: float = flag(0.1, restore="never", needs="mtp_num_layers", bounds=">=0")
    """Weight of the mean multi-token-prediction loss in the total loss."""
    mtp_use_repeated_layer: bool = flag(False, restore="always", needs="mtp_num_layers")
    """Use one layer's weights for every prediction depth."""
    mtp_detach_heads: bool = flag(False, restore="never", needs="mtp_num_layers")
    """Do not send multi-token-prediction gradients into the main model."""
    mtp_loss_per_token: bool = flag(False, restore="never", needs=("mtp_num_layers", "calculate_per_token_loss"))
    """Divide the multi-token-prediction losses by the trained tokens of the global batch, as --calculate-per-token-loss
    does with the main loss, so that they depend on no microbatches, packs and context-parallel ranks. Off: each
    context-parallel rank takes the mean over its tokens of a microbatch. A flag of this program."""
    mtp_hsm: bool = flag(False, restore="always")
    """Predict the hidden state of the next depth (hidden-state matching)."""

    # ---- initialization
    init_method_std: float = flag(0.02, restore="never", bounds=">=0", most=MAX_STD)
    """Standard deviation of the initial weights; that of output projections is divided by sqrt(2 x layers)."""
    embedding_init_method_std: float | None = flag(None, restore="never", bounds=">=0", most=MAX_STD)
    """Standard deviation of the initial embedding. Unset: --init-method-std."""
    init_method_xavier_uniform: bool = flag(False, restore="never")
    """Draw initial weights from Xavier's uniform distribution."""
    perform_initialization: bool = flag(True, off=("--no-initialization",), restore="never")
    """Initialize the weights (off: leave them as allocated, when a checkpoint follows)."""
    use_cpu_initialization: bool | None = flag(None, restore="never")
    """Draw the initial weights on the CPU."""
    init_model_with_meta_device: bool = flag(False, restore="never")
    """Build the model without storage first, and materialize it when it is sharded."""

    # ---- maximal update parametrization
    use_mup: bool = flag(False, restore=("to evaluate", "must agree"), demands=SublayerCapability.MUP)
    """Scale initial weights, logits and learning rates with the width (muP), so that rates tuned at one width fit
    another."""
    mup_base_hidden_size: int | None = flag(None, restore="to evaluate", needs="use_mup", bounds=">0", role="size")
    """muP: the width at which nothing is scaled. Unset: --hidden-size."""
    mup_embedding_mult: float = flag(1.0, restore="to evaluate", needs="use_mup", bounds=">0")
    """muP: multiply the embedding's output by this."""
    mup_output_mult: float = flag(1.0, restore="to evaluate", needs="use_mup", bounds=">0")
    """muP: multiply the logits by this. 1: base width / width."""
    mup_base_head_dim: float | None = flag(None, restore="to evaluate", needs="use_mup", bounds=">0")
    """muP: multiply attention scores by the root of this. Unset: 1."""
    mup_attn_scale_power: float = flag(1.0, restore="to evaluate", needs="use_mup", bounds=">=0")
    """muP: divide attention scores by the head size to this power (without muP 0.5)."""

    # ---- multipliers (Granite)
    embedding_multiplier: float = flag(1.0, restore="always", bounds=">0")
    """Multiply the embedding's output by this."""
    residual_multiplier: float = flag(1.0, restore="always", bounds=">0")
    """Multiply the output of every attention and feed-forward sublayer by this before it is added to the residual."""
    attention_multiplier: float | None = flag(
        None, restore="always", bounds=">0", demands=SublayerCapability.MULTIPLIER
    )
    """Multiply attention scores by this. Unset: 1 / root of the head size."""
    logits_scaling: float = flag(1.0, restore="always", bounds=">0")
    """Divide the logits by this."""

    # ---- loss and fused kernels
    cross_entropy_loss_fusion: bool = flag(False, restore="never")
    """Use a fused cross-entropy kernel."""
    cross_entropy_fusion_impl: Literal["native", "te"] = flag("native", restore="never")
    """Implementation of --cross-entropy-loss-fusion: native or TransformerEngine (te)."""
    masked_softmax_fusion: bool = flag(True, off=("--no-masked-softmax-fusion",), restore="never")
    """Fuse scaling, masking and softmax of attention."""
    bias_gelu_fusion: bool = flag(
        True,
        off=("--no-bias-gelu-fusion",),
        restore="unless given",
        needs=("!swiglu", "!quick_geglu", "!squared_relu", "add_bias_linear"),
    )
    """Fuse bias and GELU; with biases this is the tanh approximation of GELU, as in Megatron."""
    bias_swiglu_fusion: bool = flag(True, off=("--no-bias-swiglu-fusion",), restore="never", needs=("swiglu", "cuda"))
    """Fuse bias and SwiGLU: with --swiglu, have `activation` among the default --triton-kernels."""
    bias_dropout_fusion: bool = flag(True, off=("--no-bias-dropout-fusion",), restore="never")
    """Fuse bias, dropout and residual."""
    apply_rope_fusion: bool = flag(True, off=("--no-rope-fusion",), restore="never", needs=(ROTARY, "cuda"))
    """Use a fused rotary-embedding kernel: have `rope` among the default --triton-kernels."""
    no_persist_layer_norm: bool = flag(False, restore="never")
    """Do not use the persistent fused layer-norm kernel."""
    fused_residual_rmsnorm: bool = flag(False, restore="never")
    """Fuse the residual addition with RMSNorm."""
    use_transformer_engine_op_fuser: bool = flag(
        False,
        restore="never",
        needs=("num_experts", "moe_grouped_gemm", needs_support(ImplementationCapability.OP_FUSER), "cuda"),
    )
    """Let TransformerEngine fuse fc1, activation and fc2 of the routed experts; token counts stay on the device."""
    use_te_activation_func: bool = flag(False, restore="never")
    """Use TransformerEngine's activation function."""
    use_grouped_gemm_for_shared_expert: bool = flag(False, restore="never")
    """Run the shared expert through the grouped GEMM."""
    use_grouped_gemm_for_dense_mlp: bool = flag(False, restore="never")
    """Run dense feed-forward layers through the grouped GEMM."""
    deprecated_use_mcore_models: bool = flag(False, "--use-mcore-models", restore="never")
    """Use Megatron-Core's models, the only kind."""

    @property
    def width_mult(self) -> float:
        """Width / base width under muP (arXiv 2203.03466), else 1."""
        return width_mult(self.use_mup, self.hidden_size, self.mup_base_hidden_size)

    @property
    def unfused_operations(self) -> tuple[str, ...]:
        """Names of --triton-kernels that the flags switch off; a name that is given there is used all the same."""
        rope = () if self.apply_rope_fusion else ("rope",)
        return (*rope, "activation") if self.swiglu and not self.bias_swiglu_fusion else rope

    @property
    def softmax_scale(self) -> float | None:
        """Factor of attention scores; None for 1 / sqrt(key size), which latent attention always has."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        if not self.use_mup or self.multi_latent_attention:
            return None
        base = 1.0 if self.mup_base_head_dim is None else self.mup_base_head_dim**0.5
        return base / self.kv_channels**self.mup_attn_scale_power

    @property
    def embedding_scale(self) -> float:
        """Factor of the embedding's output."""
        return self.embedding_multiplier * (self.mup_embedding_mult if self.use_mup else 1.0)

    @property
    def logit_scale(self) -> float:
        """Factor of the logits."""
        return (self.mup_output_mult if self.use_mup else 1.0) / self.logits_scaling

    @property
    def num_mtp_depths(self) -> int:
        """Number of depths of multi-token prediction."""
        return num_mtp_depths(
            {"mtp_num_layers": self.mtp_num_layers, "hybrid_layer_pattern": self.hybrid_layer_pattern}
        )

    @property
    def mamba_heads(self) -> int:
        """Number of heads of a Mamba layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def of_latents(self) -> "ModelArgs":
        """These settings with the epsilon of the norms of latents."""
        epsilon = self.attention_latent_norm_epsilon
        return self if epsilon is None else replace(self, layernorm_epsilon=epsilon)
