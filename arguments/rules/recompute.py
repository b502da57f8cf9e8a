"""Rules 92-98: recompute of activations, and offload of activations or optimizer state.

Requirements of full and selective recompute; offload of activations, which must not also be recomputed; requirements of
optimizer offload. Modules that no layer has are a note here, not an error. Rule numbers follow Megatron-LM's checks
(commit d98e8a64, validate_args and TransformerConfig).
"""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Settings, Violation

GRANULARITY, METHOD, LAYERS, MODULES = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
RECOMPUTABLE = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
)
OFFLOADABLE = (
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
    "gdp_qkv",
)


# Derived values.


def resolve_recompute_activations(s: Settings, _f: DerivedSizes) -> None:
    if s.recompute_activations:
        s.set_derived(GRANULARITY, "selective", "from --recompute-activations")


def resolve_moe_layer_recompute(s: Settings, _f: DerivedSizes) -> None:
    if not s.moe_layer_recompute or s.recompute_granularity == "full":
        return
    s.set_derived(GRANULARITY, "selective", "from --moe-layer-recompute")
    modules = as_list(s.recompute_modules) or ["core_attn"]
    if "moe" not in modules:
        s.set_derived(MODULES, [*modules, "moe"], "from --moe-layer-recompute")


def resolve_selective_modules(s: Settings, _f: DerivedSizes) -> None:
    if s.recompute_granularity != "selective":
        if s.given(MODULES):
            s.note(f"{s.flag(MODULES)} has no effect without --recompute-granularity selective.")
        return
    if s.recompute_modules is None:
        s.set_derived(MODULES, ["core_attn"], "the default of selective recompute")
        s.note(
            f"{s.flag(GRANULARITY)} selective without --recompute-modules recomputes core_attn; fused attention "
            "kernels do that by themselves, so little is gained."
        )


def note_redundant_modules(s: Settings, f: DerivedSizes) -> None:
    """Note modules whose activations are never saved, and modules with nothing left to offload."""
    if s.recompute_granularity == "selective" and "moe_act" in as_list(s.recompute_modules) and f.experts is not None:
        s.note(
            f"{s.flag(MODULES)} moe_act: the local experts never save the output of their activation, with or without "
            "it; TransformerEngine's do."
        )
    if s.recompute_granularity == "full" and s.fine_grained_activation_offloading:
        s.note(
            f"{s.flag('offload_modules')}: a recomputed layer saves only its input, so nothing of its modules is "
            "offloaded."
        )


def note_absent_modules(s: Settings, f: DerivedSizes) -> None:
    """Note modules that no layer of this model has."""
    has_experts = f.experts is not None and (f.moe_layers is None or any(f.moe_layers))
    has_dense = f.experts is None or f.moe_layers is None or not all(f.moe_layers)
    lacking = {}
    if not has_experts:
        lacking = dict.fromkeys(("moe", "moe_act", "shared_experts", "expert_fc1", "fused_group_mlp"), "experts")
    elif s.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "shared experts"
    if not has_dense:
        lacking["mlp"] = "dense feed-forward"
    for dest, acts in (
        (MODULES, s.recompute_granularity == "selective"),
        ("offload_modules", s.fine_grained_activation_offloading),
    ):
        for module in as_list(getattr(s, dest)) if acts else ():
            if module in lacking:
                s.note(
                    f"{s.flag(dest)} {module}: no layer of this model has {lacking[module]}, so there is nothing to "
                    f"{'recompute' if dest == MODULES else 'offload'}."
                )


# Checks.


def check_full_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "full":
        return
    if s.recompute_method is None:
        yield s.violation(
            f"{s.describe(GRANULARITY)} needs --recompute-method uniform or block: which layers are recomputed.",
            GRANULARITY,
            METHOD,
        )
    if s.recompute_num_layers is None:
        yield s.violation(
            f"{s.describe(GRANULARITY)} needs --recompute-num-layers: layers per recomputed unit (uniform) or "
            "recomputed layers (block).",
            GRANULARITY,
            LAYERS,
        )
    elif not positive(s.recompute_num_layers):
        yield s.violation(f"{s.describe(LAYERS)} must be at least 1.", LAYERS)


def check_selective_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    for dest in (METHOD, LAYERS):
        if getattr(s, dest) is not None:
            yield s.violation(
                f"{s.describe(dest)} belongs to full recompute; selective recompute takes --recompute-modules.",
                dest,
                GRANULARITY,
            )


