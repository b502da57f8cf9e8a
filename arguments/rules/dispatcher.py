"""Tokens between router and experts, and the structure of the experts.

Capacity and padding, per expert and per rank; dispatchers with the flags of a single dispatcher or backend, old
spellings included; shared experts, biases and projections of the experts.
"""

import math
from collections.abc import Iterator

from arguments.mechanisms.dispatchers import (
    BACKEND,
    BACKENDS,
    DEEPEP,
    FLEX,
    NCCLEP,
    SELECTABLE,
    TYPE,
    DispatcherCapability,
    backends_with,
    get_dispatcher,
    types_with,
)
from arguments.mechanisms.formats import FLAGS, list_widths, quantized_format
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import get_implementation
from arguments.mechanisms.layer_modules import named
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES, OffloadCapability
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import balancing_with
from arguments.mechanisms.support import keys_rejecting, rejecting
from arguments.rules.derived_sizes import DerivedSizes, as_list, balancing_types, positive
from arguments.rules.graph_limits import captured_parts
from arguments.settings import Limit, Settings, Violation
from arguments.stored_weights import stored_weight_format
from arguments.te_support import (
    can_quantize_experts,
    fused_experts_problem,
    has_captured_experts,
    leaves_counts_on_device,
    placement_problem,
    stash_problem,
)

OLD_SMS = ("moe_deepep_num_sms", "moe_hybridep_num_sms")


# Derived values.


def resolve_negative_capacity(s: Settings, _f: DerivedSizes) -> None:
    if s.moe_expert_capacity_factor is not None and -math.inf < s.moe_expert_capacity_factor < 0:
        s.note(f"{s.shown('moe_expert_capacity_factor')}: negative means no capacity limit, no token is dropped.")
        s.set_derived("moe_expert_capacity_factor", None, "negative means no capacity limit")


def resolve_old_deepep_flag(s: Settings, _f: DerivedSizes) -> None:
    if s.moe_enable_deepep and not _contradicts_deepep(s):
        s.set_derived(BACKEND, DEEPEP.key, "from --moe-enable-deepep")


def resolve_old_sm_counts(s: Settings, _f: DerivedSizes) -> None:
    given = [dest for dest in OLD_SMS if getattr(s, dest) is not None]
    values = {getattr(s, dest) for dest in given}
    if len(values) == 1 and all(map(positive, values)) and s.moe_flex_dispatcher_num_sms is None:
        s.set_derived("moe_flex_dispatcher_num_sms", values.pop(), f"from {s.flag(given[0])}")


def resolve_old_router_padding(s: Settings, _f: DerivedSizes) -> None:
    if s.moe_router_padding_for_fp8 and not s.moe_router_padding_for_quantization:
        s.set_derived("moe_router_padding_for_quantization", True, "from --moe-router-padding-for-fp8")


def note_router_dtype(s: Settings, f: DerivedSizes) -> None:
    dispatcher = get_dispatcher(s)
    dtype = dispatcher.probs_dtype
    if f.experts and dtype and s.moe_router_dtype != dtype:
        s.note(f"{dispatcher.name} sends router probabilities in {dtype}: --moe-router-dtype {dtype} avoids the cast.")


def note_library_padding(s: Settings, f: DerivedSizes) -> None:
    dispatcher, dest = get_dispatcher(s), "moe_router_padding_for_quantization"
    if (
        f.experts
        and getattr(s, dest)
        and dispatcher.ignores(DispatcherCapability.QUANTIZED_PADDING)
        and f.ep * f.etp > 1
    ):
        s.note(
            f"{s.flag(dest if s.given(dest) else 'moe_router_padding_for_fp8')}: "
            f"{dispatcher.reason(DispatcherCapability.QUANTIZED_PADDING)}, so experts are not padded with further "
            "tokens; GEMMs that need padding use zeros."
        )


def note_unused_sms(s: Settings, f: DerivedSizes) -> None:
    dispatcher, dest = get_dispatcher(s), "moe_flex_dispatcher_num_sms"
    reason = dispatcher.reason(DispatcherCapability.NUM_SMS)
    if f.experts and dispatcher.backend is not None and reason and getattr(s, dest) is not None:
        s.note_no_effect(s.shown(dest), reason)


