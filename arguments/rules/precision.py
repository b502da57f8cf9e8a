"""Formats of parameters, gradients and quantized GEMMs, fused losses, determinism.

Formats that exclude each other or need one (half precision, quantized GEMMs and parameters); low-precision optimizer
state, which needs the precision-aware optimizer; features whose results depend on the order of sums. Ranges of numbers
are ours.
"""

from collections.abc import Iterator

from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.format_kinds.eight_bit import DELAYED
from arguments.mechanisms.formats import FLAGS, QUANTIZED, quantized_format, selected
from arguments.mechanisms.optimizer_kinds.declaration import OptimizerCapability
from arguments.mechanisms.optimizers import OPTIMIZERS, get_optimizer
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding, rejections
from arguments.mechanisms.support import keys_with, rejecting
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings, Violation

NARROW_STATE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
MAX_AMAX_HISTORY = 1 << 20
MAX_FP8_MARGIN = 64


# Derived values.


def resolve_grad_accumulation(s: Settings, _f: DerivedSizes) -> None:
    dest = "accumulate_allreduce_grads_in_fp32"
    if not s.bf16:
        return
    if s.grad_reduce_in_bf16:
        if s.accumulate_allreduce_grads_in_fp32:
            s.note(f"{s.flag('grad_reduce_in_bf16')} overrides {s.flag(dest)}.")
        s.set_derived(dest, False, "--grad-reduce-in-bf16")
    elif s.main_grads_dtype == "fp32":
        s.set_derived(dest, True, "bf16 training accumulates and reduces gradients in fp32")


def resolve_nan_check(s: Settings, _f: DerivedSizes) -> None:
    if s.fp16 and s.loss_scale is None and s.check_for_nan_in_loss_and_grad:
        s.note("fp16 with a dynamic loss scale: the NaN check is off, overflow steps are skipped instead.")
        s.set_derived("check_for_nan_in_loss_and_grad", False, "dynamic loss scale")


def note_no_quantized_layers(s: Settings, _f: DerivedSizes) -> None:
    ends = (s.num_layers_at_start_in_bf16 or 0) + (s.num_layers_at_end_in_bf16 or 0)
    fmt = quantized_format(s)
    if fmt is not None and s.first_last_layers_bf16 and s.num_layers and ends >= s.num_layers:
        s.note(
            f"{s.flag('first_last_layers_bf16')}: all of {s.shown('num_layers')} are first or last layers, so "
            f"{s.flag(fmt.flags.name)} quantizes none of them."
        )


def note_unquantized_params(s: Settings, _f: DerivedSizes) -> None:
    fmt = quantized_format(s)
    if fmt is None or not getattr(s, fmt.flags.param_gather):
        return
    gather, recipe = fmt.flags.param_gather, fmt.flags.recipe
    wide = "are stored and gathered in the model's format here; GEMMs quantize them."
    sharding = get_sharding(s)
    if sharding.ignores(ShardingCapability.QUANTIZED_GATHER):
        s.note(f"{s.flag(gather)} with {s.flag(str(sharding.dest))}: these weights {wide}")
    elif fmt.is_custom:
        s.note(f"{s.shown(recipe)} with {s.flag(gather)}: weights whose formats a factory chooses {wide}")
    elif (
        fmt.stored
        and fmt.stored.is_gathered_wide
        and (not getattr(s, fmt.stored.flag) or sharding.ignores(ShardingCapability.GRAD_BUFFER_REUSE))
    ):
        s.note(f"{s.shown(recipe)} with {s.flag(gather)}: {fmt.name} weights {wide}")


def note_unused_grad_buffer(s: Settings, _f: DerivedSizes) -> None:
    dest, sharding = "reuse_grad_buf_for_mxfp8_param_ag", get_sharding(s)
    if getattr(s, dest) and (s.fp8_recipe != "mxfp8" or sharding.ignores(ShardingCapability.GRAD_BUFFER_REUSE)):
        reason = (
            f"weights of {s.shown('fp8_recipe')} are gathered in fp8"
            if s.fp8_recipe != "mxfp8"
            else sharding.reason(ShardingCapability.GRAD_BUFFER_REUSE)
        )
        s.note_no_effect(s.flag(dest), reason)


# Checks.