def check_known_modules(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check names also if nothing is recomputed or offloaded: a wrong name would matter later."""
    for dest, known in ((MODULES, RECOMPUTABLE), ("offload_modules", OFFLOADABLE)):
        unknown = [module for module in as_list(getattr(s, dest)) if module not in known]
        if unknown:
            yield s.violation(f"{s.flag(dest)} {' '.join(unknown)}: needs some of {', '.join(known)}.", dest)


def check_recompute_modules(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    modules = as_list(s.recompute_modules)
    if "moe_act" in modules and not s.moe_grouped_gemm:
        yield s.violation(f"{s.flag(MODULES)} moe_act needs --moe-grouped-gemm.", MODULES, "moe_grouped_gemm")
    if "gdn_norm_out" in modules and s.experimental_attention_variant != "gdn":
        yield s.violation(
            f"{s.flag(MODULES)} gdn_norm_out needs --experimental-attention-variant gated_delta_net.",
            MODULES,
            "experimental_attention_variant",
        )
    if "mla_up_proj" in modules and not s.multi_latent_attention:
        yield s.violation(
            f"{s.flag(MODULES)} mla_up_proj needs --multi-latent-attention.", MODULES, "multi_latent_attention"
        )
    if "shared_experts" in modules and s.moe_shared_expert_overlap:
        yield s.violation(
            f"{s.flag(MODULES)} shared_experts cannot be combined with {s.flag('moe_shared_expert_overlap')}.",
            MODULES,
            "moe_shared_expert_overlap",
        )
    scaled = [module for module in ("moe_act", "layernorm") if module in modules]
    if scaled and s.fp8 and s.fp8_recipe == "delayed":
        yield s.violation(
            f"{s.flag(MODULES)} {' '.join(scaled)} cannot be combined with {s.describe('fp8_recipe')}: delayed scaling "
            "would see the values twice; use another --fp8-recipe.",
            MODULES,
            "fp8_recipe",
            "fp8",
        )


def check_moe_layer_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_layer_recompute and s.recompute_granularity == "full":
        yield s.violation(
            f"{s.flag('moe_layer_recompute')} adds nothing to {s.describe(GRANULARITY)}, which already recomputes full "
            "layers; drop one.",
            "moe_layer_recompute",
            GRANULARITY,
        )


def check_distributed_activations(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    dest = "distribute_saved_activations"
    if not s.distribute_saved_activations:
        return
    if f.tp == 1:
        yield s.violation(
            f"{s.flag(dest)} needs --tensor-model-parallel-size above 1.", dest, "tensor_model_parallel_size"
        )
    if s.recompute_granularity != "full":
        yield s.violation(f"{s.flag(dest)} needs --recompute-granularity full.", dest, GRANULARITY)
    if s.sequence_parallel:
        yield s.violation(
            f"{s.flag(dest)} cannot be combined with {s.flag('sequence_parallel')}, which already splits them.",
            dest,
            "sequence_parallel",
        )


def check_activation_offload(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest, modules = "fine_grained_activation_offloading", as_list(s.offload_modules)
    if not s.fine_grained_activation_offloading:
        return
    if not modules:
        yield s.violation(
            f"{s.flag(dest)} needs --offload-modules: some of {', '.join(OFFLOADABLE)}.", dest, "offload_modules"
        )
    if s.transformer_impl != "transformer_engine":
        yield s.violation(
            f"{s.flag(dest)} needs --transformer-impl transformer_engine, not {s.transformer_impl}.",
            dest,
            "transformer_impl",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield s.violation(
            f"{s.flag('offload_modules')} attn_proj needs core_attn too: its input is what core_attn saves.",
            "offload_modules",
        )
    inside = [module for module in ("expert_fc1", "moe_act") if module in modules]
    if inside and s.recompute_granularity == "selective" and "moe" in as_list(s.recompute_modules):
        yield s.violation(
            f"{s.flag('offload_modules')} {' '.join(inside)} cannot be combined with {s.flag(MODULES)} moe, which "
            "contains them.",
            "offload_modules",
            MODULES,
        )


def check_layer_offload(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    dest, layers = "cpu_offloading_num_layers", s.cpu_offloading_num_layers
    if not layers:
        return
    if layers < 0 or (positive(s.num_layers) and layers >= s.num_layers):
        yield s.violation(
            f"{s.describe(dest)} must be at least 0 and below {s.describe('num_layers')}.", dest, "num_layers"
        )
    if f.pp > 1:
        yield s.violation(
            f"{s.describe(dest)} cannot be combined with {s.describe('pipeline_model_parallel_size')}; "
            "--fine-grained-activation-offloading can.",
            dest,
            "pipeline_model_parallel_size",
        )
    for other in (GRANULARITY, "fine_grained_activation_offloading"):
        if getattr(s, other):
            yield s.violation(f"{s.describe(dest)} cannot be combined with {s.shown(other)}.", dest, other)


def check_optimizer_offload(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest = "optimizer_cpu_offload"
    if not s.optimizer_cpu_offload:
        return
    if not s.use_precision_aware_optimizer:
        yield s.violation(
            f"{s.flag(dest)} needs --use-precision-aware-optimizer.", dest, "use_precision_aware_optimizer"
        )
    if s.fp8_param_gather and s.fp8_recipe != "delayed":
        yield s.violation(
            f"{s.flag(dest)} with {s.flag('fp8_param_gather')} needs --fp8-recipe delayed, not {s.fp8_recipe}.",
            dest,
            "fp8_param_gather",
            "fp8_recipe",
        )


RESOLVE = (
    resolve_recompute_activations,
    resolve_moe_layer_recompute,
    resolve_selective_modules,
    note_redundant_modules,
    note_absent_modules,
)
CHECKS = (
    check_full_recompute,
    check_selective_recompute,
    check_known_modules,
    check_recompute_modules,
    check_moe_layer_recompute,
    check_distributed_activations,
    check_activation_offload,
    check_layer_offload,
    check_optimizer_offload,
)
