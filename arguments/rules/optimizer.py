"""The optimizer, learning rates, weight decay, and sharding of the optimizer.

Schedules of rates and weight decay must be complete and ordered; optimizers other than Adam and SGD assign full layers
to ranks; the two FSDPs exclude several flags.
"""

from collections.abc import Iterator

from arguments.mechanisms.formats import FLAGS
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS, get_optimizer
from arguments.mechanisms.schedule_kinds.declaration import ScheduleCapability
from arguments.mechanisms.schedules import SCHEDULES, asked_schedule
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import asked_for, get_sharding, rejections, wrapped
from arguments.mechanisms.support import keys_with, rejecting
from arguments.rules import frozen_weights
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings, Violation

NOT_WITH_FROZEN_BACKBONE = (
    ("freeze_all_layers", "it trains nothing"),
    ("lora_dim", "adapters are trained alone"),
    *frozen_weights.EXCLUDED,
    ("use_transformer_engine_op_fuser", "its fused experts are not tested next to frozen weights"),
    ("mtp_num_layers", "its projections are neither backbone nor experts"),
)


def is_layer_wise(s: Settings) -> bool:
    """Return whether Megatron-LM assigns full layers to the ranks of the distributed optimizer."""
    return s.use_distributed_optimizer and get_optimizer(s).is_layer_wise


# Derived values.


def resolve_frozen_layers(s: Settings, _f: DerivedSizes) -> None:
    """As in Megatron-LM: training batches run forward only; the model alone is loaded, and nothing is saved."""
    if not s.freeze_all_layers:
        return
    s.note(f"{s.flag('freeze_all_layers')}: there are no gradients and no updates, and no checkpoints are saved.")
    if s.load is not None and not s.finetune:
        s.set_derived("finetune", True, "from --freeze-all-layers")


def resolve_fsdp_optimizer(s: Settings, _f: DerivedSizes) -> None:
    sharding = get_sharding(s)
    if sharding.implies and not s.use_distributed_optimizer:
        s.note(f"{s.flag(str(sharding.dest))} turns --use-distributed-optimizer on.")
        s.set_derived("use_distributed_optimizer", True, sharding.implies)


def note_fsdp_checkpoint_format(s: Settings, _f: DerivedSizes) -> None:
    if s.ckpt_format == "fsdp_dtensor":
        s.note(
            f"{s.shown('ckpt_format')}: checkpoints are written in the mapping-independent format torch_dist, which "
            "sharded and other runs resume alike."
        )


def note_layer_wise_optimizer(s: Settings, _f: DerivedSizes) -> None:
    if s.use_distributed_optimizer and get_optimizer(s).updates_matrices:
        s.note(
            f"{s.shown('optimizer')} with --use-distributed-optimizer: ranks are assigned full matrices, not ranges."
        )


def resolve_constant_weight_decay(s: Settings, _f: DerivedSizes) -> None:
    if (
        s.weight_decay_incr_style == "constant"
        and not s.given("start_weight_decay")
        and not s.given("end_weight_decay")
    ):
        s.set_derived("start_weight_decay", s.weight_decay, "as --weight-decay")
        s.set_derived("end_weight_decay", s.weight_decay, "as --weight-decay")


def resolve_qk_norm_weight_decay(s: Settings, _f: DerivedSizes) -> None:
    if s.no_weight_decay_cond_type == "apply_wd_to_qk_layernorm":
        s.set_derived("apply_wd_to_qk_layernorm", True, "from --no-weight-decay-cond-type")


# Checks.


