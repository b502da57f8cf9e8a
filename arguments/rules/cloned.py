"""Clones of hot experts (ours): how many, and the formats of weights that can be copied."""

from collections.abc import Iterator

from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Limit, Settings, Violation
from arguments.stored_weights import stored_weight_format


def note_no_cloning_without_ep(s: Settings, f: DerivedSizes) -> None:
    if s.moe_clone_hot_experts and f.experts is not None and f.ep == 1:
        s.note(f"{s.shown('moe_clone_hot_experts')}: with --expert-model-parallel-size 1 there is no load to balance.")


def check_clone_count(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not s.moe_clone_hot_experts or f.experts is None or f.ep == 1 or f.experts % f.ep:
        return
    others = f.experts - f.experts // f.ep
    if s.moe_clone_hot_experts > others:
        yield s.violation(
            "{moe_clone_hot_experts} is more than the {others} experts of other ranks ({num_experts}, "
            "{expert_model_parallel_size}).",
            others=others,
        )


def limit_hot_expert_cloning(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        s.moe_clone_hot_experts and f.experts is None,
        "{moe_clone_hot_experts:flag} needs {num_experts:flag}: a dense model has no experts to clone.",
    )
    yield Limit(
        s.moe_clone_hot_experts and s.fp8 and s.fp8_recipe == "delayed",
        "{moe_clone_hot_experts:flag} cannot be combined with {fp8_recipe:flag} delayed: delayed scaling keeps one "
        "scale for all experts of a rank, which would then depend on the plan; use another recipe.",
    )
    for dest, stored in (
        ("fp8_param_gather", "fp8"),
        ("reuse_grad_buf_for_mxfp8_param_ag", "mxfp8"),
        ("fp4_param_gather", "nvfp4"),
    ):
        yield Limit(
            s.moe_clone_hot_experts and stored_weight_format(s, s) == stored,
            "{moe_clone_hot_experts:flag} cannot be combined with {:flag}: clones are copies of weights in the model's "
            "format, which are not stored then.",
            (dest,),
        )
