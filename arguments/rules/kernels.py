"""Ours: kernels that are named and that nothing of this command line runs on. Only flags are looked at; layers/kit.py tells the rest."""

from collections.abc import Iterator

from arguments.rules.facts import Facts, balancing_types, broken
from arguments.settings import Settings, Violation

TRITON = "triton_kernels"


def named_kernels_that_nothing_runs_on(s: Settings, f: Facts) -> None:
    """A line for each; `all` names none of them."""
    if "all" in s.triton_kernels or "none" in s.triton_kernels:
        return
    for name in dict.fromkeys(s.triton_kernels):
        why = _why_not(name, s, f)
        if why:
            s.say_idle(f"{s.flag(TRITON)} {name}", why)


def _why_not(name: str, s: Settings, f: Facts) -> str | None:
    quantised = s.fp8 or s.fp4
    if name in ("permute", "router", "grouped-gemm") and f.experts is None:
        return "no effect without --num-experts"
    if name == "grouped-gemm" and not s.moe_grouped_gemm:
        return "no effect without --moe-grouped-gemm"
    if name == "grouped-gemm" and quantised and not s.first_last_layers_bf16 and s.te_precision_config_file is None:
        return f"the experts' products are quantised ({s.shown('fp8' if s.fp8 else 'fp4')})"
    if name == "quantize" and not quantised:
        return "no effect without --fp8-format or --fp4-format"
    if name == "router" and balancing_types(s) in (["sinkhorn"], ["quantile_balancing"]) and not s.moe_z_loss_coeff:  # that loss has a kernel
        return f"there is no kernel for {s.flag('moe_router_load_balancing_type')} {balancing_types(s)[0]}"
    if name == "permute" and _hybridep_permutes(s, f):
        return "HybridEP sorts tokens itself"
    if name == "delta-rule" and s.experimental_attention_variant not in ("gdn", "gdn2"):
        return "no effect without --experimental-attention-variant gated_delta_net"
    if name == "sparse-attention" and s.experimental_attention_variant != "dsa":
        return "no effect without --experimental-attention-variant dsa"
    if name == "norm" and s.normalization != "RMSNorm" and not s.qk_l2_norm:
        return f"there is no kernel for --normalization {s.normalization}"
    return None


def _hybridep_permutes(s: Settings, f: Facts) -> bool:
    return s.moe_token_dispatcher_type == "flex" and s.moe_flex_dispatcher_backend == "hybridep" and f.ep * f.etp > 1


def fused_permutation_beside_hybridep(s: Settings, f: Facts) -> None:
    if s.moe_permute_fusion and f.experts is not None and _hybridep_permutes(s, f):
        s.note(f"{s.flag('moe_permute_fusion')}: HybridEP sorts tokens itself, and nothing is left for the fused kernels.")


def none_among_others(s: Settings, f: Facts) -> Iterator[Violation]:
    if "none" in s.triton_kernels and set(s.triton_kernels) != {"none"}:
        yield broken(s, f"{s.shown(TRITON)} cannot be combined: none stands alone; drop it, or the others.", TRITON)


RESOLVE = (named_kernels_that_nothing_runs_on, fused_permutation_beside_hybridep)
CHECKS = (none_among_others,)
