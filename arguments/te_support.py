"""What TransformerEngine can compute, as far as flags determine it: for notes, the layer factory and plans.

Otherwise this program's own layers compute them. What the package, the device and the widths allow is checked where
they are known (layers/te.py, layers/te_layers.py). Sections are read by their fields, so that rules can pass settings
in place of all of them.
"""

from collections.abc import Collection
from typing import Any

from arguments.mechanisms.dispatchers import DispatcherCapability, get_dispatcher
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import quantized_format, quantizes_weight_gradients
from arguments.mechanisms.implementation_kinds.declaration import IMPLEMENTATION
from arguments.mechanisms.implementations import get_implementation
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import get_placement
from arguments.mechanisms.sublayers import variant_of


def recipe_problem(precision: Any, replaces_weights: bool) -> str | None:
    """Return why it cannot compute quantized GEMMs; None if it can, or if none are requested.

    Args:
        precision: has the fields of PrecisionArgs.
        replaces_weights: Arguments.replaces_te_weights.
    """
    fmt = quantized_format(precision)
    if fmt is None:
        return None
    if replaces_weights:
        return f"it would keep their weights in bf16 (--{fmt.flags.param_gather.replace('_', '-')})"
    if precision.te_precision_config_file is not None:
        return "it has one recipe, and these layers have several (--te-precision-config-file)"
    if problem := fmt.reason(FormatCapability.LIBRARY_GEMMS):
        return problem
    if not quantizes_weight_gradients(precision):
        return f"it has no gradients of weights in high precision (--no-{str(fmt.flags.wgrad).replace('_', '-')})"
    return None


def attention_problem(model: Any, params_dtype: str, cp_size: int) -> str | None:
    """Return why its attention cannot be used; None if it can.

    Under context parallelism only what all of its kinds of exchange support is used.

    Args:
        model: has the fields of ModelArgs.
        cp_size: context-parallel ranks.
    """
    if model.softmax_type != "vanilla":
        return f"attention sinks (--softmax-type {model.softmax_type}) are not used with it"
    if model.window_softmax_type not in (None, "vanilla"):
        return f"attention sinks (--window-softmax-type {model.window_softmax_type}) are not used with it"
    if model.value_width != model.kv_channels and not model.multi_latent_attention:
        return "values of another width (--value-channels) are not used with it"
    variant = variant_of(model)
    if variant.selects_keys:
        return f"it has no sparse attention ({variant.words})"
    if model.attention_chunk_size is not None:
        return "it has no chunks (--attention-chunk-size)"
    if cp_size == 1:
        return None
    what = {
        "attention in fp32": params_dtype not in ("bf16", "fp16"),
        "a window (--window-size)": model.window_size is not None,
        "keys and values of different widths (--multi-latent-attention)": model.multi_latent_attention,
        "dropout (--attention-dropout)": model.attention_dropout > 0.0,
    }
    found = [name for name, is_so in what.items() if is_so]
    return f"{found[0]} is not used with it under context parallelism" if found else None


def placement_problem(moe: Any, ep: int) -> str | None:
    """Return why it cannot compute the experts with this expert parallelism, None if it can."""
    return get_placement(moe, ep).reason(PlacementCapability.LIBRARY_EXPERTS) or None


def stash_problem(moe: Any, fused: bool, host_problem: str | None) -> str | None:
    """Return why what its experts save for backward cannot be stored in pages; None if it can, or without a stash.

    Args:
        fused: experts are a pipeline of its operations.
        host_problem: why the pipeline reads token counts on the host; None if it does not.
    """
    if not moe.moe_paged_stash:
        return None
    if not fused:
        return (
            "the tensors that it saves for backward cannot be stored in pages (--moe-paged-stash) without "
            "--use-transformer-engine-op-fuser"
        )
    if host_problem:
        return f"pages (--moe-paged-stash) are for experts that read token counts on the device: {host_problem}"
    return None


def can_quantize_linears(precision: Any, replaces_weights: bool) -> bool:
    """Return whether it computes the quantized GEMMs of linears; arguments as of `recipe_problem`."""
    is_requested = quantized_format(precision) is not None and get_implementation(precision).has_quantizers
    return is_requested and recipe_problem(precision, replaces_weights) is None


def can_quantize_experts(moe: Any, precision: Any, ep: int, *, replaces_weights: bool, fused: bool) -> bool:
    """Return whether it could compute the quantized GEMMs of experts, wherever their token counts are read.

    Args:
        fused: experts are a pipeline of its operations.
    """
    return (
        can_quantize_linears(precision, replaces_weights)
        and bool(moe.num_experts)
        and moe.moe_grouped_gemm
        and placement_problem(moe, ep) is None
        and stash_problem(moe, fused, fused_experts_problem(moe, precision)) is None
    )


def leaves_counts_on_device(
    moe: Any, precision: Any, *, typed: Collection[str], captured: Collection[str], fused: bool
) -> bool:
    """Return whether quantized experts are not its own because its GroupedLinear reads token counts on the host.

    A fixed receive buffer can do without these counts. With --transformer-impl on the command line the experts are its
    own all the same, unless a CUDA graph holds them: it cannot read on the host.

    Args:
        moe, precision: have the fields of MoEArgs and PrecisionArgs.
        typed: destinations of the flags on the command line.
        captured: TrainingArgs.captured_modules.
        fused: experts are a pipeline of its operations, which may read counts on the device.
    """
    return (
        moe.moe_expert_rank_capacity_factor is not None
        and bool(precision.bf16)
        and not moe.moe_permute_fusion_into_hybridep
        and not fused
        and (IMPLEMENTATION not in typed or has_captured_experts(captured))
    )


def fused_experts_problem(moe: Any, precision: Any) -> str | None:
    """Return why its fused experts (--use-transformer-engine-op-fuser) read token counts on the host on every device.

    Args:
        moe, precision: as of `leaves_counts_on_device`; quantized.
    """
    fmt = quantized_format(precision)
    if fmt is not None and (problem := fmt.reason(FormatCapability.DEVICE_COUNTS)):
        return problem
    dispatcher = get_dispatcher(moe)
    return (
        dispatcher.reason(DispatcherCapability.FUSED_EXPERTS)
        if dispatcher.ignores(DispatcherCapability.FUSED_EXPERTS)
        else None
    )


def has_captured_experts(captured: Collection[str]) -> bool:
    """Return whether a CUDA graph holds the experts.

    Args:
        captured: TrainingArgs.captured_modules.
    """
    return not {"moe", "layer", "iteration"}.isdisjoint(captured)
