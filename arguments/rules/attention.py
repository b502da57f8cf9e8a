"""Attention variants, positions, multi-token prediction."""

from collections.abc import Iterator

from arguments.layer_pattern import mention_delta_rule, mixing_sublayers
from arguments.mechanisms.format_kinds.eight_bit import OUTPUT_LAYER
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.sublayers import (
    GATED_DELTA_NET,
    OLD_VARIANTS,
    SOFTMAX_ATTENTION,
    VARIANT,
    always_rotates,
    relative_of,
    variant_of,
)
from arguments.mechanisms.support import rejected_flags
from arguments.query_temperature import QUERY_TEMPERATURES
from arguments.rules.derived_sizes import DerivedSizes, divides, positive
from arguments.settings import Limit, Settings, Violation

MTP_POSITIONS = ("rope", "none")
_MENTION = f"{{{VARIANT}}}"


# Derived values.


def resolve_rotary_switch(s: Settings, _f: DerivedSizes) -> None:
    if s.use_rotary_position_embeddings:
        s.set_derived("position_embedding_type", "rope", "from --use-rotary-position-embeddings")


def resolve_rope_type(s: Settings, _f: DerivedSizes) -> None:
    if s.multi_latent_attention and s.rope_type is None:
        s.set_derived("rope_type", "yarn", "the default of multi-latent attention")


def resolve_latent_positions(s: Settings, _f: DerivedSizes) -> None:
    if always_rotates(s) and s.position_embedding_type == "none" and not s.hybrid_layer_pattern:
        if s.no_rope_freq is None:
            s.note(
                f"{s.shown('position_embedding_type')}: latent attention rotates all the same, by --rope-type, as in "
                "Megatron-LM; --no-rope-freq 1 leaves it without positions."
            )
        s.set_derived("position_embedding_type", "rope", "latent attention")


def note_learned_positions(s: Settings, _f: DerivedSizes) -> None:
    if always_rotates(s) and s.position_embedding_type == "learned_absolute":
        s.note(
            f"{s.shown('position_embedding_type')}: the embedding adds learned positions, and latent attention rotates "
            "by --rope-type, as in Megatron-LM; --position-embedding-type rope only rotates."
        )


def note_latent_norms(s: Settings, _f: DerivedSizes) -> None:
    if s.multi_latent_attention and s.qk_layernorm and s.q_lora_rank is None:
        s.note(
            f"{s.flag('qk_layernorm')} without --q-lora-rank normalizes the latents of keys and values alone, as "
            "DeepSeek-V2-Lite and releases of Megatron-Core do; Megatron-LM's main branch since July 2026 also "
            "normalizes the input of linear_q_proj."
        )


def resolve_old_variant_name(s: Settings, _f: DerivedSizes) -> None:
    old = s.values[VARIANT]
    if new := OLD_VARIANTS.get((VARIANT, old)):
        s.note(f"{s.shown(VARIANT)} is an old name: taken as {new}.")
        s.set_derived(VARIANT, new, f"from {old}")


# Checks.