def note_domain_size(s: Settings, f: DerivedSizes) -> None:
    size = s.moe_hierarchical_domain_size
    if not (f.experts and get_dispatcher(s).groups_by_domain and f.ep > 1 and positive(size) and f.world):
        return
    if size >= f.world or size % (f.ep * f.etp) == 0:
        s.note(
            f"{s.shown('moe_hierarchical_domain_size')}: all {f.ep * f.etp} expert ranks of a token are in one node, "
            "so the alltoall dispatcher runs."
        )
    elif f.world % size:
        s.note(
            f"{s.shown('moe_hierarchical_domain_size')} does not divide {f.world} ranks: the groups of "
            f"{s.shown('expert_model_parallel_size')} are split into equal parts, each inside one node."
        )


def note_buffers_below_even_routing(s: Settings, f: DerivedSizes) -> None:
    if not f.experts or s.moe_expert_rank_capacity_factor is None:
        return
    text = "even routing does not fit, so iterations are repeated until they have grown"
    if 0 < s.moe_expert_rank_capacity_factor < 1:
        s.note(f"{s.shown('moe_expert_rank_capacity_factor')}: the receive buffers are too small: {text}.")
    cuda, cpu = s.moe_paged_stash_buffer_size_factor_cuda, s.moe_paged_stash_buffer_size_factor_cpu
    if s.moe_paged_stash and cuda > 0 and cpu >= 0 and cuda + cpu < 1:
        s.note(f"{s.shown('moe_paged_stash_buffer_size_factor_cuda')}: with the host's, pages are too few: {text}.")


def note_experts_that_read_counts(s: Settings, f: DerivedSizes) -> None:
    """Name whose experts a factor of received tokens selects."""
    fused, captured = s.use_transformer_engine_op_fuser, captured_parts(s)
    stored = stored_weight_format(s, s)
    replaces_weights = stored is not None and stored.library_cannot_hold
    if not can_quantize_experts(
        s, s, f.ep, replaces_weights=replaces_weights, fused=fused
    ) or not leaves_counts_on_device(s, s, typed=s.typed, captured=captured, fused=fused):
        return
    if has_captured_experts(captured):
        s.note(
            f"{s.shown('cuda_graph_impl')}: experts in {list_widths('and')} are this program's, which read token "
            "counts on the device; TransformerEngine's read them on the host, which a CUDA graph cannot contain."
        )
    else:
        s.note(
            f"{s.shown('moe_expert_rank_capacity_factor')}: experts in {list_widths('and')} are this program's, which "
            "read token counts on the device; with --transformer-impl transformer_engine on the command line they are "
            "TransformerEngine's, which read them on the host."
        )


def note_unused_op_fuser(s: Settings, f: DerivedSizes) -> None:
    """Note why experts are not a pipeline of TransformerEngine's; the other conditions are those of the flag."""
    dest = "use_transformer_engine_op_fuser"
    is_set, implementation = getattr(s, dest), get_implementation(s)
    if not is_set or not implementation.supports(ImplementationCapability.OP_FUSER) or not f.experts:
        return
    host_problem = fused_experts_problem(s, s) if quantized_format(s) else None
    if problem := placement_problem(s, f.ep) or stash_problem(s, True, host_problem):
        reason = f"TransformerEngine cannot compute these experts, because {problem}; this program's grouped GEMMs do"
        s.note_no_effect(s.flag(dest), reason)


def resolve_num_sms(s: Settings, _f: DerivedSizes) -> None:
    dispatcher, dests = get_dispatcher(s), ("moe_flex_dispatcher_num_sms", *OLD_SMS)
    if dispatcher.default_sms is not None and all(getattr(s, dest) is None for dest in dests):
        s.set_derived(dests[0], dispatcher.default_sms, f"{dispatcher.name}'s default")


def _contradicts_deepep(s: Settings) -> bool:
    return s.given(BACKEND) and s.moe_flex_dispatcher_backend != DEEPEP.key


# Checks.


