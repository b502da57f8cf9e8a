"""Rules 92-98: recomputing activations, and moving activations or optimizer state to host memory.

Three families: what full and selective recompute need and exclude, with modules that a model has; what of activations can go to the host,
and that nothing is both recomputed and sent; what the optimizer needs for its state to be there. Numbers: those of Megatron-LM's demands
(commit d98e8a64, validate_args and TransformerConfig). Modules that no layer has are a note here, not an error.
"""

from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, broken, positive, say
from arguments.settings import Settings, Violation

GRANULARITY, METHOD, LAYERS, MODULES = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
RECOMPUTABLE = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out", "gdp_in_proj",
    "gdp_qkv", "mhc",
)  # fmt: skip
OFFLOADABLE = (
    "core_attn", "attn_proj", "expert_fc1", "fused_group_mlp", "moe_act", "attn_norm", "mlp_norm", "qkv_linear",
    "gdp_qkv",
)  # fmt: skip


# Derived and normalised values.


def recompute_activations_flag(s: Settings, _f: Facts) -> None:
    if s.recompute_activations:
        s.set_derived(GRANULARITY, "selective", "from --recompute-activations")


def moe_layer_recompute_flag(s: Settings, _f: Facts) -> None:
    if not s.moe_layer_recompute or s.recompute_granularity == "full":
        return
    s.set_derived(GRANULARITY, "selective", "from --moe-layer-recompute")
    modules = as_list(s.recompute_modules) or ["core_attn"]
    if "moe" not in modules:
        s.set_derived(MODULES, [*modules, "moe"], "from --moe-layer-recompute")


def selective_modules(s: Settings, _f: Facts) -> None:
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


def what_happens_anyway(s: Settings, f: Facts) -> None:
    """Parts whose activations are never kept, with or without a flag; parts of which nothing is left to send."""
    if s.recompute_granularity == "selective" and "moe_act" in as_list(s.recompute_modules) and f.experts is not None:
        s.note(f"{s.flag(MODULES)} moe_act: this program's own experts never keep the output of their activation, with or without it; "
               "TransformerEngine's do.")
    if s.recompute_granularity == "full" and s.fine_grained_activation_offloading:
        s.note(f"{s.flag('offload_modules')}: a recomputed layer keeps its input only, and nothing of its parts goes to the host.")


def parts_that_are_not_there(s: Settings, f: Facts) -> None:
    """Parts that no layer of this model has."""
    has_experts = f.experts is not None and (f.moe_layers is None or any(f.moe_layers))
    has_dense = f.experts is None or f.moe_layers is None or not all(f.moe_layers)
    lacking = {}
    if not has_experts:
        lacking = dict.fromkeys(("moe", "moe_act", "shared_experts", "expert_fc1", "fused_group_mlp"), "experts")
    elif s.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "shared experts"
    if not has_dense:
        lacking["mlp"] = "dense feed-forward"
    for dest, acts in ((MODULES, s.recompute_granularity == "selective"), ("offload_modules", s.fine_grained_activation_offloading)):
        for module in as_list(getattr(s, dest)) if acts else ():
            if module in lacking:
                s.note(f"{s.flag(dest)} {module}: no layer of this model has {lacking[module]}, so there is nothing to "
                       f"{'recompute' if dest == MODULES else 'send to the host'}.")


# Checks.


