"""Rules 45-46, 90, 102 and 114-115: the optimizer, its rates, and the ways to shard it.

Three families: rates and weight decay, whose schedules must be complete and ordered; optimizers besides Adam and SGD, which deal out whole
layers instead of slices; the two FSDPs, each with what it excludes. Numbers: those of Megatron-LM's demands (commit d98e8a64, validate_args
and TransformerConfig).
"""

from collections.abc import Iterator

from arguments.rules.facts import Facts, broken, say
from arguments.settings import Settings, Violation

PLAIN = ("adam", "sgd")
MUON_COEFFICIENTS = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5")
"""Those of ops/newton_schulz.py, which this floor does not see."""


def layer_wise(s: Settings) -> bool:
    """Is the optimizer's work dealt out layer by layer, in Megatron-LM's terms (muon and its relatives, when distributed)?"""
    return s.optimizer not in PLAIN and (s.optimizer == "dist_muon" or s.use_distributed_optimizer)


# Derived and normalised values.


def old_dist_muon(s: Settings, _f: Facts) -> None:
    if s.optimizer == "dist_muon":
        s.note(f"{s.shown('optimizer')} is an old name: taken as --optimizer muon --use-distributed-optimizer.")
        s.set_derived("optimizer", "muon", "from dist_muon")
        s.set_derived("use_distributed_optimizer", True, "from dist_muon")


def layer_wise_optimizer(s: Settings, _f: Facts) -> None:
    if s.optimizer == "muon" and s.use_distributed_optimizer:
        s.note(f"{s.shown('optimizer')} with --use-distributed-optimizer: whole matrices are dealt out to ranks, not ranges.")


def fsdp_shards_the_optimizer(s: Settings, _f: Facts) -> None:
    if s.use_megatron_fsdp and not s.use_distributed_optimizer:
        s.note(f"{s.flag('use_megatron_fsdp')} turns --use-distributed-optimizer on.")
        s.set_derived("use_distributed_optimizer", True, "Megatron-FSDP")


def frozen_layers_need_no_optimizer(s: Settings, _f: Facts) -> None:
    """As in Megatron-LM: training batches run forward only; the model alone is loaded, and nothing is saved."""
    if not s.freeze_all_layers:
        return
    s.note(f"{s.flag('freeze_all_layers')}: there are no gradients and no updates, and no checkpoints are saved.")
    if s.load is not None and not s.finetune:
        s.set_derived("finetune", True, "from --freeze-all-layers")


def one_checkpoint_format(s: Settings, _f: Facts) -> None:
    if s.ckpt_format == "fsdp_dtensor":
        s.note(
            f"{s.shown('ckpt_format')}: checkpoints are written in the layout-free format torch_dist, which sharded and "
            "other runs resume alike."
        )


def constant_weight_decay(s: Settings, _f: Facts) -> None:
    if (
        s.weight_decay_incr_style == "constant"
        and not s.given("start_weight_decay")
        and not s.given("end_weight_decay")
    ):
        s.set_derived("start_weight_decay", s.weight_decay, "as --weight-decay")
        s.set_derived("end_weight_decay", s.weight_decay, "as --weight-decay")


def weight_decay_of_qk_norm(s: Settings, _f: Facts) -> None:
    if s.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm":
        s.set_derived("apply_wd_to_qk_layernorm", True, "from --no-weight-decay-cond-type")


# Checks.


