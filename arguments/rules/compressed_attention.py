"""Attention of DeepSeek-V4 (--experimental-attention-variant dsv4_hybrid): needs, and what it is not built for."""

from collections.abc import Iterator

from arguments.layer_pattern import OVERLAPPING_RATIO
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import COMPRESSED_ATTENTION, VARIANT, variant_of
from arguments.mechanisms.support import rejected_flags, rejecting
from arguments.rules.derived_sizes import DerivedSizes, as_list, divides, positive
from arguments.rules.sparse_attention import INDEXER_FLAGS, find_indexer_violations
from arguments.settings import Limit, Settings, Violation

_MENTION = COMPRESSED_ATTENTION.mention
_EXCLUDED = rejected_flags(SHARDINGS, ShardingCapability.COMPRESSED_KEYS)


def check_compressed_attention(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not variant_of(s).compresses_keys:
        return
    for dest in ("multi_latent_attention", "qk_layernorm"):
        if not s.values[dest]:
            yield s.violation(f"{{{VARIANT}}} needs {{:flag}}.", dest)
    if s.normalization != "RMSNorm":
        yield s.violation(f"{{{VARIANT}}} needs {{normalization:flag}} RMSNorm.")
    if s.position_embedding_type != "rope":
        yield s.violation(f"{{{VARIANT}}} needs {{position_embedding_type:flag}} rope.")
    if s.q_lora_rank is None:
        yield s.violation(f"{{{VARIANT}}} needs {{q_lora_rank:flag}}.")
    if positive(s.v_head_dim) and positive(s.qk_pos_emb_head_dim) and s.qk_pos_emb_head_dim > s.v_head_dim:
        yield s.violation(
            "{qk_pos_emb_head_dim} must not exceed {v_head_dim}: that many channels of a head are rotated."
        )
    if positive(s.o_groups) and positive(s.num_attention_heads) and not divides(s.o_groups, s.num_attention_heads):
        yield s.violation("{o_groups} must divide {num_attention_heads}.")
    if positive(s.o_groups) and not divides(f.tp, s.o_groups):
        yield s.violation("{o_groups} must be a multiple of {tensor_model_parallel_size}.")
    yield from _check_ratios(s)


def _check_ratios(s: Settings) -> Iterator[Violation]:
    ratios = s.csa_compress_ratios
    if not isinstance(ratios, list):
        yield s.violation(
            f"{{{VARIANT}}} needs {{csa_compress_ratios:flag}} with a list of one number per layer, "
            "such as ([0]*2+[4,128]*20)."
        )
        return
    if positive(s.num_layers) and len(ratios) < s.num_layers:
        yield s.violation(
            "{csa_compress_ratios:flag} lists {count} layers, and {num_layers} needs one number each.",
            count=len(ratios),
        )
    if any(ratio == 1 for ratio in ratios):
        yield s.violation("{csa_compress_ratios:flag}: 1 would compress nothing; 0 leaves the window only.")
    if OVERLAPPING_RATIO not in ratios or s.csa_dense_mode:
        return
    for dest in INDEXER_FLAGS:
        if s.values[dest] is None:
            yield s.violation(
                "{csa_compress_ratios:flag} with layers of ratio 4 needs {:flag}, or {csa_dense_mode:flag}.", dest
            )
    yield from find_indexer_violations(s)


def limit_compressed_attention(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = variant_of(s).compresses_keys
    for dest, why in _EXCLUDED:
        yield Limit(is_on and s.values[dest], f"{_MENTION} cannot be combined with {{}}: {why}.", (dest,))
    yield Limit(
        is_on and s.add_bias_linear, f"{_MENTION} needs {{add_bias_linear:flag}}: its projections have no biases."
    )
    yield Limit(is_on and s.attention_dropout, f"{_MENTION} needs {{attention_dropout:flag}} 0: its blocks have none.")
    yield Limit(
        is_on and f.largest_cp > 1,
        f"{_MENTION} cannot be combined with {{context_parallel_size:flag}}: "
        f"{COMPRESSED_ATTENTION.reason(SublayerCapability.CONTEXT_PARALLEL)}.",
    )
    recomputed = as_list(s.recompute_modules) if s.recompute_granularity == "selective" else []
    for module, rejected in rejecting(RECOMPUTED_MODULES, RecomputeCapability.COMPRESSED_KEYS):
        yield Limit(
            is_on and module.key in recomputed,
            f"{_MENTION} cannot be combined with {module.mention}: {rejected.reason}.",
        )
