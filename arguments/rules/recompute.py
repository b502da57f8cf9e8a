"""Recompute of activations, and offload of activations or optimizer state.

Requirements of full and selective recompute; offload of activations, which must not also be recomputed; requirements of
optimizer offload. Modules that no layer has are a note here, not an error.
"""

from collections.abc import Iterator

from arguments.layer_pattern import MLP, MOE, all_letters, mixing_sublayers, variants_of
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import FLAGS, of_width, quantized_format, selected
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import check_support
from arguments.mechanisms.layer_modules import Part, named, names_of, unaccompanied, unknown_names
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES, OffloadCapability
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS, get_optimizer
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability
from arguments.mechanisms.schedules import SCHEDULES, asked_schedule
from arguments.mechanisms.sublayers import VARIANT
from arguments.mechanisms.support import keys_rejecting, keys_with, rejected_flags, rejecting
from arguments.needs import name_of
from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Limit, Settings, Violation

GRANULARITY, METHOD, LAYERS, MODULES = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
OFFLOADED = "offload_modules"


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
    if s.recompute_granularity == "selective" and s.recompute_modules is None:
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


def absent_parts(s: Settings, sizes: DerivedSizes) -> dict[Part, str]:
    """Return the parts that no layer has, with the words for what the layers would have."""
    pattern, mixers = s.hybrid_layer_pattern, mixing_sublayers(s)
    if pattern:
        letters = all_letters(pattern)
        has_experts, has_dense = MOE in letters, MLP in letters
    else:
        has_experts = sizes.experts is not None and (sizes.moe_layers is None or any(sizes.moe_layers))
        has_dense = sizes.experts is None or sizes.moe_layers is None or not all(sizes.moe_layers)
    absent: dict[Part, str] = {}
    if not has_experts:
        absent |= {"experts": "experts", "shared experts": "experts"}
    elif s.moe_shared_expert_intermediate_size is None:
        absent["shared experts"] = "shared experts"
    if not has_dense:
        absent["dense feed-forward"] = "dense feed-forward"
    if not has_experts and not has_dense:
        absent["feed-forward"] = "feed-forward"
    if not mixers:
        absent["token mixer"] = "attention"
    if not any(each.is_attention for each in mixers):
        absent["attention"] = "attention"
    return absent


def note_absent_modules(s: Settings, f: DerivedSizes) -> None:
    """Note modules that no layer of this model has."""
    absent = absent_parts(s, f)
    for known, acts, verb in (
        (RECOMPUTED_MODULES, s.recompute_granularity == "selective", "recompute"),
        (OFFLOADED_MODULES, s.fine_grained_activation_offloading, "offload"),
    ):
        for module in known if acts else ():
            if module.part in absent and module.key in as_list(getattr(s, module.dest)):
                s.note(
                    f"{s.flag(module.dest)} {module.key}: no layer of this model has {absent[module.part]}, so there "
                    f"is nothing to {verb}."
                )


# Checks.


def check_full_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "full":
        return
    if s.recompute_method is None:
        yield s.violation(
            "{recompute_granularity} needs {recompute_method:flag} uniform or block: which layers are recomputed."
        )
    if s.recompute_num_layers is None:
        yield s.violation(
            "{recompute_granularity} needs {recompute_num_layers:flag}: layers per recomputed unit (uniform) or "
            "recomputed layers (block)."
        )
    elif not positive(s.recompute_num_layers):
        yield s.violation("{recompute_num_layers} must be at least 1.")


def check_selective_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    for dest in (METHOD, LAYERS):
        if getattr(s, dest) is not None:
            yield s.violation(
                "{} belongs to full recompute; selective recompute takes --recompute-modules.", dest, GRANULARITY
            )


