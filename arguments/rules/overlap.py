"""Rules 87-91: hiding communication behind computation.

Two families: the exchange of tokens behind another microbatch or behind weight gradients, which needs a schedule with something to hide
behind and whole backward passes; parameter gathers behind forward passes or the optimizer's step, which need sharded state. Numbers: those
of Megatron-LM's demands (commit d98e8a64, validate_args and TransformerConfig). Where there is nothing to hide, the flag is a note.
"""

from collections.abc import Iterator

from arguments.rules.facts import Facts, as_list, broken, say
from arguments.rules.optimizer import layer_wise
from arguments.settings import Settings, Violation

OVERLAP = "overlap_moe_expert_parallel_comm"


def nothing_to_hide(s: Settings, f: Facts) -> None:
    """Say where an exchange cannot be started apart from its end: the flag costs there and hides nothing."""
    hybridep = s.moe_token_dispatcher_type == "flex" and s.moe_flex_dispatcher_backend == "hybridep"
    why = "one call of HybridEP sends and receives" if hybridep else None
    if s.moe_shared_expert_overlap and f.experts is not None and f.ep == f.etp == 1:
        s.note(f"{s.flag('moe_shared_expert_overlap')}: with all experts on every rank there is no exchange to compute beside.")
        why = None
    for dest in (OVERLAP, "moe_shared_expert_overlap"):
        if getattr(s, dest) and why:
            s.note(f"{s.flag(dest)}: {why}, so that nothing is computed meanwhile; alltoall or deepep can hide it.")
    dest = "overlap_dispatch_backward_with_experts_wgrad"
    if s.moe_token_dispatcher_type == "allgather":
        why = "the allgather dispatcher gathers in one call"
    if f.ep == 1:
        why = "with --expert-model-parallel-size 1 there is no exchange"
    if getattr(s, dest) and why:
        s.note(f"{s.flag(dest)}: {why}, so that no exchange runs beside the weight gradients.")


def expert_overlap_needs_experts_apart(s: Settings, f: Facts) -> Iterator[Violation]:
    if not s.overlap_moe_expert_parallel_comm:
        return
    if f.ep == 1:
        yield broken(
            s,
            f"{s.flag(OVERLAP)} needs --expert-model-parallel-size above 1: with all experts on one rank there is no "
            "exchange to hide.",
            OVERLAP,
            "expert_model_parallel_size",
        )
    if s.moe_token_dispatcher_type not in ("alltoall", "flex"):
        yield broken(
            s,
            f"{s.flag(OVERLAP)} needs --moe-token-dispatcher-type alltoall or flex, not {s.moe_token_dispatcher_type}.",
            OVERLAP,
            "moe_token_dispatcher_type",
        )
    if not s.bf16 and not s.fp16:
        yield broken(s, f"{s.flag(OVERLAP)} needs --bf16 or --fp16.", OVERLAP, "bf16", "fp16")
    if f.pp > 1 and f.vpp is None:
        yield broken(
            s,
            f"{s.flag(OVERLAP)} with {say(s, 'pipeline_model_parallel_size')} needs virtual pipeline stages "
            "(--num-virtual-stages-per-pipeline-rank above 1): it pairs the chunks of two microbatches.",
            OVERLAP,
            "pipeline_model_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
        )


