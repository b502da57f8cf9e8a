"""Rules 107-110: attention variants, positions, multi-token prediction."""

from collections.abc import Iterator

from arguments.rules.facts import Facts, broken, divides, positive, say
from arguments.settings import Settings, Violation

MTP_POSITIONS = ("rope", "none")
DELTA_NETS = ("gdn", "gdn2")


# Derived and normalised values.


def rotary_switch(s: Settings, _f: Facts) -> None:
    if s.use_rotary_position_embeddings:
        s.set_derived("position_embedding_type", "rope", "from --use-rotary-position-embeddings")


def rope_type(s: Settings, _f: Facts) -> None:
    if s.multi_latent_attention and s.rope_type is None:
        s.set_derived("rope_type", "yarn", "the default of multi-latent attention")


def old_delta_net_name(s: Settings, _f: Facts) -> None:
    if s.experimental_attention_variant == "gated_delta_net":
        s.note(f"{s.shown('experimental_attention_variant')} is an old name: taken as gdn.")
        s.set_derived("experimental_attention_variant", "gdn", "from gated_delta_net")


# Checks.


def latent_attention_has_no_groups(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.multi_latent_attention and s.group_query_attention:
        yield broken(
            s,
            f"{s.flag('multi_latent_attention')} cannot be combined with {s.flag('group_query_attention')}: it has "
            "its own way to share keys and values.",
            "multi_latent_attention",
            "group_query_attention",
        )


def latent_attention_has_no_gate(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.multi_latent_attention and s.attention_output_gate:
        yield broken(
            s,
            f"{s.flag('attention_output_gate')} cannot be combined with {s.flag('multi_latent_attention')}: gates are part of the "
            "fused projection of queries, keys and values, which latent attention does not have.",
            "attention_output_gate",
            "multi_latent_attention",
        )


def rope_type_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.multi_latent_attention and s.apply_rope_fusion and s.rope_type != "yarn":
        yield broken(
            s,
            f"{s.flag('multi_latent_attention')} with {say(s, 'rope_type')} needs --no-rope-fusion: the fused kernel "
            "knows only yarn.",
            "rope_type",
            "apply_rope_fusion",
            "multi_latent_attention",
        )
    if not s.multi_latent_attention and s.rope_type == "yarn":
        yield broken(
            s,
            f"{say(s, 'rope_type')} needs --multi-latent-attention; other attention takes --position-embedding-type "
            "yarn.",
            "rope_type",
            "multi_latent_attention",
        )


def latent_options_need_latent_attention(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.mla_down_proj_fusion and not s.multi_latent_attention:
        yield broken(
            s,
            f"{s.flag('mla_down_proj_fusion')} needs --multi-latent-attention.",
            "mla_down_proj_fusion",
            "multi_latent_attention",
        )


def prediction_heads_fit(s: Settings, _f: Facts) -> Iterator[Violation]:
    count = s.mtp_num_layers
    if count is None:
        return
    if count and s.position_embedding_type not in MTP_POSITIONS:
        yield broken(
            s,
            f"{say(s, 'mtp_num_layers')} needs --position-embedding-type rope or none, not "
            f"{s.position_embedding_type}.",
            "mtp_num_layers",
            "position_embedding_type",
        )


def no_position_embedding_is_meant(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.add_position_embedding and s.position_embedding_type not in MTP_POSITIONS:
        yield broken(
            s,
            f"{s.flag('add_position_embedding')} contradicts {say(s, 'position_embedding_type')}; say what is meant "
            "with --position-embedding-type rope or none.",
            "add_position_embedding",
            "position_embedding_type",
        )


def qk_clip_numbers(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.qk_clip:
        return
    if s.qk_clip_alpha in (0, 1):  # beyond them: numbers.py
        yield broken(
            s,
            f"{say(s, 'qk_clip_alpha')} must be above 0 and below 1 with {s.flag('qk_clip')}.",
            "qk_clip_alpha",
            "qk_clip",
        )


def logits_are_seen_and_follow_weights(s: Settings, _f: Facts) -> Iterator[Violation]:
    """Ours: what notes the largest logits is an ordinary module, and what is normalised behind a weight does not shrink with it."""
    for dest in ("qk_clip", "log_max_attention_logit"):
        if getattr(s, dest) and s.cuda_graph_impl != "none":
            yield broken(
                s, f"{s.flag(dest)} cannot be combined with {say(s, 'cuda_graph_impl')}: a captured attention notes nothing.", dest,
                "cuda_graph_impl")
    if not s.qk_clip:
        return
    for norm in ("qk_layernorm", "qk_l2_norm"):
        if getattr(s, norm) and not s.multi_latent_attention:
            yield broken(
                s, f"{s.flag('qk_clip')} cannot be combined with {s.flag(norm)}: queries and keys have the length that the norm gives them, "
                "whatever the weights are.", "qk_clip", norm)
    for shards in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if getattr(s, shards):
            yield broken(s, f"{s.flag('qk_clip')} cannot be combined with {s.flag(shards)}: rows of cut parameters are not rescaled.", "qk_clip",
                         shards)


def delta_net_fits(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.experimental_attention_variant not in DELTA_NETS:
        return
    keys, values = "linear_num_key_heads", "linear_num_value_heads"
    if s.linear_attention_freq is None:
        yield broken(
            s,
            f"{say(s, 'experimental_attention_variant')} needs --linear-attention-freq: which layers have linear "
            "attention.",
            "experimental_attention_variant",
            "linear_attention_freq",
        )
    for dest in (keys, values):
        if not positive(getattr(s, dest)):
            yield broken(s, f"{say(s, dest)} must be at least 1.", dest)
        elif not divides(f.tp * f.cp, getattr(s, dest)):
            yield broken(
                s,
                f"{say(s, dest)} must be a multiple of {f.tp * f.cp} ({say(s, 'tensor_model_parallel_size')} * "
                f"{say(s, 'context_parallel_size')}).",
                dest,
                "tensor_model_parallel_size",
                "context_parallel_size",
            )
    if not s.swiglu and s.experimental_attention_variant == "gdn":
        yield broken(
            s,
            f"{say(s, 'experimental_attention_variant')} needs --swiglu: its convolution and its output gate use the activation of the "
            "feed-forward layers, and only SiLU is built.",
            "experimental_attention_variant",
            "swiglu",
        )
    if not divides(getattr(s, keys), getattr(s, values)):
        yield broken(s, f"{say(s, values)} must be a multiple of {say(s, keys)}.", values, keys)


def layer_lists_fit(s: Settings, f: Facts) -> Iterator[Violation]:
    for dest in ("linear_attention_freq", "no_rope_freq", "window_attn_skip_freq"):
        value = getattr(s, dest)
        if isinstance(value, list | tuple) and f.layers is not None and len(value) != f.layers:
            yield broken(
                s,
                f"{s.flag(dest)} describes {len(value)} layers, but {say(s, 'num_layers')}; give one entry for each "
                "layer.",
                dest,
                "num_layers",
            )
        elif isinstance(value, int) and value < 1:
            yield broken(s, f"{say(s, dest)} must be at least 1.", dest)


RESOLVE = (rotary_switch, rope_type, old_delta_net_name)
CHECKS = (
    latent_attention_has_no_groups,
    latent_attention_has_no_gate,
    rope_type_fits,
    latent_options_need_latent_attention,
    prediction_heads_fit,
    no_position_embedding_is_meant,
    qk_clip_numbers,
    logits_are_seen_and_follow_weights,
    delta_net_fits,
    layer_lists_fit,
)