def full_recompute_is_complete(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.recompute_granularity != "full":
        return
    if s.recompute_method is None:
        yield broken(
            s,
            f"{say(s, GRANULARITY)} needs --recompute-method uniform or block: which layers are recomputed.",
            GRANULARITY,
            METHOD,
        )
    if s.recompute_num_layers is None:
        yield broken(
            s,
            f"{say(s, GRANULARITY)} needs --recompute-num-layers: layers per recomputed unit (uniform) or recomputed "
            "layers (block).",
            GRANULARITY,
            LAYERS,
        )
    elif not positive(s.recompute_num_layers):
        yield broken(s, f"{say(s, LAYERS)} must be at least 1.", LAYERS)


def selective_recompute_takes_modules(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    for dest in (METHOD, LAYERS):
        if getattr(s, dest) is not None:
            yield broken(
                s,
                f"{say(s, dest)} belongs to full recompute; selective recompute takes --recompute-modules.",
                dest,
                GRANULARITY,
            )


def modules_are_known(s: Settings, _f: Facts) -> Iterator[Violation]:
    """Also where nothing is recomputed or sent to the host: a name that is wrong now is wrong on the day the list counts."""
    for dest, known in ((MODULES, RECOMPUTABLE), ("offload_modules", OFFLOADABLE)):
        unknown = [module for module in as_list(getattr(s, dest)) if module not in known]
        if unknown:
            yield broken(s, f"{s.flag(dest)} {' '.join(unknown)}: needs some of {', '.join(known)}.", dest)


def recompute_modules_fit(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    modules = as_list(s.recompute_modules)
    if "moe_act" in modules and not s.moe_grouped_gemm:
        yield broken(s, f"{s.flag(MODULES)} moe_act needs --moe-grouped-gemm.", MODULES, "moe_grouped_gemm")
    if "gdn_norm_out" in modules and s.experimental_attention_variant != "gdn":
        yield broken(
            s, f"{s.flag(MODULES)} gdn_norm_out needs --experimental-attention-variant gated_delta_net.", MODULES,
            "experimental_attention_variant"
        )
    if "mla_up_proj" in modules and not s.multi_latent_attention:
        yield broken(
            s, f"{s.flag(MODULES)} mla_up_proj needs --multi-latent-attention.", MODULES, "multi_latent_attention"
        )
    if "shared_experts" in modules and s.moe_shared_expert_overlap:
        yield broken(
            s,
            f"{s.flag(MODULES)} shared_experts cannot be combined with {s.flag('moe_shared_expert_overlap')}.",
            MODULES,
            "moe_shared_expert_overlap",
        )
    scaled = [module for module in ("moe_act", "layernorm") if module in modules]
    if scaled and s.fp8 and s.fp8_recipe == "delayed":
        yield broken(
            s,
            f"{s.flag(MODULES)} {' '.join(scaled)} cannot be combined with {say(s, 'fp8_recipe')}: delayed scaling "
            "would see the values twice; use another --fp8-recipe.",
            MODULES,
            "fp8_recipe",
            "fp8",
        )


def moe_layer_recompute_is_selective(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_layer_recompute and s.recompute_granularity == "full":
        yield broken(
            s,
            f"{s.flag('moe_layer_recompute')} adds nothing to {say(s, GRANULARITY)}, which already recomputes whole "
            "layers; drop one.",
            "moe_layer_recompute",
            GRANULARITY,
        )


def distributed_activations_fit(s: Settings, f: Facts) -> Iterator[Violation]:
    dest = "distribute_saved_activations"
    if not s.distribute_saved_activations:
        return
    if f.tp == 1:
        yield broken(
            s, f"{s.flag(dest)} needs --tensor-model-parallel-size above 1.", dest, "tensor_model_parallel_size"
        )
    if s.recompute_granularity != "full":
        yield broken(s, f"{s.flag(dest)} needs --recompute-granularity full.", dest, GRANULARITY)
    if s.sequence_parallel:
        yield broken(
            s,
            f"{s.flag(dest)} cannot be combined with {s.flag('sequence_parallel')}, which already splits them.",
            dest,
            "sequence_parallel",
        )


def activation_offloading_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest, modules = "fine_grained_activation_offloading", as_list(s.offload_modules)
    if not s.fine_grained_activation_offloading:
        return
    if not modules:
        yield broken(
            s, f"{s.flag(dest)} needs --offload-modules: some of {', '.join(OFFLOADABLE)}.", dest, "offload_modules"
        )
    if s.transformer_impl != "transformer_engine":
        yield broken(
            s,
            f"{s.flag(dest)} needs --transformer-impl transformer_engine, not {s.transformer_impl}.",
            dest,
            "transformer_impl",
        )
    if "attn_proj" in modules and "core_attn" not in modules:
        yield broken(
            s,
            f"{s.flag('offload_modules')} attn_proj needs core_attn too: its input is what core_attn keeps.",
            "offload_modules",
        )
    inside = [module for module in ("expert_fc1", "moe_act") if module in modules]
    if inside and s.recompute_granularity == "selective" and "moe" in as_list(s.recompute_modules):
        yield broken(
            s,
            f"{s.flag('offload_modules')} {' '.join(inside)} cannot be combined with {s.flag(MODULES)} moe, which "
            "contains them.",
            "offload_modules",
            MODULES,
        )


def layer_offloading_fits(s: Settings, f: Facts) -> Iterator[Violation]:
    dest, layers = "cpu_offloading_num_layers", s.cpu_offloading_num_layers
    if not layers:
        return
    if layers < 0 or (positive(s.num_layers) and layers >= s.num_layers):
        yield broken(s, f"{say(s, dest)} must be from 0 to below {say(s, 'num_layers')}.", dest, "num_layers")
    if f.pp > 1:
        yield broken(
            s,
            f"{say(s, dest)} cannot be combined with {say(s, 'pipeline_model_parallel_size')}; "
            "--fine-grained-activation-offloading can.",
            dest,
            "pipeline_model_parallel_size",
        )
    for other in (GRANULARITY, "fine_grained_activation_offloading"):
        if getattr(s, other):
            yield broken(s, f"{say(s, dest)} cannot be combined with {s.shown(other)}.", dest, other)


def optimizer_offloading_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest = "optimizer_cpu_offload"
    if not s.optimizer_cpu_offload:
        return
    if not s.use_precision_aware_optimizer:
        yield broken(s, f"{s.flag(dest)} needs --use-precision-aware-optimizer.", dest, "use_precision_aware_optimizer")
    if s.fp8_param_gather and s.fp8_recipe != "delayed":
        yield broken(
            s,
            f"{s.flag(dest)} with {s.flag('fp8_param_gather')} needs --fp8-recipe delayed, not {s.fp8_recipe}.",
            dest,
            "fp8_param_gather",
            "fp8_recipe",
        )


RESOLVE = (recompute_activations_flag, moe_layer_recompute_flag, selective_modules, what_happens_anyway, parts_that_are_not_there)
CHECKS = (
    full_recompute_is_complete,
    selective_recompute_takes_modules,
    modules_are_known,
    recompute_modules_fit,
    moe_layer_recompute_is_selective,
    distributed_activations_fit,
    activation_offloading_fits,
    layer_offloading_fits,
    optimizer_offloading_fits,
)
