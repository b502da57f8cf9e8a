"""Rules 70-86: what happens to tokens between router and experts, and what experts are made of.

Four families: capacity and padding, by expert and by rank; dispatchers with the flags that only one of them or one backend knows, old
spellings included; shared experts, biases and projections of the experts; clones of hot experts, which are ours. Numbers: those of
Megatron-LM's demands (commit d98e8a64, validate_args and TransformerConfig).
"""

import math
from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, balancing_types, broken, positive, say
from arguments.settings import Settings, Violation

TYPE, BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
OLD_SMS = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
RANK_CAPACITY_BACKENDS = ("hybridep", "ncclep")
DEEPEP_SMS = 20


# Derived and normalised values.


def negative_capacity(s: Settings, _f: Facts) -> None:
    if s.moe_expert_capacity_factor is not None and -math.inf < s.moe_expert_capacity_factor < 0:
        s.note(f"{s.shown('moe_expert_capacity_factor')}: negative means no capacity limit, no token is dropped.")
        s.set_derived("moe_expert_capacity_factor", None, "negative means no capacity limit")


def old_deepep_flag(s: Settings, _f: Facts) -> None:
    if not s.moe_enable_deepep or s.moe_flex_dispatcher_backend == "hybridep":
        return
    s.set_derived(BACKEND, "deepep", "from --moe-enable-deepep")


def old_sm_counts(s: Settings, _f: Facts) -> None:
    given = [dest for dest in OLD_SMS if getattr(s, dest) is not None]
    values = {getattr(s, dest) for dest in given}
    if len(values) == 1 and s.moe_flex_dispatcher_num_sms is None:
        s.set_derived("moe_flex_dispatcher_num_sms", values.pop(), f"from {s.flag(given[0])}")


def old_router_padding(s: Settings, _f: Facts) -> None:
    if s.moe_router_padding_for_fp8 and not s.moe_router_padding_for_quantization:
        s.set_derived("moe_router_padding_for_quantization", True, "from --moe-router-padding-for-fp8")


def deepep_probabilities(s: Settings, f: Facts) -> None:
    if f.experts and _deepep(s) and s.moe_router_dtype != "fp32":
        s.note("DeepEP sends router probabilities in fp32: --moe-router-dtype fp32 avoids the cast.")


def deepep_fills_no_rows_up(s: Settings, f: Facts) -> None:
    if f.experts and _deepep(s) and s.moe_router_padding_for_quantization and f.ep * f.etp > 1:
        dest = "moe_router_padding_for_quantization"
        s.note(f"{s.flag(dest if s.given(dest) else 'moe_router_padding_for_fp8')}: DeepEP sends a token to as many experts as the router "
               "chooses, so no further tokens fill the experts' rows up; products that need it fill them up with zeros.")


def deepep_sms(s: Settings, _f: Facts) -> None:
    if _deepep(s) and s.moe_flex_dispatcher_num_sms is None and all(getattr(s, dest) is None for dest in OLD_SMS):
        s.set_derived("moe_flex_dispatcher_num_sms", DEEPEP_SMS, "DeepEP's default")


def _deepep(s: Settings) -> bool:
    return s.moe_token_dispatcher_type == "flex" and s.moe_flex_dispatcher_backend == "deepep"


# Checks.


