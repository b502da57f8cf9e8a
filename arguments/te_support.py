"""Which GEMMs Transformer Engine can compute, as far as flags tell, for the layer factory and memory plans.

Otherwise this program's own layers compute them. What the package, the device and the
widths allow is checked where they are known (layers/te.py, layers/te_layers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.moe import MoEArgs
    from arguments.precision import PrecisionArgs


def recipe_problem(precision: PrecisionArgs, replaces_weights: bool) -> str | None:
    """Return why it cannot compute quantized GEMMs; None if it can, or if none are requested.

    `replaces_weights`: Arguments.replaces_te_weights.
    """
    if not precision.fp8 and not precision.fp4:
        return None
    if replaces_weights:
        return "it would keep their weights in bf16 (--fp4-param-gather)"
    if precision.te_precision_config_file is not None:
        return "it has one recipe, and these layers have several (--te-precision-config-file)"
    if precision.fp8 and precision.fp8_recipe == "delayed":
        return (
            "it updates delayed scales with every microbatch and does not save them; here they are updated once per "
            "iteration, equal for every mapping and with recompute, and saved in checkpoints"
        )
    if precision.fp8 and not precision.fp8_wgrad:
        return "it has no gradients of weights in high precision (--no-fp8-wgrad)"
    return None


def experts_problem(moe: MoEArgs, ep: int) -> str | None:
    """Return why it cannot compute the experts with this expert parallelism, None if it can."""
    if moe.moe_clone_hot_experts and ep > 1:
        return "its number of experts is fixed, and that of clones changes (--moe-clone-hot-experts)"
    if moe.moe_paged_stash:
        return "the tensors that it saves for backward cannot be stored in pages (--moe-paged-stash)"
    return None


def leaves_counts_on_device(moe: MoEArgs, precision: PrecisionArgs, typed: frozenset[str]) -> bool:
    """Return whether quantized experts are not its own because theirs read token counts on the host.

    A budget for received tokens can do without these. With the flag on the command line they are its own all the same.
    """
    return (
        moe.moe_expert_rank_capacity_factor is not None
        and precision.params_dtype_name == "bf16"
        and not moe.moe_permute_fusion_into_hybridep
        and "transformer_impl" not in typed
    )


def te_quantizes(args: Arguments) -> tuple[bool, bool]:
    """Return whether it computes quantized GEMMs of (linears, experts), if it can be used at all."""
    precision, moe = args.precision, args.moe
    fits = bool(precision.fp8 or precision.fp4) and precision.transformer_impl == "transformer_engine"
    fits = fits and recipe_problem(precision, args.replaces_te_weights) is None
    experts = (
        fits
        and bool(moe.num_experts)
        and moe.moe_grouped_gemm
        and experts_problem(moe, args.parallel.expert_model_parallel_size) is None
        and not leaves_counts_on_device(moe, precision, args.typed)
    )
    return fits and not args.parallel.has_deferred_wgrad, experts