def check_capacity_balancing(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None or s.moe_expert_capacity_factor is None:
        return
    accepted = balancing_with(SelectionCapability.CAPACITY)
    if not all(kind in accepted for kind in balancing_types(s)):
        yield s.violation(
            "{moe_expert_capacity_factor} works with {moe_router_load_balancing_type:flag} {accepted}, not with "
            "{kinds}.",
            accepted=", ".join(accepted),
            kinds=" ".join(balancing_types(s)),
        )


def check_padding_needs_capacity(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_pad_expert_input_to_capacity and s.moe_expert_capacity_factor is None:
        yield s.violation(
            "{moe_pad_expert_input_to_capacity} needs {moe_expert_capacity_factor:flag} (not negative): to which "
            "length expert inputs are padded."
        )


def check_padding_needs_other_backend(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dispatcher = get_dispatcher(s)
    if s.moe_pad_expert_input_to_capacity and dispatcher.rejects(DispatcherCapability.CAPACITY_PADDING):
        backend = "" if dispatcher.backend is None else " and {moe_flex_dispatcher_backend}"
        yield s.violation(
            f"{{moe_pad_expert_input_to_capacity}} cannot be combined with {{moe_token_dispatcher_type}}{backend}; use "
            f"--moe-flex-dispatcher-backend {' or '.join(backends_with(DispatcherCapability.CAPACITY_PADDING))}, or "
            "--moe-token-dispatcher-type alltoall."
        )


def check_old_deepep_flag(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_enable_deepep and s.moe_token_dispatcher_type != FLEX:
        yield s.violation(
            "{moe_enable_deepep} needs {moe_token_dispatcher_type:flag} flex, not {moe_token_dispatcher_type:value}."
        )
    if s.moe_enable_deepep and _contradicts_deepep(s):
        yield s.violation(
            "{moe_enable_deepep} and {moe_flex_dispatcher_backend} contradict each other; keep the latter or use "
            "deepep."
        )


def limit_mxfp8_dispatch(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    selected, width = get_dispatcher(s), s.moe_latent_size or s.hidden_size or 0
    for dest in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        is_on = s.values[dest] != "bf16"
        for each, rejected in rejecting(SELECTABLE, DispatcherCapability.MXFP8_TRANSPORT):
            others = " or ".join(backends_with(DispatcherCapability.MXFP8_TRANSPORT)) + ", or the alltoall dispatcher"
            if each.backend is None:
                others = " or ".join(types_with(DispatcherCapability.MXFP8_TRANSPORT))
            yield Limit(
                is_on and each is selected,
                f"{{:flag}} mxfp8 cannot be combined with {each.mention}, which {rejected.reason}; use {others}.",
                (dest,),
                rejected.kind,
            )
        for each in (each for each in SELECTABLE if each.mxfp8_multiple > 1):
            yield Limit(
                is_on and each is selected and width % each.mxfp8_multiple,
                f"{{:flag}} mxfp8 over {each.mention} needs tokens of a multiple of {each.mxfp8_multiple} channels "
                "({hidden_size}, or {moe_latent_size}).",
                (dest,),
            )


def check_backend_needs_flex(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if BACKENDS[s.moe_flex_dispatcher_backend].needs_flex and s.moe_token_dispatcher_type != FLEX:
        yield s.violation(
            "{moe_flex_dispatcher_backend} needs {moe_token_dispatcher_type:flag} flex, not "
            "{moe_token_dispatcher_type:value}."
        )


def check_ncclep_zero_copy(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Megatron-LM checks it when the model is built."""
    if s.moe_ncclep_zero_copy and get_dispatcher(s) is NCCLEP and s.moe_expert_rank_capacity_factor is None:
        yield s.violation(
            "{moe_ncclep_zero_copy} needs {moe_expert_rank_capacity_factor:flag}: memory that is registered with NCCL "
            "has a fixed size."
        )


def check_old_sm_counts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    deepep, hybridep = (getattr(s, dest) for dest in OLD_SMS)
    if None not in (deepep, hybridep) and deepep != hybridep and s.moe_flex_dispatcher_num_sms is None:
        yield s.violation("{} and {} contradict each other; give one --moe-flex-dispatcher-num-sms.", *OLD_SMS)


def check_shared_expert(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    size = s.moe_shared_expert_intermediate_size
    if size is None:
        return
    if not positive(size):
        yield s.violation(
            "{moe_shared_expert_intermediate_size} must be above 0: the width of all shared experts together."
        )
    if s.moe_shared_expert_overlap:
        yield from needs_other_type(s, "moe_shared_expert_overlap", DispatcherCapability.SHARED_EXPERT_OVERLAP)


def needs_other_type(s: Settings, dest: str, capability: DispatcherCapability) -> Iterator[Violation]:
    """Yield the violation of a flag that the selected dispatcher rejects for lack of a capability."""
    if get_dispatcher(s).rejects(capability):
        yield s.violation(
            "{} needs {moe_token_dispatcher_type:flag} {accepted}, not {moe_token_dispatcher_type:value}.",
            dest,
            accepted=" or ".join(types_with(capability)),
        )


def check_shared_expert_bias(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_shared_expert_intermediate_size is not None and s.add_bias_linear:
        yield s.violation(
            "{moe_shared_expert_intermediate_size} needs {add_bias_linear:flag}: shared experts have no biases."
        )


def check_expert_bias_sharding(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.add_bias_linear and f.etp > 1:
        yield s.violation(
            "Experts with biases cannot be split over tensor ranks ({expert_tensor_parallel_size}); add "
            "{add_bias_linear:flag} or --expert-tensor-parallel-size 1."
        )


def check_rank_capacity_backend(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_expert_rank_capacity_factor is None:
        return
    if get_dispatcher(s).rejects(DispatcherCapability.RANK_CAPACITY):
        yield s.violation(
            "{moe_expert_rank_capacity_factor} needs {moe_token_dispatcher_type:flag} flex with "
            "{moe_flex_dispatcher_backend:flag} {accepted}.",
            accepted=" or ".join(backends_with(DispatcherCapability.RANK_CAPACITY)),
        )


def check_buffer_factors(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """A rank receives at most all tokens: ep times an even share, and ep is at most the number of experts."""
    if f.experts is None:
        return
    pages = ("moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu")
    for dest in ("moe_expert_rank_capacity_factor", *(pages if s.moe_paged_stash else ())):
        factor = getattr(s, dest)
        if s.given(dest) and factor is not None and math.isfinite(factor) and factor > f.experts:
            yield s.violation(
                "{} is more than {num_experts}: a rank never receives more than that many times an even share.", dest
            )


def check_paged_stash_needs_rank_capacity(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_paged_stash and s.moe_expert_rank_capacity_factor is None:
        yield s.violation(
            "{moe_paged_stash} needs {moe_expert_rank_capacity_factor:flag}: without it there is nothing to stash."
        )


def check_paged_stash_conflicts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.moe_paged_stash:
        return
    modules = named(OFFLOADED_MODULES, as_list(s.offload_modules) if s.fine_grained_activation_offloading else ())
    offloaded = keys_rejecting(modules, OffloadCapability.PAGED_STASH)
    if offloaded:
        yield s.violation(
            "{moe_paged_stash} cannot be combined with {offload_modules:flag} {modules}: the same tensors cannot be in "
            "pages and on the host; give the pages host memory instead (--moe-paged-stash-buffer-size-factor-cpu).",
            modules=" ".join(offloaded),
        )
    if s.cpu_offloading_num_layers:
        yield s.violation(
            "{moe_paged_stash} cannot be combined with {cpu_offloading_num_layers}: full layers are offloaded."
        )


def check_latent_projection(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if s.moe_latent_size is None:
        return
    if f.experts is None:
        yield s.violation("{moe_latent_size} needs {num_experts:flag}: it projects the inputs of experts.")
    if not positive(s.moe_latent_size):
        yield s.violation("{moe_latent_size} must be above 0.")
    if s.moe_shared_expert_overlap:
        yield s.violation("{moe_latent_size} cannot be combined with {moe_shared_expert_overlap}.")


def check_grouped_parameters(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("moe_single_grouped_weight", "moe_single_grouped_bias", "moe_use_grouped_tensor"):
        if getattr(s, dest) and not s.moe_grouped_gemm:
            yield s.violation("{:flag} needs {moe_grouped_gemm:flag}.", dest)


def check_router_padding(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.moe_router_padding_for_quantization:
        return
    dest = "moe_router_padding_for_quantization"
    if not s.given(dest) and s.moe_router_padding_for_fp8:
        dest = "moe_router_padding_for_fp8"
    if quantized_format(s) is None:
        either = " or ".join(f"{{{flags.name}:flag}}" for flags in FLAGS)
        yield s.violation(f"{{:flag}} needs {either}: only quantized GEMMs need padding.", dest)
    if get_dispatcher(s).rejects(DispatcherCapability.QUANTIZED_PADDING):
        yield s.violation(
            "{:flag} needs {moe_token_dispatcher_type:flag} {accepted}, not {given}.",
            dest,
            accepted=" or ".join(types_with(DispatcherCapability.QUANTIZED_PADDING)),
            given=s.describe(TYPE).split(" ", 1)[1],
        )
