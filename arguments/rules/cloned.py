"""Clones of hot experts (ours): how many, and the formats of weights that can be copied."""

from collections.abc import Iterator

from arguments.mechanisms.formats import QUANTIZED, STORING_FLAGS, quantized_format
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
    for fmt in (each for each in QUANTIZED if each.keeps_scales):
        yield Limit(
            s.moe_clone_hot_experts and quantized_format(s) is fmt,
            f"{{moe_clone_hot_experts:flag}} cannot be combined with {fmt.mention}: {fmt.key} scaling keeps one scale "
            "for all experts of a rank, which would then depend on the plan; use another recipe.",
        )
    stored = stored_weight_format(s, s)
    for dest in STORING_FLAGS:
        yield Limit(
            s.moe_clone_hot_experts and stored is not None and stored.flag == dest,
            "{moe_clone_hot_experts:flag} cannot be combined with {:flag}: clones are copies of weights in the model's "
            "format, which are not stored then.",
            (dest,),
        )