def capacity_needs_loss_balancing(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.experts is None or s.moe_expert_capacity_factor is None:
        return
    if not all(kind in CAPACITY_BALANCING for kind in balancing_types(s)):
        yield broken(
            s,
            f"{say(s, 'moe_expert_capacity_factor')} works with --moe-router-load-balancing-type "
            f"{', '.join(CAPACITY_BALANCING)}, not with {' '.join(balancing_types(s))}.",
            "moe_expert_capacity_factor",
            "moe_router_load_balancing_type",
        )


def padding_needs_capacity(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_pad_expert_input_to_capacity and s.moe_expert_capacity_factor is None:
        yield broken(
            s,
            f"{s.flag('moe_pad_expert_input_to_capacity')} needs --moe-expert-capacity-factor (not negative): to which "
            "length expert inputs are padded.",
            "moe_pad_expert_input_to_capacity",
            "moe_expert_capacity_factor",
        )


def padding_excludes_deepep(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.moe_pad_expert_input_to_capacity or s.moe_token_dispatcher_type != "flex":
        return
    if s.moe_flex_dispatcher_backend in ("deepep", "ncclep"):
        yield broken(
            s,
            f"{s.flag('moe_pad_expert_input_to_capacity')} cannot be combined with {say(s, TYPE)} and "
            f"{say(s, BACKEND)}; use --moe-flex-dispatcher-backend hybridep or --moe-token-dispatcher-type alltoall.",
            "moe_pad_expert_input_to_capacity",
            TYPE,
            BACKEND,
        )


def deepep_flag_needs_flex(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_enable_deepep and s.moe_token_dispatcher_type != "flex":
        yield broken(
            s,
            f"{s.flag('moe_enable_deepep')} needs --moe-token-dispatcher-type flex, not {s.moe_token_dispatcher_type}.",
            "moe_enable_deepep",
            TYPE,
        )
    if s.moe_enable_deepep and s.moe_flex_dispatcher_backend == "hybridep":
        yield broken(
            s,
            f"{s.flag('moe_enable_deepep')} and {say(s, BACKEND)} contradict each other; keep the latter or use "
            "deepep.",
            "moe_enable_deepep",
            BACKEND,
        )


def eight_bits_travel_by_all_to_all(s: Settings, _f: Facts) -> Iterator[Violation]:
    """Ours: Megatron-LM has these for its ncclep backend only."""
    for dest in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        if s.values[dest] != "bf16" and s.moe_token_dispatcher_type != "alltoall":
            yield broken(
                s,
                f"{say(s, dest)} needs --moe-token-dispatcher-type alltoall here, not {s.moe_token_dispatcher_type}: the other dispatchers "
                "carry bf16.",
                dest,
                TYPE,
            )


def ncclep_needs_flex(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_flex_dispatcher_backend == "ncclep" and s.moe_token_dispatcher_type != "flex":
        yield broken(
            s,
            f"{say(s, BACKEND)} needs --moe-token-dispatcher-type flex, not {s.moe_token_dispatcher_type}.",
            BACKEND,
            TYPE,
        )


def sm_counts_agree(s: Settings, _f: Facts) -> Iterator[Violation]:
    deepep, hybridep = (getattr(s, dest) for dest in OLD_SMS)
    if None not in (deepep, hybridep) and deepep != hybridep and s.moe_flex_dispatcher_num_sms is None:
        yield broken(
            s,
            f"{say(s, OLD_SMS[0])} and {say(s, OLD_SMS[1])} contradict each other; give one "
            "--moe-flex-dispatcher-num-sms.",
            *OLD_SMS,
        )


def shared_expert_is_sound(s: Settings, _f: Facts) -> Iterator[Violation]:
    size = s.moe_shared_expert_intermediate_size
    if size is None:
        return
    if not positive(size):
        yield broken(
            s,
            f"{say(s, 'moe_shared_expert_intermediate_size')} must be above 0: the width of all shared experts "
            "together.",
            "moe_shared_expert_intermediate_size",
        )
    if s.moe_shared_expert_overlap and s.moe_token_dispatcher_type not in ("alltoall", "flex"):
        yield broken(
            s,
            f"{s.flag('moe_shared_expert_overlap')} needs --moe-token-dispatcher-type alltoall or flex, not "
            f"{s.moe_token_dispatcher_type}.",
            "moe_shared_expert_overlap",
            TYPE,
        )


def shared_expert_has_no_bias(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.experts and s.moe_shared_expert_intermediate_size is not None and s.add_bias_linear:
        yield broken(
            s,
            f"{say(s, 'moe_shared_expert_intermediate_size')} needs --disable-bias-linear: shared experts have no "
            "biases.",
            "moe_shared_expert_intermediate_size",
            "add_bias_linear",
        )


def expert_bias_needs_whole_experts(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.experts and s.add_bias_linear and f.etp > 1:
        yield broken(
            s,
            f"Experts with biases cannot be split over tensor ranks ({say(s, 'expert_tensor_parallel_size')}); add "
            "--disable-bias-linear or --expert-tensor-parallel-size 1.",
            "add_bias_linear",
            "expert_tensor_parallel_size",
        )


def rank_capacity_needs_backend(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_expert_rank_capacity_factor is None:
        return
    if s.moe_token_dispatcher_type != "flex" or s.moe_flex_dispatcher_backend not in RANK_CAPACITY_BACKENDS:
        yield broken(
            s,
            f"{say(s, 'moe_expert_rank_capacity_factor')} needs --moe-token-dispatcher-type flex with "
            f"--moe-flex-dispatcher-backend {' or '.join(RANK_CAPACITY_BACKENDS)}.",
            "moe_expert_rank_capacity_factor",
            TYPE,
            BACKEND,
        )


def paged_stash_needs_rank_capacity(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.moe_paged_stash and s.moe_expert_rank_capacity_factor is None:
        yield broken(
            s,
            f"{s.flag('moe_paged_stash')} needs --moe-expert-rank-capacity-factor: without it there is nothing to "
            "stash.",
            "moe_paged_stash",
            "moe_expert_rank_capacity_factor",
        )


def paged_stash_excludes(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest = "moe_paged_stash"
    if not s.moe_paged_stash:
        return
    offloaded = [part for part in ("expert_fc1", "moe_act") if s.fine_grained_activation_offloading and part in as_list(s.offload_modules)]
    if offloaded:
        yield broken(s, f"{s.flag(dest)} cannot be combined with {s.flag('offload_modules')} {' '.join(offloaded)}: the same tensors cannot "
                     "go into pages and to the host; give the pages room there instead (--moe-paged-stash-buffer-size-factor-cpu).",
                     dest, "offload_modules")  # fmt: skip
    if s.cpu_offloading_num_layers:
        yield broken(s, f"{s.flag(dest)} cannot be combined with {say(s, 'cpu_offloading_num_layers')}: whole layers go to the host.", dest,
                     "cpu_offloading_num_layers")


def lone_rank_clones_nothing(s: Settings, f: Facts) -> None:
    if s.moe_clone_hot_experts and f.experts is not None and f.ep == 1:
        s.note(f"{s.shown('moe_clone_hot_experts')}: with --expert-model-parallel-size 1 there is no load to even out.")


def cloning_is_possible(s: Settings, f: Facts) -> Iterator[Violation]:
    dest = "moe_clone_hot_experts"
    if not s.moe_clone_hot_experts:
        return
    if f.experts is None:
        yield broken(s, f"{s.flag(dest)} needs --num-experts: a dense model has no experts to clone.", dest, "num_experts")
    if s.moe_token_dispatcher_type == "flex":
        yield broken(s, f"{s.flag(dest)} needs --moe-token-dispatcher-type alltoall or allgather: the buffers of flex are made for the "
                     "experts of the model alone.", dest, TYPE)
    others = (
        ("fp8", "scales are kept per expert of the rank"), ("fp4", "scales are kept per expert of the rank"),
        ("overlap_moe_expert_parallel_comm", "gradients of clones travel within one backward pass"),
        ("delay_wgrad_compute", "gradients of clones travel within one backward pass"),
        ("overlap_dispatch_backward_with_experts_wgrad", "gradients of clones travel within one backward pass"),
        ("use_torch_fsdp2", "it shards the weights that clones are made of"),
        ("use_megatron_fsdp", "it shards the weights that clones are made of"),
    )  # fmt: skip
    for other, why in others:
        if getattr(s, other):
            yield broken(s, f"{s.flag(dest)} cannot be combined with {s.flag(other)}: {why}.", dest, other)
    if s.pipeline_schedule == "zero-bubble":
        yield broken(s, f"{s.flag(dest)} cannot be combined with {say(s, 'pipeline_schedule')}: gradients of clones travel within one "
                     "backward pass.", dest, "pipeline_schedule")


def latent_projection_is_sound(s: Settings, f: Facts) -> Iterator[Violation]:
    if s.moe_latent_size is None:
        return
    if f.experts is None:
        yield broken(
            s,
            f"{say(s, 'moe_latent_size')} needs --num-experts: it projects the inputs of experts.",
            "moe_latent_size",
            "num_experts",
        )
    if not positive(s.moe_latent_size):
        yield broken(s, f"{say(s, 'moe_latent_size')} must be above 0.", "moe_latent_size")
    if s.moe_shared_expert_overlap:
        yield broken(
            s,
            f"{say(s, 'moe_latent_size')} cannot be combined with {s.flag('moe_shared_expert_overlap')}.",
            "moe_latent_size",
            "moe_shared_expert_overlap",
        )


def grouped_parameters_need_grouped_gemm(s: Settings, _f: Facts) -> Iterator[Violation]:
    for dest in ("moe_single_grouped_weight", "moe_single_grouped_bias", "moe_use_grouped_tensor"):
        if getattr(s, dest) and not s.moe_grouped_gemm:
            yield broken(s, f"{s.flag(dest)} needs --moe-grouped-gemm.", dest, "moe_grouped_gemm")


def router_padding_needs_quantization(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.moe_router_padding_for_quantization:
        return
    dest = "moe_router_padding_for_quantization"
    if not s.given(dest) and s.moe_router_padding_for_fp8:
        dest = "moe_router_padding_for_fp8"
    if not s.fp8 and not s.fp4:
        yield broken(
            s,
            f"{s.flag(dest)} needs --fp8-format or --fp4-format: only quantized GEMMs want padded rows.",
            dest,
            "fp8",
            "fp4",
        )
    if s.moe_token_dispatcher_type == "allgather":
        yield broken(
            s,
            f"{s.flag(dest)} needs --moe-token-dispatcher-type alltoall or flex, not {say(s, TYPE).split(' ', 1)[1]}.",
            dest,
            TYPE,
        )


RESOLVE = (negative_capacity, old_deepep_flag, old_sm_counts, old_router_padding, deepep_probabilities, deepep_fills_no_rows_up, deepep_sms,
           lone_rank_clones_nothing)
CHECKS = (
    capacity_needs_loss_balancing,
    padding_needs_capacity,
    padding_excludes_deepep,
    deepep_flag_needs_flex,
    eight_bits_travel_by_all_to_all,
    ncclep_needs_flex,
    sm_counts_agree,
    shared_expert_is_sound,
    shared_expert_has_no_bias,
    expert_bias_needs_whole_experts,
    rank_capacity_needs_backend,
    paged_stash_needs_rank_capacity,
    paged_stash_excludes,
    cloning_is_possible,
    latent_projection_is_sound,
    grouped_parameters_need_grouped_gemm,
    router_padding_needs_quantization,
)
