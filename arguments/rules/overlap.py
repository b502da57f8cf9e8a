"""Overlap of communication with computation.

Token exchange overlaps with another microbatch or with weight gradients, which needs a matching schedule and complete
backward passes; parameter gathers overlap with forward passes or the optimizer step, which needs sharded state. If
there is nothing to overlap, a note says so.
"""

from collections.abc import Iterator

from arguments.mechanisms.dispatchers import DispatcherCapability, get_dispatcher
from arguments.mechanisms.format_kinds.eight_bit import GRAD_BUFFER
from arguments.mechanisms.formats import list_widths, quantized_format
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import check_support
from arguments.mechanisms.layer_modules import named
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS, get_optimizer
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES, RecomputeCapability
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS, get_sharding
from arguments.mechanisms.support import keys_with, rejecting
from arguments.rules.derived_sizes import DerivedSizes, as_list
from arguments.rules.dispatcher import needs_other_type
from arguments.settings import Limit, Settings, Violation

OVERLAP = "overlap_moe_expert_parallel_comm"


def note_no_overlap(s: Settings, f: DerivedSizes) -> None:
    """Note where there is no exchange, or one call, so that nothing can overlap with it."""
    dispatcher = get_dispatcher(s)
    is_alone = s.moe_shared_expert_overlap and f.experts is not None and f.ep == f.etp == 1
    if is_alone:
        s.note(
            f"{s.flag('moe_shared_expert_overlap')}: with all experts on every rank there is no exchange to overlap "
            "with."
        )
    for dest, capability in (
        (OVERLAP, DispatcherCapability.EXCHANGE_OVERLAP),
        ("moe_shared_expert_overlap", DispatcherCapability.SHARED_EXPERT_OVERLAP),
    ):
        if getattr(s, dest) and dispatcher.ignores(capability) and not is_alone:
            reason = dispatcher.reason(capability)
            s.note(f"{s.flag(dest)}: {reason}, so that nothing overlaps with it; the other dispatchers overlap.")
    dest, why = "overlap_dispatch_backward_with_experts_wgrad", dispatcher.reason(DispatcherCapability.WGRAD_OVERLAP)
    if f.ep == 1:
        why = "with --expert-model-parallel-size 1 there is no exchange"
    if getattr(s, dest) and why:
        s.note(f"{s.flag(dest)}: {why}, so that no exchange overlaps with the weight gradients.")