def check_known_modules(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check names also if nothing is recomputed or offloaded: a wrong name would matter later."""
    for dest, modules in ((MODULES, RECOMPUTED_MODULES), (OFFLOADED, OFFLOADED_MODULES)):
        yield from unknown_names(s, dest, as_list(getattr(s, dest)), modules)


def check_recompute_modules(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.recompute_granularity != "selective":
        return
    modules = named(RECOMPUTED_MODULES, as_list(s.recompute_modules))
    for module in modules:
        if module.needs_flag and not getattr(s, module.needs_flag):
            needed = name_of(s, module.needs_flag, [""])
            yield s.violation(f"{module.mention} needs {needed}.", module.needs_flag)
        if module.of_sublayers and variants_of(s).isdisjoint(module.of_sublayers):
            needed = name_of(s, VARIANT, [str(each.variant) for each in module.of_sublayers])
            yield s.violation(f"{module.mention} needs {needed}.", VARIANT)
        if s.moe_shared_expert_overlap and module.rejects(RecomputeCapability.SHARED_EXPERT_OVERLAP):
            yield s.violation(f"{module.mention} cannot be combined with {{moe_shared_expert_overlap}}.")
    scaled = keys_rejecting(modules, RecomputeCapability.NARROW_INPUTS)
    fmt = quantized_format(s)
    if scaled and fmt is not None and fmt.rejects(FormatCapability.RECOMPUTED_INPUTS):
        yield s.violation(
            f"{{recompute_modules:flag}} {{modules}} cannot be combined with {{{fmt.flags.recipe}}}: "
            f"{fmt.reason(FormatCapability.RECOMPUTED_INPUTS)}; use another {{recipe}}.",
            fmt.flags.name,
            modules=" ".join(scaled),
            recipe=f"--{fmt.flags.recipe.replace('_', '-')}",
        )


def limit_mlp_chunks(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """List what acts on all tokens of a feed-forward layer at once."""
    is_chunked = positive(s.mlp_chunks_for_training) and s.mlp_chunks_for_training > 1
    deferred, experts = "deferred weight gradients hold the tensors of all chunks", f.experts is not None
    for dest, is_on, reason in (
        ("delay_wgrad_compute", s.delay_wgrad_compute, deferred),
        ("tp_comm_overlap", s.tp_comm_overlap, "its buffers have the size of a full microbatch"),
        (
            "moe_pad_expert_input_to_capacity",
            experts and s.moe_pad_expert_input_to_capacity,
            "the capacity of an expert is that of all tokens",
        ),
        (
            "moe_expert_rank_capacity_factor",
            experts and s.moe_expert_rank_capacity_factor,
            "the receive buffer is that of all tokens",
        ),
        *(
            (dest, experts and s.values[dest], reason)
            for dest, reason in rejected_flags(PLACEMENTS, PlacementCapability.MLP_CHUNKS)
        ),
        (
            "moe_shared_expert_overlap",
            experts and s.moe_shared_expert_overlap,
            "shared experts run in separate chunks",
        ),
        ("overlap_moe_expert_parallel_comm", s.overlap_moe_expert_parallel_comm, "it overlaps one exchange of a layer"),
        (
            "overlap_dispatch_backward_with_experts_wgrad",
            s.overlap_dispatch_backward_with_experts_wgrad,
            "it overlaps one exchange of a layer",
        ),
    ):
        yield Limit(
            is_chunked and is_on,
            f"{{mlp_chunks_for_training}} cannot be combined with {{:shown}}: {reason}.",
            (dest,),
        )
    for schedule, rejected in rejecting(SCHEDULES, ScheduleCapability.MLP_CHUNKS):
        yield Limit(
            is_chunked and schedule is asked_schedule(s),
            f"{{mlp_chunks_for_training}} cannot be combined with {schedule.mention}: {rejected.reason}.",
        )
    *others, last = keys_rejecting(OFFLOADED_MODULES, OffloadCapability.MLP_CHUNKS)
    yield Limit(
        is_chunked and s.fine_grained_activation_offloading and {*others, last} & set(as_list(s.offload_modules)),
        f"{{mlp_chunks_for_training}} cannot be combined with {{offload_modules:flag}} {', '.join(others)} or {last}: "
        "the tensors of a chunk are recomputed ({recompute_modules:flag} moe), not offloaded.",
    )


def note_mlp_chunks(s: Settings, f: DerivedSizes) -> None:
    """Note what chunks change, or that they save nothing."""
    if not positive(s.mlp_chunks_for_training) or s.mlp_chunks_for_training == 1:
        return
    flag, modules = s.shown("mlp_chunks_for_training"), as_list(s.recompute_modules)
    chunked = s.recompute_granularity == "selective" and any(
        module.runs_in_chunks for module in named(RECOMPUTED_MODULES, modules)
    )
    if s.recompute_granularity != "full" and not chunked:
        s.note(
            f"{flag}: the tensors of all chunks are saved for backward; {s.flag(MODULES)} mlp moe recomputes them "
            "chunk by chunk."
        )
    if f.experts is not None:
        s.note(
            f"{flag}: tokens are routed together, so losses and statistics of the routers are those of the full "
            "sequence (Megatron-LM routes every chunk alone)."
        )
    if (fmt := quantized_format(s)) is not None and fmt.scales_whole_tensor:
        s.note(f"{flag}: scales of a full tensor ({fmt.name}) are those of a chunk.")


def check_moe_layer_recompute(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_layer_recompute and s.recompute_granularity == "full":
        yield s.violation(
            "{moe_layer_recompute} adds nothing to {recompute_granularity}, which already recomputes full layers; drop "
            "one."
        )


def check_distributed_activations(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.distribute_saved_activations:
        return
    if f.tp == 1:
        yield s.violation("{distribute_saved_activations} needs {tensor_model_parallel_size:flag} above 1.")
    if s.recompute_granularity != "full":
        yield s.violation("{distribute_saved_activations} needs {recompute_granularity:flag} full.")
    if s.sequence_parallel:
        yield s.violation(
            "{distribute_saved_activations} cannot be combined with {sequence_parallel}, which already splits them."
        )


def check_activation_offload(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    modules = named(OFFLOADED_MODULES, as_list(s.offload_modules))
    if not s.fine_grained_activation_offloading:
        return
    if not as_list(s.offload_modules):
        yield s.violation(
            "{fine_grained_activation_offloading} needs {offload_modules:flag}: some of {known}.",
            known=names_of(OFFLOADED_MODULES),
        )
    yield from check_support(s, "fine_grained_activation_offloading", ImplementationCapability.ACTIVATION_OFFLOAD)
    yield from unaccompanied(s, modules)
    recomputed = as_list(s.recompute_modules) if s.recompute_granularity == "selective" else []
    inside = keys_rejecting(modules, OffloadCapability.EXPERTS_RECOMPUTED)
    if inside and "moe" in recomputed:
        yield s.violation(
            "{offload_modules:flag} {modules} cannot be combined with {recompute_modules:flag} moe, which contains "
            "them.",
            modules=" ".join(inside),
        )


def check_layer_offload(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    layers = s.cpu_offloading_num_layers
    if not layers:
        return
    if layers < 0 or (positive(s.num_layers) and layers >= s.num_layers):
        yield s.violation("{cpu_offloading_num_layers} must be at least 0 and below {num_layers}.")
    if f.pp > 1:
        yield s.violation(
            "{cpu_offloading_num_layers} cannot be combined with {pipeline_model_parallel_size}; "
            "--fine-grained-activation-offloading can."
        )
    for other in (GRANULARITY, "fine_grained_activation_offloading"):
        if getattr(s, other):
            yield s.violation("{cpu_offloading_num_layers} cannot be combined with {:shown}.", other)


def check_optimizer_offload(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Reject what Megatron-LM does; the host's share of weights is quantized alike, so other formats need no rule."""
    if not s.optimizer_cpu_offload:
        return
    optimizer = get_optimizer(s)
    if not s.use_precision_aware_optimizer and optimizer.rejects(OptimizerCapability.HOST_UPDATE):
        if optimizer.rejects(OptimizerCapability.STATE_FORMATS):  # then that flag would be rejected too
            on_host = (OptimizerCapability.HOST_UPDATE, OptimizerCapability.STATE_FORMATS)
            others = [each.key for each in OPTIMIZERS if any(each.supports(capability) for capability in on_host)]
            yield s.violation(
                "{optimizer_cpu_offload} needs {optimizer:flag} {accepted}, not {optimizer:value}.",
                accepted=" or ".join(others),
            )
        else:
            yield s.violation("{optimizer_cpu_offload} needs {use_precision_aware_optimizer:flag}.")
    for flags in FLAGS:
        is_rejected = selected(s, flags).rejects(FormatCapability.HOST_OPTIMIZER)
        accepted = " or ".join(keys_with(of_width(flags), FormatCapability.HOST_OPTIMIZER))
        if getattr(s, flags.param_gather) and is_rejected and optimizer.rejects(OptimizerCapability.HOST_UPDATE_8_BITS):
            yield s.violation(
                f"{{optimizer_cpu_offload}} with {{{flags.param_gather}}} needs {{{flags.recipe}:flag}} "
                f"{accepted}, not {{{flags.recipe}:value}}."
            )