def check_lr_given(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.lr is None and not s.is_eval_only and not s.freeze_all_layers:
        yield s.violation("{lr:flag} is missing; there is no default for it.")


def limit_record_without_update(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.freeze_all_layers and s.record_step is not None,
        "{record_step:flag} records an update, and {freeze_all_layers} makes none.",
    )


def limit_saved_frozen_layers(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for other in ("ckpt_convert_format", "moe_use_upcycling"):
        yield Limit(
            s.freeze_all_layers and s.values[other] != s.default(other),
            "{freeze_all_layers:flag} cannot be combined with {}: it saves nothing.",
            (other,),
        )


def limit_frozen_backbone(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for other, why in NOT_WITH_FROZEN_BACKBONE:
        applies = s.freeze_backbone and s.values[other] != s.default(other)
        yield Limit(applies, "{freeze_backbone:flag} cannot be combined with {}: " + why + ".", (other,))


def check_lr_order(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for rate, least in (("lr", "min_lr"), ("decoupled_lr", "decoupled_min_lr")):
        high, low = getattr(s, rate), getattr(s, least)
        if high is not None and low is not None and low > high:
            yield s.violation("{} must not be above {}: rates decay towards it.", least, rate)


def check_lr_warmup_init(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.lr is not None and s.lr >= 0 and s.lr_warmup_init > s.lr:
        yield s.violation("{lr_warmup_init} must not be above {lr}.")


def check_weight_decay_schedule(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    ends = ("start_weight_decay", "end_weight_decay")
    if s.weight_decay_incr_style == "constant":
        given = [dest for dest in ends if s.given(dest)]
        if given:
            yield s.violation(
                "{} needs {weight_decay_incr_style:flag} linear or cosine; a constant one is --weight-decay.", *given
            )
        return
    missing = [dest for dest in ends if getattr(s, dest) is None]
    if missing:
        yield s.violation(
            "{weight_decay_incr_style} needs {flags}.", *missing, flags=" and ".join(s.flag(d) for d in missing)
        )
    elif not 0 <= s.start_weight_decay <= s.end_weight_decay:
        yield s.violation("{} and {}: weight decay must start at 0 or above and not fall.", *ends)


def check_sharded_optimizer(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    optimizer = get_optimizer(s)
    for sharding in wrapped(s):
        if optimizer.rejects(OptimizerCapability.FSDP):
            yield s.violation(
                "{:flag} needs {optimizer:flag} {accepted}, not {optimizer:value}.",
                str(sharding.dest),
                accepted=" or ".join(keys_with(OPTIMIZERS, OptimizerCapability.FSDP)),
            )
    is_other_format = s.ckpt_format not in ("torch", "torch_dist")
    if s.use_distributed_optimizer and is_other_format and optimizer.rejects(OptimizerCapability.OTHER_FORMATS):
        yield s.violation(
            "{optimizer:shown} with --use-distributed-optimizer needs {ckpt_format:flag} torch or torch_dist, not "
            "{ckpt_format:value}."
        )


def check_one_fsdp(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    asked = [str(sharding.dest) for sharding in wrapped(s)]
    if len(asked) > 1:
        yield s.violation("Use only one of {} and {}.", *asked)


def check_megatron_fsdp(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    sharding = get_sharding(s)
    if sharding.ckpt_format not in (None, s.ckpt_format):
        text = f"{{}} needs {{ckpt_format:flag}} {sharding.ckpt_format}, not {{ckpt_format}}."
        yield s.violation(text, str(sharding.dest))


def check_outer_sharding(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    is_asked = s.num_distributed_optimizer_instances > 1 and s.outer_dp_sharding_strategy == "optim"
    if is_asked and get_sharding(s).rejects(ShardingCapability.OUTER):
        yield s.violation(
            "{outer_dp_sharding_strategy} needs {data_parallel_sharding_strategy:flag} optim_grads_params, not "
            "{data_parallel_sharding_strategy:value}: instances can share only what each of them shards."
        )


def limit_fsdp_main_params_dtype(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    dtype = s.megatron_fsdp_main_params_dtype
    is_narrow = get_sharding(s).has_formats and dtype != "fp32" and (s.bf16 or s.fp16)
    for model in ("bf16", "fp16"):
        yield Limit(
            is_narrow and s.values[model] and dtype not in ("auto", model),
            "{megatron_fsdp_main_params_dtype} with {:flag} must be "
            f"fp32, auto or {model}: without a separate fp32 copy the model's parameters are the main parameters.",
            (model,),
        )
    for dest, is_on in (
        *((flags.param_gather, getattr(s, flags.param_gather) and getattr(s, flags.name)) for flags in FLAGS),
        ("main_params_dtype", s.use_precision_aware_optimizer and s.main_params_dtype != "fp32"),
    ):
        yield Limit(
            is_narrow and is_on,
            "{megatron_fsdp_main_params_dtype} cannot be combined with {:shown}, which stores main parameters in "
            "another format.",
            (dest,),
        )


def check_torch_fsdp(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    for dest, size, capability in (
        ("pipeline_model_parallel_size", f.pp, ShardingCapability.PIPELINE),
        ("expert_model_parallel_size", f.ep, ShardingCapability.EXPERT_PARALLEL),
    ):
        for each in (each for each in asked_for(s) if size > 1 and each.rejects(capability)):
            yield s.violation(f"{{}} cannot be combined with {{}}: {each.reason(capability)}.", str(each.dest), dest)
    if s.use_distributed_optimizer:
        for each in (each for each in asked_for(s) if each.shards_optimizer):
            yield s.violation(
                "{} cannot be combined with {use_distributed_optimizer}: it shards the optimizer itself.",
                str(each.dest),
            )


def limit_fsdp_deferred_wgrad(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """Parameters are sharded again when deferred weight gradients are computed (parallel/fsdp.py)."""
    asked = asked_schedule(s)
    for parent, is_sharded in rejections(s, ShardingCapability.DEFERRED_WGRAD):
        for flag, is_deferred in (
            *((each.mention, each is asked) for each, _ in rejecting(SCHEDULES, ScheduleCapability.SHARDED_GRADS)),
            ("{defer_embedding_wgrad_compute:flag}", s.defer_embedding_wgrad_compute),
        ):
            yield Limit(
                is_sharded and is_deferred,
                f"{{:flag}} cannot be combined with {flag}: a layer's parameters are gathered for one complete forward "
                "and backward only, and this separates them.",
                (parent,),
            )


def check_average_in_collective(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.ddp_average_in_collective and s.calculate_per_token_loss:
        yield s.violation(
            "{ddp_average_in_collective} cannot be combined with {calculate_per_token_loss}: gradients are then summed "
            "and divided by the token count."
        )
