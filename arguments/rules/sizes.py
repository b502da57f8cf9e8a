"""Sizes of the model, activations and initialization."""

from collections.abc import Iterator

from arguments.container import OPTIONS
from arguments.layer_pattern import MLP, MOE, all_letters
from arguments.mechanisms.selections import expert_split
from arguments.mechanisms.sublayers import always_rotates
from arguments.rules.derived_sizes import DerivedSizes, divides, positive, quotient
from arguments.settings import Settings, Violation

SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
REQUIRED = (*SHAPE, "seq_length", "micro_batch_size")


# Derived values.


def resolve_no_experts(s: Settings, _f: DerivedSizes) -> None:
    if s.num_experts == 0:
        s.set_derived("num_experts", None, "0 means a dense model")


def resolve_ffn_hidden_size(s: Settings, _f: DerivedSizes) -> None:
    if s.ffn_hidden_size is not None or not positive(s.hidden_size):
        return
    if s.swiglu:
        s.set_derived(
            "ffn_hidden_size", s.hidden_size * 8 // 3 // 64 * 64, "8/3 * hidden size, down to a multiple of 64"
        )
    else:
        s.set_derived("ffn_hidden_size", 4 * s.hidden_size, "4 * hidden size")


def resolve_moe_ffn_hidden_size(s: Settings, f: DerivedSizes) -> None:
    if not f.experts or s.moe_ffn_hidden_size is not None or s.ffn_hidden_size is None:
        return
    split = expert_split(s)
    if split is not None:
        s.set_derived(
            "moe_ffn_hidden_size",
            quotient(s.ffn_hidden_size, getattr(s, split.width_shares)),
            f"--ffn-hidden-size / {OPTIONS[split.width_shares].spellings[0]}",
        )
    elif s.moe_use_upcycling and divides(s.moe_upcycling_granularity, s.ffn_hidden_size):
        s.set_derived(
            "moe_ffn_hidden_size",
            quotient(s.ffn_hidden_size, s.moe_upcycling_granularity),
            "--ffn-hidden-size / --moe-upcycling-granularity",
        )
    else:
        s.note(f"--moe-ffn-hidden-size is not given: each expert is as wide as a dense layer ({s.ffn_hidden_size}).")
        s.set_derived("moe_ffn_hidden_size", s.ffn_hidden_size, "as --ffn-hidden-size")


def resolve_kv_channels(s: Settings, _f: DerivedSizes) -> None:
    size = quotient(s.hidden_size, s.num_attention_heads)
    if s.kv_channels is None and size is not None:
        s.set_derived("kv_channels", size, "hidden size / attention heads")


def resolve_biases(s: Settings, _f: DerivedSizes) -> None:
    if s.add_bias_linear:
        s.set_derived("add_qkv_bias", True, "linear layers have biases")
    else:
        s.set_derived("bias_gelu_fusion", False, "no biases to fuse")


def resolve_embedding_std(s: Settings, _f: DerivedSizes) -> None:
    if s.embedding_init_method_std is None:
        s.set_derived("embedding_init_method_std", s.init_method_std, "as --init-method-std")


def resolve_softmax_in_fp32(s: Settings, _f: DerivedSizes) -> None:
    if s.apply_query_key_layer_scaling:
        s.set_derived("attention_softmax_in_fp32", True, "query-key layer scaling")


def note_unused_ffn_hidden_size(s: Settings, f: DerivedSizes) -> None:
    dense, expert = "ffn_hidden_size", "moe_ffn_hidden_size"
    reads = _has_dense(s, f) or s.moe_use_upcycling or expert_split(s) is not None
    if reads or dense not in s.typed:
        return
    if s.hybrid_layer_pattern and MOE not in all_letters(s.hybrid_layer_pattern):
        s.note_no_effect(s.shown(dense), f"no layer is a feed-forward ({MLP} or {MOE})")
    elif s.given(expert):
        if s.hybrid_layer_pattern:
            reason = f"no layer is a dense feed-forward ({MLP}), and experts have {s.shown(expert)}"
        else:
            reason = f"all layers have experts, of {s.shown(expert)}"
        s.note_no_effect(s.shown(dense), reason)


def _has_dense(s: Settings, f: DerivedSizes) -> bool:
    """Return whether a layer has a dense feed-forward."""
    if s.hybrid_layer_pattern:
        return MLP in all_letters(s.hybrid_layer_pattern)
    return f.moe_layers is None or not all(f.moe_layers)


# Checks.


