"""Ours: low-rank adapters, what they need and what they are not built for."""

from collections.abc import Iterator

from arguments.layer_pattern import variants_of
from arguments.lora import ALL_LINEAR, LINEARS, is_lora_target
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import SUBLAYERS, VARIANT
from arguments.mechanisms.support import rejected_flags, rejecting
from arguments.rules import frozen_weights
from arguments.rules.derived_sizes import DerivedSizes, as_list
from arguments.settings import Limit, Settings, Violation

DIM = "lora_dim"
NOT_BUILT = (
    *frozen_weights.EXCLUDED,
    ("mla_down_proj_fusion", "an adapter belongs to one projection"),
    ("use_mup", "its learning rates are those of complete weights"),
    ("dsa_indexer_warmup", "it trains the indexers alone"),
    ("dsa_indexer_loss_coeff", "the indexers are frozen"),
    ("moe_use_upcycling", "it converts a checkpoint and trains nothing"),
    ("moe_expert_rank_capacity_factor", "experts with adapters need their token counts on the host"),
    ("use_transformer_engine_op_fuser", "nothing can be added between its fused operations"),
    (
        "stream_weights_to",
        "it writes the weights of a model without adapters; a conversion to Hugging Face merges those of a checkpoint",
    ),
    ("init_from", "its file has all parameters; --load with --finetune takes a model without adapters"),
)


def check_lora_targets(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.lora_dim is None:
        return
    for target in as_list(s.lora_target_modules):
        named = any(is_lora_target(f"decoder.layers.0.{leaf}", [target]) for leaf in LINEARS)
        if "." not in target and not named:
            yield s.violation(
                "{lora_target_modules:flag} {given} is no linear that can have an adapter: {all} or some of {known}.",
                given=target,
                all=ALL_LINEAR,
                known=" ".join(LINEARS),
            )


def limit_lora(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_on = s.lora_dim is not None
    for other, why in (*NOT_BUILT, *rejected_flags(PLACEMENTS, PlacementCapability.ADAPTERS)):
        applies = is_on and s.values[other] != s.default(other)
        yield Limit(applies, f"{{{DIM}:flag}} cannot be combined with {{}}: {why}.", (other,))
    has_dropout = is_on and bool(s.lora_dropout)
    for module, rejected in rejecting(RECOMPUTED_MODULES, RecomputeCapability.ADAPTER_DROPOUT):
        yield Limit(
            has_dropout and module.key in as_list(s.recompute_modules),
            f"{{lora_dropout:flag}} cannot be combined with {module.mention}: {rejected.reason}.",
            ("recompute_modules",),
        )
    yield Limit(
        has_dropout and (s.mlp_chunks_for_training or 1) > 1,
        "{lora_dropout:flag} cannot be combined with {mlp_chunks_for_training}: chunks draw no random numbers.",
        ("mlp_chunks_for_training",),
    )
    for each, rejected in rejecting(SUBLAYERS, SublayerCapability.ADAPTER_DROPOUT):
        yield Limit(
            has_dropout and each in variants_of(s),
            f"{{lora_dropout:flag}} cannot be combined with {each.mention}: {rejected.reason}.",
            (VARIANT,),
        )