def check_ep_overlap_requirements(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.overlap_moe_expert_parallel_comm:
        return
    if f.ep == 1:
        yield s.violation(
            "{overlap_moe_expert_parallel_comm} needs {expert_model_parallel_size:flag} above 1: with all experts on "
            "one rank there is no exchange to overlap."
        )
    yield from needs_other_type(s, OVERLAP, DispatcherCapability.EXCHANGE_OVERLAP)
    if not s.bf16 and not s.fp16:
        yield s.violation("{overlap_moe_expert_parallel_comm} needs {bf16:flag} or {fp16:flag}.")
    if f.pp > 1 and f.vpp is None:
        yield s.violation(
            "{overlap_moe_expert_parallel_comm} with {pipeline_model_parallel_size} needs virtual pipeline stages "
            "({num_virtual_stages_per_pipeline_rank:flag} above 1): it pairs the chunks of two microbatches."
        )


def check_ep_overlap_conflicts(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.overlap_moe_expert_parallel_comm:
        return
    for dest in ("recompute_method", "recompute_num_layers"):
        if s.recompute_granularity != "full" and getattr(s, dest) is not None:
            yield s.violation("{overlap_moe_expert_parallel_comm} cannot be combined with {}.", dest)
    if s.recompute_granularity == "full":
        yield s.violation(
            "{overlap_moe_expert_parallel_comm} cannot be combined with {recompute_granularity}; recompute selected "
            "modules instead."
        )
    for module in named(RECOMPUTED_MODULES, as_list(s.recompute_modules)):
        if module.rejects(RecomputeCapability.EXCHANGE_OVERLAP):
            yield s.violation(f"{{overlap_moe_expert_parallel_comm}} cannot be combined with {module.mention}.")
    if s.moe_shared_expert_overlap:
        yield s.violation(
            "{overlap_moe_expert_parallel_comm} cannot be combined with {moe_shared_expert_overlap}: both overlap "
            "the same communication."
        )
    if f.mtp_depths > 1:
        yield s.violation("{overlap_moe_expert_parallel_comm} allows at most one MTP layer; {mtp_num_layers}.")


def check_delay_wgrad(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.delay_wgrad_compute:
        return
    if not s.overlap_moe_expert_parallel_comm:
        yield s.violation(
            "{delay_wgrad_compute} needs {overlap_moe_expert_parallel_comm:flag}: the delayed work fills that gap."
        )
    yield from check_support(s, "delay_wgrad_compute", ImplementationCapability.DELAYED_WGRAD)


def check_early_memory_release(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest = "ep_overlap_early_attn_memory_release"
    if getattr(s, dest) and not s.overlap_moe_expert_parallel_comm:
        yield s.violation("{ep_overlap_early_attn_memory_release} needs {overlap_moe_expert_parallel_comm:flag}.")


def check_dispatch_backward_overlap(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    dest = "overlap_dispatch_backward_with_experts_wgrad"
    for other in (OVERLAP, "delay_wgrad_compute"):
        if getattr(s, dest) and getattr(s, other):
            yield s.violation("{overlap_dispatch_backward_with_experts_wgrad} cannot be combined with {:flag}.", other)


def note_quantized_tp_overlap(s: Settings, _f: DerivedSizes) -> None:
    """Note where the local linears do not chunk their communication."""
    if s.tp_comm_overlap and quantized_format(s):
        s.note(
            f"{s.flag('tp_comm_overlap')}: linears with operands in {list_widths('or')} overlap in TransformerEngine's "
            "layers only; every chunk would quantize the weight again."
        )


def check_param_gather_overlap(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.overlap_param_gather:
        return
    sharding = get_sharding(s)
    if sharding.rejects(ShardingCapability.PARAM_GATHER_OVERLAP):
        problem = "needs {use_distributed_optimizer:flag}: otherwise every rank already holds all parameters"
        if sharding.mention:
            reason = sharding.reason(ShardingCapability.PARAM_GATHER_OVERLAP)
            problem = f"cannot be combined with {sharding.mention}, {reason}"
        yield s.violation(f"{{overlap_param_gather}} {problem}.")
    if not s.overlap_grad_reduce:
        yield s.violation("{overlap_param_gather} needs {overlap_grad_reduce:flag}.")


def check_gather_with_optimizer_step(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    dest = "overlap_param_gather_with_optimizer_step"
    if not getattr(s, dest):
        return
    if f.vpp is None:
        yield s.violation(
            "{overlap_param_gather_with_optimizer_step} needs virtual pipeline stages "
            "({num_virtual_stages_per_pipeline_rank:flag} above 1): it steps chunk by chunk."
        )
    if not s.use_distributed_optimizer:
        yield s.violation("{overlap_param_gather_with_optimizer_step} needs {use_distributed_optimizer:flag}.")
    if not s.overlap_param_gather:
        yield s.violation("{overlap_param_gather_with_optimizer_step} needs {overlap_param_gather:flag}.")
    if s.ckpt_format != "torch":
        yield s.violation(
            "{overlap_param_gather_with_optimizer_step} needs {ckpt_format:flag} torch, not {ckpt_format:value}."
        )


def limit_gather_with_optimizer_step(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.overlap_param_gather_with_optimizer_step
        and s.use_distributed_optimizer
        and get_optimizer(s).rejects(OptimizerCapability.EARLY_GATHER),
        "{overlap_param_gather_with_optimizer_step} cannot be combined with {optimizer:flag} other than "
        f"{' and '.join(keys_with(OPTIMIZERS, OptimizerCapability.EARLY_GATHER))}.",
    )
    late = [str(each.dest) for each, _ in rejecting(SHARDINGS, ShardingCapability.EARLY_GATHER) if each.implies]
    for other in (*dict.fromkeys(late), GRAD_BUFFER):
        yield Limit(
            s.overlap_param_gather_with_optimizer_step and getattr(s, other),
            "{overlap_param_gather_with_optimizer_step} cannot be combined with {:flag}.",
            (other,),
        )


def note_gather_after_step(s: Settings, _f: DerivedSizes) -> None:
    """Note where parameters cannot be gathered while others are updated."""
    if s.overlap_param_gather_with_optimizer_step and s.optimizer_cpu_offload:
        s.note(
            f"{s.flag('overlap_param_gather_with_optimizer_step')} with {s.flag('optimizer_cpu_offload')}: the host "
            "updates its share last, and these parameters are gathered after that."
        )