def check_required_given(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    from_checkpoint = s.use_checkpoint_args and (
        s.load is not None or s.pretrained_checkpoint is not None or (s.auto_resume and s.save is not None)
    )
    for dest in REQUIRED:
        if getattr(s, dest) is None and not (from_checkpoint and dest in SHAPE):
            yield s.violation("{:flag} is missing; there is no default for it.", dest)


def check_max_positions(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if positive(s.seq_length) and positive(s.max_position_embeddings) and s.seq_length > s.max_position_embeddings:
        yield s.violation(
            "{seq_length} is longer than {max_position_embeddings}: a sequence would have tokens without a position."
        )


def check_head_size(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.kv_channels is None and not divides(s.num_attention_heads, s.hidden_size):
        yield s.violation(
            "{hidden_size} must be a multiple of {num_attention_heads}, or give {kv_channels:flag}: the size of one "
            "head."
        )


def check_rotary_channels(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Rotary positions rotate channels two by two; an odd number is rounded up."""
    if s.position_embedding_type not in ("rope", "yarn") and not always_rotates(s):
        return
    if s.multi_latent_attention:
        if positive(s.qk_pos_emb_head_dim) and s.qk_pos_emb_head_dim % 2:
            yield s.violation("{qk_pos_emb_head_dim} must be even: positions rotate channels in pairs.")
        return
    for dest in ("rotary_percent", "window_rotary_percent"):
        share = getattr(s, dest)
        if not positive(s.kv_channels) or share is None or not 0 < share <= 1:
            continue
        rotated = int(s.kv_channels * share)
        if rotated == 0:
            yield s.violation(
                "{} of {kv_channels} leaves no channel to rotate; give --position-embedding-type none for attention "
                "without positions.",
                dest,
            )
        elif rotated + rotated % 2 > s.kv_channels:
            yield s.violation("{kv_channels} must be even: positions rotate channels in pairs.", "num_attention_heads")


def check_window_query_groups(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """Check the key-value heads of layers with a window as those of the others."""
    groups = s.window_num_query_groups
    if not positive(groups):
        return
    if not s.group_query_attention:
        yield s.violation("{window_num_query_groups} needs {group_query_attention:flag}.")
    elif not divides(groups, s.num_attention_heads):
        yield s.violation("{num_attention_heads} must be a multiple of {window_num_query_groups}.")
    elif groups % f.tp and f.tp % groups:
        yield s.violation(
            "{window_num_query_groups} must be a multiple or a divisor of {tensor_model_parallel_size}: groups are "
            "sharded over tensor ranks, or several ranks share one."
        )


def check_query_groups(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.group_query_attention or s.multi_latent_attention:
        return
    if not positive(s.num_query_groups):
        yield s.violation("{num_query_groups} must be at least 1.")
    elif not divides(s.num_query_groups, s.num_attention_heads):
        yield s.violation(
            "{num_attention_heads} must be a multiple of {num_query_groups}: each group of heads shares one key and "
            "value."
        )


def check_expert_width_needs_experts(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_ffn_hidden_size is not None and s.num_experts is None:
        yield s.violation("{moe_ffn_hidden_size} needs {num_experts:flag}; for a dense model use --ffn-hidden-size.")


def check_widths_per_rank(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    for dest, parts, size in (
        ("ffn_hidden_size" if _has_dense(s, f) else None, "tensor_model_parallel_size", f.tp),
        ("moe_ffn_hidden_size" if f.experts else None, "expert_tensor_parallel_size", f.etp),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", f.tp),
        ("padded_vocab_size", "tensor_model_parallel_size", f.tp),
    ):
        if dest is not None and not divides(size, getattr(s, dest)):
            yield s.violation("{} must be a multiple of {}.", dest, parts)


def check_padded_vocab_size(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    counts = s.tokenizer_type is None or s.tokenizer_type.startswith(
        "Null"
    )  # a tokenizer of text knows its vocabulary itself
    if counts and positive(s.vocab_size) and positive(s.padded_vocab_size) and s.padded_vocab_size < s.vocab_size:
        yield s.violation("{padded_vocab_size} is smaller than {vocab_size}.")


def check_one_activation(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    chosen = [dest for dest in ("swiglu", "squared_relu", "quick_geglu") if getattr(s, dest)]
    if len(chosen) > 1:
        yield s.violation(
            "Use only one of {flags}: each is an activation.", *chosen, flags=" and ".join(s.flag(d) for d in chosen)
        )