def check_mla_without_gqa(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.multi_latent_attention and s.group_query_attention:
        yield s.violation(
            "{multi_latent_attention} cannot be combined with {group_query_attention}: it has another way to share "
            "keys and values."
        )


def limit_head_gates(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.head_wise_attn_gate and SOFTMAX_ATTENTION in mixing_sublayers(s),
        "{head_wise_attn_gate} needs {multi_latent_attention:flag}. Grouped attention has "
        "{attention_output_gate:flag}, a gate for each channel of a head.",
    )


def check_rope_type(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.multi_latent_attention and s.apply_rope_fusion and s.rope_type != "yarn":
        yield s.violation(
            "{multi_latent_attention} with {rope_type} needs {apply_rope_fusion:flag}: the fused kernel knows only "
            "yarn."
        )
    if not s.multi_latent_attention and s.rope_type == "yarn":
        yield s.violation(
            "{rope_type} needs {multi_latent_attention:flag}; other attention takes --position-embedding-type yarn."
        )


def check_mla_options(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.mla_down_proj_fusion and SOFTMAX_ATTENTION in mixing_sublayers(s):
        yield s.violation("{mla_down_proj_fusion} needs {multi_latent_attention:flag}.")


def check_mtp_positions(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.mtp_depths and s.position_embedding_type not in MTP_POSITIONS:
        yield s.violation(
            "{mtp_num_layers} needs {position_embedding_type:flag} rope or none, not {position_embedding_type:value}."
        )


def check_no_position_embedding(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.add_position_embedding and s.position_embedding_type not in MTP_POSITIONS:
        yield s.violation(
            "{add_position_embedding} contradicts {position_embedding_type}; say what is meant with "
            "--position-embedding-type rope or none."
        )


def check_qk_clip_alpha(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.qk_clip:
        return
    if s.qk_clip_alpha in (0, 1):  # beyond them: numbers.py
        yield s.violation("{qk_clip_alpha} must be above 0 and below 1 with {qk_clip}.")


def limit_attention_multiplier(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.attention_multiplier is not None and s.use_mup,
        "{attention_multiplier:flag} cannot be combined with {use_mup:flag}, whose factor of scores follows from "
        "{mup_attn_scale_power:flag}.",
    )


def limit_max_logits(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for dest in ("qk_clip", "log_max_attention_logit"):
        yield Limit(
            getattr(s, dest) and s.cuda_graph_impl != "none",
            "{:flag} cannot be combined with {cuda_graph_impl}: a captured attention records nothing.",
            (dest,),
        )
    for norm in ("qk_layernorm", "qk_l2_norm"):
        yield Limit(
            s.qk_clip and getattr(s, norm) and not s.multi_latent_attention,
            "{qk_clip} cannot be combined with {:flag}, except with {multi_latent_attention:flag}: the norm sets the "
            "length of queries and keys, so the weights do not change the logits.",
            (norm,),
        )
    for shards, reason in rejected_flags(SHARDINGS, ShardingCapability.QK_CLIP):
        yield Limit(
            s.qk_clip and getattr(s, shards), f"{{qk_clip}} cannot be combined with {{:flag}}: {reason}.", (shards,)
        )


def check_kinds_of_head_norms(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("qk_layernorm_all_heads", "qk_layernorm_after_rope"):
        if getattr(s, dest) and not s.qk_layernorm:
            yield s.violation("{:flag} needs {qk_layernorm:flag}.", dest)


def limit_value_heads(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.value_channels is not None and s.attention_output_gate,
        "{value_channels:flag} cannot be combined with {attention_output_gate:flag}: gates have the width of queries.",
    )


def limit_biases(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """List what biases of two layers alone are not built for."""
    for dest, reason in (
        (OUTPUT_LAYER, "a quantized output layer has no bias"),
        ("defer_embedding_wgrad_compute", "the gradients of weight and bias are computed at once"),
        *rejected_flags(SHARDINGS, ShardingCapability.OUTPUT_BIAS),
        ("moe_use_upcycling", "a dense model's bias of logits is not read"),
    ):
        yield Limit(
            s.add_output_layer_bias and getattr(s, dest),
            f"{{add_output_layer_bias:flag}} cannot be combined with {{:flag}}: {reason}.",
            (dest,),
        )


def limit_norm_after_rope(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.qk_layernorm_after_rope and s.qk_layernorm_all_heads,
        "{qk_layernorm_after_rope:flag} cannot be combined with {qk_layernorm_all_heads:flag}.",
    )


def limit_norm_of_all_heads(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """List what norms over all heads are not built for."""
    yield Limit(
        s.qk_layernorm_all_heads and s.normalization != "RMSNorm",
        "{qk_layernorm_all_heads:flag} cannot be combined with {normalization}: only root mean squares are summed over "
        "tensor-parallel ranks.",
    )
    groups = s.num_query_groups if s.group_query_attention else s.num_attention_heads
    if s.window_num_query_groups is not None and groups is not None:
        groups = min(groups, s.window_num_query_groups)
    yield Limit(
        s.qk_layernorm_all_heads and groups is not None and s.tensor_model_parallel_size > groups,
        "{qk_layernorm_all_heads:flag} cannot be combined with {tensor_model_parallel_size} above the number of "
        "key-value groups: their ranks have keys in common.",
    )


def check_flags_of_some_layers(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check that flags that act in some layers have such layers."""
    if s.qk_l2_norm_rope_layers_only and not s.qk_l2_norm:
        yield s.violation("{qk_l2_norm_rope_layers_only:flag} needs {qk_l2_norm:flag}.")
    temperature = QUERY_TEMPERATURES.get(s.attn_temperature_tuning)
    if temperature is not None and temperature.without_rope and s.no_rope_freq is None:
        yield s.violation(
            "{attn_temperature_tuning} needs {no_rope_freq:flag}: layers without rotary positions have the factor."
        )
    if s.attention_chunk_size is not None and s.window_size is not None:
        yield s.violation("{attention_chunk_size} contradicts {window_size}: a layer has a window or chunks.")
    high = s.rope_scaling_high_freq_factor
    if s.use_rope_scaling and high is not None and 0 < high < 1:
        yield s.violation(
            "{rope_scaling_high_freq_factor} must be at least 1, the factor below which channels are scaled fully."
        )


def check_gated_delta_net(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    mention = _MENTION if relative_of(s).has_delta_rule else mention_delta_rule(s)
    if not mention:
        return
    keys, values = "linear_num_key_heads", "linear_num_value_heads"
    if s.linear_attention_freq is None and mention == _MENTION:
        yield s.violation(f"{mention} needs {{linear_attention_freq:flag}}: which layers have linear attention.")
    for dest in (keys, values):
        if not positive(getattr(s, dest)):
            yield s.violation("{} must be at least 1.", dest)
        elif not divides(f.tp * f.largest_cp, getattr(s, dest)):
            yield s.violation(
                "{} must be a multiple of {ranks} ({tensor_model_parallel_size} * {cp} context-parallel ranks).",
                dest,
                "context_parallel_size",
                ranks=f.tp * f.largest_cp,
                cp=f.largest_cp,
            )
    if not divides(getattr(s, keys), getattr(s, values)):
        yield s.violation("{linear_num_value_heads} must be a multiple of {linear_num_key_heads}.")


def limit_delta_net_activation(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for mention in (_MENTION, GATED_DELTA_NET.mention_of_letter):
        yield Limit(
            not s.swiglu and mention_delta_rule(s) == mention,
            f"{mention} needs {{swiglu:flag}}: its convolution uses the activation of the feed-forward layers, and "
            "only SiLU is built.",
        )


def check_short_convolution(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not variant_of(s).is_convolution:
        return
    if s.linear_attention_freq is None:
        yield s.violation(f"{_MENTION} needs {{linear_attention_freq:flag}}: which layers have convolutions.")
    if not divides(f.tp * f.largest_cp, s.hidden_size):
        yield s.violation(
            "{hidden_size} must be a multiple of {ranks} ({tensor_model_parallel_size} * {cp} context-parallel ranks) "
            f"with {_MENTION}.",
            "context_parallel_size",
            ranks=f.tp * f.largest_cp,
            cp=f.largest_cp,
        )


def check_layer_lists(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("linear_attention_freq", "no_rope_freq", "rotary_base_per_layer", "window_attn_skip_freq"):
        value = getattr(s, dest)
        if isinstance(value, list | tuple) and f.layers is not None and len(value) != f.layers:
            yield s.violation(
                "{:flag} describes {count} layers, but {num_layers}; give one entry for each layer.",
                dest,
                count=len(value),
            )
        elif isinstance(value, int) and value < 1:
            yield s.violation("{} must be at least 1.", dest)
