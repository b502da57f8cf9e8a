"""Hybrid models: layers of one sublayer each (--hybrid-layer-pattern)."""

from collections.abc import Iterator

from arguments.layer_pattern import ATTENTION, DEPTH, MAMBA, MLP, MOE, STAGE, hybrid_letters
from arguments.rules.derived_sizes import DerivedSizes, divides, positive
from arguments.settings import Limit, Settings, Violation

UPSTREAM_ONLY = "GD+"
"""Letters of Megatron-LM for gated DeltaNet, sparse attention and latent attention."""
LETTERS = MAMBA + ATTENTION + MLP + MOE


# Derived values.


def resolve_old_pattern_name(s: Settings, _f: DerivedSizes) -> None:
    if s.hybrid_override_pattern is not None and s.hybrid_layer_pattern is None:
        s.set_derived("hybrid_layer_pattern", s.hybrid_override_pattern, "from --hybrid-override-pattern")


def resolve_hybrid_layers(s: Settings, _f: DerivedSizes) -> None:
    pattern = s.hybrid_layer_pattern
    if not pattern or not hybrid_letters(pattern):
        return
    letters = hybrid_letters(pattern)
    if s.num_layers not in (None, len(letters)):
        s.note(f"{s.shown('num_layers')}: the {len(letters)} layers of --hybrid-layer-pattern are taken.")
    s.set_derived("num_layers", len(letters), "the letters of --hybrid-layer-pattern")
    if MOE in letters:
        s.set_derived("moe_layer_freq", [int(letter == MOE) for letter in letters], "E of --hybrid-layer-pattern")
    stages = pattern.partition(DEPTH)[0].split(STAGE)
    if len(stages) > 1 and s.pipeline_model_parallel_layout is None:
        layout = "|".join("t" * len(stage) for stage in stages)
        s.set_derived("pipeline_model_parallel_layout", f"E{layout}L", "from | of --hybrid-layer-pattern")


# Checks.


def check_hybrid_pattern(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    pattern, old = s.hybrid_layer_pattern, s.hybrid_override_pattern
    if pattern is None:
        return
    if old is not None and old != pattern:
        yield s.violation("{hybrid_override_pattern} is the old name of {hybrid_layer_pattern}: give the second one.")
    letters = hybrid_letters(pattern)
    unknown = sorted(set(letters) - set(LETTERS + UPSTREAM_ONLY))
    if unknown or not letters:
        yield s.violation(
            "{hybrid_layer_pattern} must have one letter per layer: M (Mamba-2), * (attention), - (feed-forward) or E "
            "(experts), and | between pipeline stages."
        )
    if MOE in letters and not s.num_experts:
        yield s.violation("{hybrid_layer_pattern} has layers of experts (E): it needs {num_experts:flag}.")
    if s.num_experts and MOE not in letters:
        yield s.violation("{hybrid_layer_pattern} has no layer of experts (E), but {num_experts} is given.")
    if MAMBA in letters:
        yield from _head_problems(s, f)
        low, high = s.mamba_step_size_min, s.mamba_step_size_max
        if low is not None and high is not None and low >= high:
            yield s.violation("{mamba_step_size_min} must be below {mamba_step_size_max}.")


def _head_problems(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if not all(map(positive, (s.hidden_size, s.mamba_head_dim, s.mamba_num_groups))):
        return
    heads = s.mamba_num_heads
    if heads is None:
        if 2 * s.hidden_size % s.mamba_head_dim:
            yield s.violation(
                "2 * {hidden_size:value} channels of {hidden_size:flag} must be a multiple of {mamba_head_dim}, or "
                "{mamba_num_heads:flag} be given."
            )
            return
        heads = 2 * s.hidden_size // s.mamba_head_dim
    if not divides(s.mamba_num_groups, heads):
        yield s.violation("{mamba_num_groups} must divide the {heads} heads of a Mamba layer.", heads=heads)
    if not divides(f.tp * f.largest_cp, s.mamba_num_groups):
        yield s.violation(
            "{mamba_num_groups} must be a multiple of {ranks} ({tensor_model_parallel_size} * {cp} context-parallel "
            "ranks).",
            "context_parallel_size",
            ranks=f.tp * f.largest_cp,
            cp=f.largest_cp,
        )


def limit_hybrid_layers(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """List what layers of one sublayer are not built for."""
    pattern = s.hybrid_layer_pattern or ""
    yield Limit(
        set(hybrid_letters(pattern)) & set(UPSTREAM_ONLY),
        "{hybrid_layer_pattern:flag} cannot have the letters G (gated DeltaNet), D (sparse attention) and + (latent "
        "attention): only M, *, - and E are built.",
    )
    yield Limit(
        DEPTH in pattern or (pattern and s.mtp_num_layers),
        "{hybrid_layer_pattern:flag} cannot be combined with multi-token prediction (/ or --mtp-num-layers), whose "
        "depths have several layers there.",
    )
    reasons = (
        ("multi_latent_attention", "* is grouped-query attention"),
        ("experimental_attention_variant", "* is softmax attention"),
        ("overlap_moe_expert_parallel_comm", "it interleaves layers of two sublayers"),
        ("apply_residual_connection_post_layernorm", "a layer has one norm and one residual"),
        ("post_self_attn_layernorm", "a layer has one norm and one residual"),
        ("post_mlp_layernorm", "a layer has one norm and one residual"),
        ("fp8", "Mamba layers are computed in high precision only"),
        ("fp4", "Mamba layers are computed in high precision only"),
        ("fine_grained_activation_offloading", "single parts are not offloaded"),
        ("use_mup", "nothing scales the parameters of Mamba layers"),
        ("moe_use_upcycling", "there is no dense model of such layers"),
    )
    for dest, reason in reasons:
        yield Limit(
            pattern and getattr(s, dest),
            "{hybrid_layer_pattern:flag} cannot be combined with {:flag}: " + reason + ".",
            (dest,),
        )
    yield Limit(
        pattern and s.recompute_granularity == "selective",
        "{hybrid_layer_pattern:flag} cannot be combined with {recompute_granularity:flag} selective: single parts of "
        "a layer are not recomputed; full layers are.",
    )
    yield Limit(
        pattern and s.cuda_graph_impl != "none",
        "{hybrid_layer_pattern:flag} cannot be combined with {cuda_graph_impl:flag}: Mamba layers are not captured.",
    )
    yield Limit(
        pattern and s.optimizer == "muon",
        "{hybrid_layer_pattern:flag} cannot be combined with {optimizer:flag} muon: the projections of a Mamba layer "
        "are one matrix.",
    )