def learning_rate_is_given(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.lr is None and not s.evaluates_only and not s.freeze_all_layers:
        yield broken(s, f"{s.flag('lr')} is missing; there is no default for it.", "lr")


def a_record_needs_an_update(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.freeze_all_layers and s.record_step is not None:
        yield broken(
            s,
            f"{s.flag('record_step')} records an update, and {s.flag('freeze_all_layers')} makes none.",
            "record_step",
            "freeze_all_layers",
        )


def learning_rates_are_ordered(s: Settings, _f: Facts) -> Iterator[Violation]:
    for rate, least in (("lr", "min_lr"), ("decoupled_lr", "decoupled_min_lr")):
        high, low = getattr(s, rate), getattr(s, least)
        if high is not None and low is not None and low > high:
            yield broken(s, f"{say(s, least)} must not be above {say(s, rate)}: rates decay towards it.", least, rate)


def warmup_start_below_peak(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.lr is not None and s.lr >= 0 and s.lr_warmup_init > s.lr:
        yield broken(s, f"{say(s, 'lr_warmup_init')} must not be above {say(s, 'lr')}.", "lr_warmup_init", "lr")


def weight_decay_schedule(s: Settings, _f: Facts) -> Iterator[Violation]:
    ends = ("start_weight_decay", "end_weight_decay")
    if s.weight_decay_incr_style == "constant":
        given = [dest for dest in ends if s.given(dest)]
        if given:
            yield broken(
                s,
                f"{say(s, given[0])} needs --weight-decay-incr-style linear or cosine; a constant one is "
                "--weight-decay.",
                *given,
                "weight_decay_incr_style",
            )
        return
    missing = [dest for dest in ends if getattr(s, dest) is None]
    if missing:
        yield broken(
            s,
            f"{say(s, 'weight_decay_incr_style')} needs {' and '.join(s.flag(d) for d in missing)}.",
            "weight_decay_incr_style",
            *missing,
        )
    elif not 0 <= s.start_weight_decay <= s.end_weight_decay:
        yield broken(
            s,
            f"{say(s, ends[0])} and {say(s, ends[1])}: weight decay must start at 0 or above and not fall.",
            *ends,
        )


def unusual_optimizer_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.optimizer in PLAIN:
        return
    for dest in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(s, dest):
            yield broken(s, f"{s.flag(dest)} needs --optimizer adam or sgd, not {s.optimizer}.", dest, "optimizer")
    if layer_wise(s) and s.ckpt_format not in ("torch", "torch_dist"):
        yield broken(
            s,
            f"--optimizer {s.optimizer} with --use-distributed-optimizer needs --ckpt-format torch or torch_dist, not "
            f"{s.ckpt_format}.",
            "ckpt_format",
            "optimizer",
        )


def muon_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    """The second is ours: a matrix is updated as a whole, in fp32, where the model is. (Other offload needs the precision-aware Adam.)

    MXFP8 weights stay in the model's format with --fp8-param-gather too, so Muon updates them as any others.
    """
    if s.optimizer not in ("muon", "dist_muon"):
        return
    if s.muon_coefficient_type not in MUON_COEFFICIENTS:
        yield broken(s, f"{say(s, 'muon_coefficient_type')} must be one of {', '.join(MUON_COEFFICIENTS)}.", "muon_coefficient_type")
    for dest, is_on in (
        ("chunked_optimizer_state_offload", s.chunked_optimizer_state_offload),
        ("fp8_param_gather", s.fp8_param_gather and not (s.fp8 and s.fp8_recipe == "mxfp8")),
    ):
        if is_on:
            yield broken(
                s,
                f"{s.flag(dest)} needs --optimizer adam, sgd or lion, not {s.optimizer}: Muon keeps fp32 state beside the model and updates "
                "whole matrices.",
                dest,
                "optimizer",
            )


def one_kind_of_fsdp(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.use_megatron_fsdp and s.use_torch_fsdp2:
        yield broken(
            s,
            f"Use only one of {s.flag('use_megatron_fsdp')} and {s.flag('use_torch_fsdp2')}.",
            "use_megatron_fsdp",
            "use_torch_fsdp2",
        )


def megatron_fsdp_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.use_megatron_fsdp and s.ckpt_format != "fsdp_dtensor":
        yield broken(
            s,
            f"{s.flag('use_megatron_fsdp')} needs --ckpt-format fsdp_dtensor, not {s.ckpt_format}.",
            "use_megatron_fsdp",
            "ckpt_format",
        )


def torch_fsdp_fits(s: Settings, f: Facts) -> Iterator[Violation]:
    if not s.use_torch_fsdp2:
        return
    for dest, size in (("pipeline_model_parallel_size", f.pp), ("expert_model_parallel_size", f.ep)):
        if size > 1:
            yield broken(
                s, f"{s.flag('use_torch_fsdp2')} cannot be combined with {say(s, dest)}.", "use_torch_fsdp2", dest
            )
    if s.use_distributed_optimizer:
        yield broken(
            s,
            f"{s.flag('use_torch_fsdp2')} cannot be combined with {s.flag('use_distributed_optimizer')}: it shards the "
            "optimizer itself.",
            "use_torch_fsdp2",
            "use_distributed_optimizer",
        )


def shards_need_whole_backwards(s: Settings, f: Facts) -> Iterator[Violation]:
    """Ours: weight gradients that wait for another action of the schedule find the parameters sharded again; see parallel/fsdp.py."""
    sharded = s.use_megatron_fsdp and s.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    if not (sharded or s.use_torch_fsdp2):
        return
    parent = "use_torch_fsdp2" if s.use_torch_fsdp2 else "use_megatron_fsdp"
    for dest, put_off in (
        ("pipeline_schedule", s.pipeline_schedule == "zero-bubble"),
        ("defer_embedding_wgrad_compute", s.defer_embedding_wgrad_compute),
    ):
        if put_off:
            yield broken(
                s,
                f"{s.flag(parent)} cannot be combined with {say(s, dest)}: a layer's parameters are gathered for its "
                "forward and backward as a whole only, and this takes them apart.",
                parent,
                dest,
            )


def average_in_collective_needs_means(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.ddp_average_in_collective and s.calculate_per_token_loss:
        yield broken(
            s,
            f"{s.flag('ddp_average_in_collective')} cannot be combined with {s.flag('calculate_per_token_loss')}: "
            "gradients are then summed and divided by the token count.",
            "ddp_average_in_collective",
            "calculate_per_token_loss",
        )


RESOLVE = (
    old_dist_muon,
    frozen_layers_need_no_optimizer,
    fsdp_shards_the_optimizer,
    one_checkpoint_format,
    layer_wise_optimizer,
    constant_weight_decay,
    weight_decay_of_qk_norm,
)
CHECKS = (
    learning_rate_is_given,
    a_record_needs_an_update,
    learning_rates_are_ordered,
    warmup_start_below_peak,
    weight_decay_schedule,
    unusual_optimizer_fits,
    muon_fits,
    one_kind_of_fsdp,
    megatron_fsdp_fits,
    torch_fsdp_fits,
    shards_need_whole_backwards,
    average_in_collective_needs_means,
)