def expert_overlap_excludes(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.overlap_moe_expert_parallel_comm:
        return
    for dest in ("recompute_method", "recompute_num_layers"):
        if s.recompute_granularity != "full" and getattr(s, dest) is not None:
            yield broken(s, f"{s.flag(OVERLAP)} cannot be combined with {say(s, dest)}.", OVERLAP, dest)
    if s.recompute_granularity == "full":
        yield broken(
            s,
            f"{s.flag(OVERLAP)} cannot be combined with {say(s, 'recompute_granularity')}; recompute selected modules "
            "instead.",
            OVERLAP,
            "recompute_granularity",
        )
    if "moe" in as_list(s.recompute_modules):
        yield broken(
            s, f"{s.flag(OVERLAP)} cannot be combined with {s.flag('recompute_modules')} moe.", OVERLAP, "recompute_modules"
        )
    if s.moe_shared_expert_overlap:
        yield broken(
            s,
            f"{s.flag(OVERLAP)} cannot be combined with {s.flag('moe_shared_expert_overlap')}: both use the same gap.",
            OVERLAP,
            "moe_shared_expert_overlap",
        )
    if s.mtp_num_layers is not None and s.mtp_num_layers > 1:
        yield broken(
            s, f"{s.flag(OVERLAP)} allows at most one MTP layer; {say(s, 'mtp_num_layers')}.", OVERLAP, "mtp_num_layers"
        )


def delayed_weight_gradients(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.delay_wgrad_compute:
        return
    if not s.overlap_moe_expert_parallel_comm:
        yield broken(
            s,
            f"{s.flag('delay_wgrad_compute')} needs --overlap-moe-expert-parallel-comm: the delayed work fills that "
            "gap.",
            "delay_wgrad_compute",
            OVERLAP,
        )
    if s.transformer_impl != "transformer_engine":
        yield broken(
            s,
            f"{s.flag('delay_wgrad_compute')} needs --transformer-impl transformer_engine, not {s.transformer_impl}.",
            "delay_wgrad_compute",
            "transformer_impl",
        )


def early_memory_release(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest = "ep_overlap_early_attn_memory_release"
    if getattr(s, dest) and not s.overlap_moe_expert_parallel_comm:
        yield broken(s, f"{s.flag(dest)} needs --overlap-moe-expert-parallel-comm.", dest, OVERLAP)


def dispatch_backward_overlap_stands_alone(s: Settings, _f: Facts) -> Iterator[Violation]:
    dest = "overlap_dispatch_backward_with_experts_wgrad"
    for other in (OVERLAP, "delay_wgrad_compute"):
        if getattr(s, dest) and getattr(s, other):
            yield broken(s, f"{s.flag(dest)} cannot be combined with {s.flag(other)}.", dest, other)


def param_gather_overlap(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.overlap_param_gather:
        return
    if not (s.use_distributed_optimizer or s.use_megatron_fsdp or layer_wise(s)):
        yield broken(
            s,
            f"{s.flag('overlap_param_gather')} needs --use-distributed-optimizer: otherwise every rank already holds "
            "all parameters.",
            "overlap_param_gather",
            "use_distributed_optimizer",
        )
    if not s.overlap_grad_reduce:
        yield broken(
            s,
            f"{s.flag('overlap_param_gather')} needs --overlap-grad-reduce.",
            "overlap_param_gather",
            "overlap_grad_reduce",
        )


def gather_during_optimizer_step(s: Settings, f: Facts) -> Iterator[Violation]:
    dest = "overlap_param_gather_with_optimizer_step"
    if not getattr(s, dest):
        return
    if f.vpp is None:
        yield broken(
            s,
            f"{s.flag(dest)} needs virtual pipeline stages (--num-virtual-stages-per-pipeline-rank above 1): it steps "
            "chunk by chunk.",
            dest,
            "num_virtual_stages_per_pipeline_rank",
        )
    if not s.use_distributed_optimizer:
        yield broken(s, f"{s.flag(dest)} needs --use-distributed-optimizer.", dest, "use_distributed_optimizer")
    if not s.overlap_param_gather:
        yield broken(s, f"{s.flag(dest)} needs --overlap-param-gather.", dest, "overlap_param_gather")
    if s.ckpt_format != "torch":
        yield broken(s, f"{s.flag(dest)} needs --ckpt-format torch, not {s.ckpt_format}.", dest, "ckpt_format")
    for other, asked in (("optimizer", layer_wise(s)), ("use_megatron_fsdp", s.use_megatron_fsdp),
                         ("reuse_grad_buf_for_mxfp8_param_ag", s.reuse_grad_buf_for_mxfp8_param_ag)):
        if asked:
            yield broken(s, f"{s.flag(dest)} cannot be combined with {s.shown(other)}.", dest, other)


def gather_at_the_end(s: Settings, _f: Facts) -> None:
    """Say where parameters cannot be gathered while others are updated."""
    for other, reason in (
        ("fp8_param_gather", "parameters in 8 bits are made of all main parameters, behind the step"),
        ("qk_clip", "an iteration whose attention logits are clipped gathers behind the step"),
        ("optimizer_cpu_offload", "what the host updates is gathered behind the step"),
    ):
        if s.overlap_param_gather_with_optimizer_step and getattr(s, other) and not (other == "fp8_param_gather" and s.fp8_recipe == "mxfp8"):
            s.note(f"{s.flag('overlap_param_gather_with_optimizer_step')} with {s.flag(other)}: {reason}.")


RESOLVE = (nothing_to_hide, gather_at_the_end)
CHECKS = (
    expert_overlap_needs_experts_apart,
    expert_overlap_excludes,
    delayed_weight_gradients,
    early_memory_release,
    dispatch_backward_overlap_stands_alone,
    param_gather_overlap,
    gather_during_optimizer_step,
)