def check_one_half_precision(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.bf16 and s.fp16:
        yield s.violation("Use only one of {bf16} and {fp16}.")


def check_fp32_accumulation(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.accumulate_allreduce_grads_in_fp32 and s.main_grads_dtype != "fp32":
        yield s.violation(
            "{accumulate_allreduce_grads_in_fp32} contradicts {main_grads_dtype}: the accumulated gradients are the "
            "main gradients."
        )


def check_one_quantized_format(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    asked = [f"{{{flags.name}}}" for flags in FLAGS if getattr(s, flags.name)]
    if len(asked) > 1:
        yield s.violation(f"Use only one of {' and '.join(asked)}.")


def check_quantization_numbers(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if quantized_format(s) is DELAYED and s.fp8_amax_history_len > MAX_AMAX_HISTORY:
        yield s.violation(
            "{fp8_amax_history_len} must be at most {most:,}: every quantized linear layer has three such histories.",
            most=MAX_AMAX_HISTORY,
        )
    if quantized_format(s) is DELAYED and abs(s.fp8_margin) > MAX_FP8_MARGIN:
        yield s.violation(
            "{fp8_margin} must be from -{most} to {most}: scales are divided by 2 to its power, in fp32.",
            most=MAX_FP8_MARGIN,
        )
    if not s.first_last_layers_bf16:
        return
    for dest in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= getattr(s, dest) <= (s.num_layers or 0):
            yield s.violation("{} must be from 0 to {num_layers}.", dest)


def check_custom_recipe(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for flags in FLAGS:
        if getattr(s, flags.name) and selected(s, flags).is_custom and not getattr(s, flags.factory):
            yield s.violation("{:shown} needs {:flag}.", flags.recipe, flags.factory)


def limit_custom_recipe(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for fmt, rejected in rejecting(QUANTIZED, FormatCapability.PRECISION_FILE):
        yield Limit(
            quantized_format(s) is fmt and s.te_precision_config_file is not None,
            f"{{te_precision_config_file:flag}} cannot be combined with {fmt.mention}: {rejected.reason}.",
            (fmt.flags.recipe,),
        )


def check_fp8_output_proj(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    fmt = quantized_format(s)
    if s.fp8_output_proj and (fmt is None or fmt.rejects(FormatCapability.OUTPUT_LAYER)):
        yield s.violation("{fp8_output_proj} needs {fp8:flag} and {fp8_recipe:flag} mxfp8.")


def check_quantized_param_gather(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for flags in FLAGS:
        gather = flags.param_gather
        if not getattr(s, gather):
            continue
        if not getattr(s, flags.name):
            yield s.violation("{:flag} needs {:flag}.", gather, flags.name)
        if get_sharding(s).rejects(ShardingCapability.QUANTIZED_GATHER):
            yield s.violation(
                "{:flag} needs {use_distributed_optimizer:flag}: only a sharded optimizer gathers parameters.", gather
            )


def check_grad_buffer_reuse(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.reuse_grad_buf_for_mxfp8_param_ag and not s.fp8_param_gather:
        yield s.violation(
            "{reuse_grad_buf_for_mxfp8_param_ag} needs {fp8_param_gather:flag}: that is what would use the buffer."
        )


def check_precision_aware_optimizer(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.use_precision_aware_optimizer:
        if get_optimizer(s).rejects(OptimizerCapability.STATE_FORMATS):
            yield s.violation(
                "{use_precision_aware_optimizer} needs {optimizer:flag} {accepted}, not {optimizer:value}.",
                accepted=" and ".join(keys_with(OPTIMIZERS, OptimizerCapability.STATE_FORMATS)),
            )
        return
    for dest in NARROW_STATE:
        if getattr(s, dest) != "fp32":
            yield s.violation("{} needs {use_precision_aware_optimizer:flag}.", dest)


def limit_fsdp_dtypes(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """Fully sharded parameters are the fp32 main parameters, and torch accumulates their gradients in fp32."""
    for capability, dests, text in (
        (
            ShardingCapability.MAIN_FORMATS,
            ("main_params_dtype", "main_grads_dtype"),
            "{} cannot be combined with {:flag}, whose shards and their gradients are fp32.",
        ),
        (
            ShardingCapability.FP32_SUMS,
            ("ddp_param_name_patterns_for_fp32_local_accumulation", "ddp_reduce_scatter_with_fp32_accumulation"),
            "{:flag} cannot be combined with {:flag}, which reduces its gradients itself.",
        ),
    ):
        for parent, is_rejected in rejections(s, capability):
            for dest in dests:
                yield Limit(is_rejected and s.values[dest] != s.default(dest), text, (dest, parent))


def limit_state_offload(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.optimizer_cpu_offload and s.chunked_optimizer_state_offload,
        "Use only one of {optimizer_cpu_offload} (the host updates its share) and {chunked_optimizer_state_offload} "
        "(the device does).",
    )


def check_half_precision_features(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.fp16_lm_cross_entropy and not s.fp16:
        yield s.violation("{fp16_lm_cross_entropy} needs {fp16:flag}.")
    if s.fp32_residual_connection and not (s.fp16 or s.bf16):
        yield s.violation(
            "{fp32_residual_connection} needs {bf16:flag} or {fp16:flag}: without them everything is fp32 already."
        )


def check_loss_scale(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.fp16 and s.loss_scale is None and s.min_loss_scale > s.initial_loss_scale:
        yield s.violation("{min_loss_scale} must be at most {initial_loss_scale}.")


def check_deterministic_mode(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("cross_entropy_loss_fusion", "tp_comm_overlap"):
        if s.deterministic_mode and getattr(s, dest):
            yield s.violation(
                "{deterministic_mode} cannot be combined with {:flag}, whose sums depend on timing.", dest
            )
