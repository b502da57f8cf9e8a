"""Ours: --triton-kernels that nothing uses under these flags. layers/layer_factory.py reports the other cases."""

from collections.abc import Iterator

from arguments.layer_pattern import variants_of
from arguments.mechanisms.dispatchers import DispatcherCapability, get_dispatcher
from arguments.mechanisms.formats import FLAGS, quantized_format
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import get_selection
from arguments.mechanisms.sublayers import SUBLAYERS, VARIANT, relative_of
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Settings, Violation

TRITON = "triton_kernels"


def note_unused_kernels(s: Settings, f: DerivedSizes) -> None:
    """A line for each; `all` names none of them."""
    if "all" in s.triton_kernels or "none" in s.triton_kernels:
        return
    for name in dict.fromkeys(s.triton_kernels):
        why = _unused_reason(name, s, f)
        if why:
            s.note_no_effect(f"{s.flag(TRITON)} {name}", why)


def _unused_reason(name: str, s: Settings, f: DerivedSizes) -> str | None:
    quantised = quantized_format(s)
    of_experts = name in ("expert-wgrad", "grouped-gemm")
    if (of_experts or name in ("permute", "router")) and f.experts is None:
        return "without --num-experts"
    if of_experts and not s.moe_grouped_gemm:
        return "without --moe-grouped-gemm"
    if name == "expert-wgrad" and not s.gradient_accumulation_fusion:
        return "without --gradient-accumulation-fusion"
    if of_experts and quantised and not s.first_last_layers_bf16 and s.te_precision_config_file is None:
        return f"the experts' GEMMs are quantized ({s.shown(quantised.flags.name)})"
    if name == "quantize" and not quantised:
        return f"without {' or '.join(s.flag(flags.name) for flags in FLAGS)}"
    selection = get_selection(s)
    has_kernel = s.moe_z_loss_coeff is not None or not selection.ignores(SelectionCapability.OUR_KERNEL)
    if name == "router" and not has_kernel:
        return f"there is no kernel for {s.words(selection.mention)}"
    if name == "permute" and (reason := _unused_permutation_reason(s, f)):
        return reason
    of_sublayers = {each.kernel: each for each in SUBLAYERS if each.kernel}
    if name in of_sublayers and name not in {each.kernel for each in (relative_of(s), *variants_of(s))}:
        return f"without {s.flag(VARIANT)} {of_sublayers[name].variant}"
    if name == "paged-stash" and not s.moe_paged_stash:
        return "without --moe-paged-stash"
    if name == "norm" and s.normalization != "RMSNorm" and not s.qk_l2_norm:
        return f"there is no kernel for --normalization {s.normalization}"
    return None


def _unused_permutation_reason(s: Settings, f: DerivedSizes) -> str:
    return get_dispatcher(s).reason(DispatcherCapability.PERMUTATION_KERNELS) if f.ep * f.etp > 1 else ""


def note_permute_fusion_with_library(s: Settings, f: DerivedSizes) -> None:
    if s.moe_permute_fusion and f.experts is not None and (reason := _unused_permutation_reason(s, f)):
        s.note(f"{s.flag('moe_permute_fusion')}: {reason}, so the fused kernels have no effect.")


def check_none_alone(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if "none" in s.triton_kernels and set(s.triton_kernels) != {"none"}:
        yield s.violation(
            "{triton_kernels:shown} cannot be combined: none excludes the others; remove it, or the others."
        )
