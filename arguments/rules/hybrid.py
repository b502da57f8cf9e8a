"""Hybrid models: layers of one sublayer each (--hybrid-layer-pattern)."""

from collections.abc import Iterator

from arguments.layer_pattern import (
    ATTENTION,
    LATENT,
    MAMBA,
    MOE,
    STAGE,
    all_letters,
    hybrid_letters,
    letter_flags,
)
from arguments.mechanisms.sublayers import (
    BY_LETTER,
    LATENT_ATTENTION,
    LATENT_LETTERS,
    SOFTMAX_ATTENTION,
    VARIANT,
    VARIANT_LETTERS,
    list_letters,
)
from arguments.mtp import DEPTH, mtp_depths, mtp_letters
from arguments.rules.derived_sizes import DerivedSizes, divides, positive
from arguments.rules.layout_grammar import MTP
from arguments.rules.pipeline import PATTERN, layout_flag
from arguments.settings import Limit, Settings, Violation

LATER = "CHW[]"
"""Letters and brackets of patterns of a later Megatron-LM."""

# Derived values.


def resolve_old_pattern_name(s: Settings, _f: DerivedSizes) -> None:
    if s.hybrid_override_pattern is not None and s.hybrid_layer_pattern is None:
        s.set_derived("hybrid_layer_pattern", s.hybrid_override_pattern, "from --hybrid-override-pattern")


def resolve_old_mtp_pattern(s: Settings, _f: DerivedSizes) -> None:
    inside, pattern, depths = s.mtp_hybrid_override_pattern, s.hybrid_layer_pattern, s.mtp_num_layers or 0
    if inside is None:
        return
    if pattern is None:
        reason = "with transformer layers, the last of which multi-token prediction copies"
        s.note_no_effect(s.flag("mtp_hybrid_override_pattern"), reason)
        return
    if DEPTH in pattern and mtp_letters(pattern) != inside:
        s.note_no_effect(s.shown("mtp_hybrid_override_pattern"), "--hybrid-layer-pattern has the depths")
    else:
        s.note_renamed(s.flag("mtp_hybrid_override_pattern"), "--hybrid-layer-pattern with / before each depth")
    if DEPTH not in pattern and depths > 0:
        why = "from --mtp-hybrid-override-pattern"
        s.set_derived("hybrid_layer_pattern", pattern + DEPTH + DEPTH.join([inside] * depths), why)
    s.set_derived("mtp_hybrid_override_pattern", None, "--hybrid-layer-pattern has the depths")


def resolve_mtp_depths(s: Settings, _f: DerivedSizes) -> None:
    pattern = s.hybrid_layer_pattern
    if not pattern:
        return
    depths = len(mtp_depths(pattern))
    if DEPTH in pattern and not depths:
        s.note(f"{s.shown('hybrid_layer_pattern')}: no letter follows {DEPTH}, so there is no multi-token prediction.")
    if s.mtp_num_layers is not None and s.mtp_num_layers != depths:
        more = "" if depths else f" For a depth append {DEPTH} with its letters, as {_with_depth(pattern)}."
        s.note(
            f"{s.shown('mtp_num_layers')}: --hybrid-layer-pattern has {depths} (parts after /), which are taken.{more}"
        )
    if depths or s.mtp_num_layers:
        s.set_derived("mtp_num_layers", depths, "the depths of --hybrid-layer-pattern")


def _with_depth(pattern: str) -> str:
    """Return a pattern with a depth of multi-token prediction: its last two layers."""
    return f"'{pattern.rstrip(DEPTH)}{DEPTH}{hybrid_letters(pattern)[-2:]}'"


def resolve_hybrid_layers(s: Settings, _f: DerivedSizes) -> None:
    pattern = s.hybrid_layer_pattern
    if not pattern or not hybrid_letters(pattern):
        return
    letters = hybrid_letters(pattern)
    if s.num_layers not in (None, len(letters)):
        s.note(f"{s.shown('num_layers')}: the {len(letters)} layers of --hybrid-layer-pattern are taken.")
    s.set_derived("num_layers", len(letters), "the letters of --hybrid-layer-pattern")
    if MOE in all_letters(pattern):
        routed = [int(letter == MOE) for letter in letters]
        if s.given("moe_layer_freq") and s.moe_layer_freq != routed:
            s.note(f"{s.shown('moe_layer_freq')}: the letters E of --hybrid-layer-pattern are taken.")
        s.set_derived("moe_layer_freq", routed, "E of --hybrid-layer-pattern")
    stages = pattern.partition(DEPTH)[0].split(STAGE)
    if len(stages) > 1 and s.pipeline_model_parallel_layout is None:
        layout = "|".join("t" * len(stage) for stage in stages)
        ahead = MTP * len(mtp_depths(pattern))
        s.set_derived("pipeline_model_parallel_layout", f"E{layout}{ahead}L", "from | of --hybrid-layer-pattern")
    for dest, value in letter_flags(pattern, s.position_embedding_type).items():
        if dest == "position_embedding_type":
            latents = " and ".join(LATENT_LETTERS)
            s.note(f"{s.shown(dest)}: layers {latents} of --hybrid-layer-pattern rotate all the same, by --rope-type.")
        if dest != VARIANT or s.values[dest] is None:  # another one is rejected
            s.set_derived(dest, value, "the letters of --hybrid-layer-pattern")


def _has_latents(letters: str) -> bool:
    return any(BY_LETTER[letter].reads_latents for letter in letters if letter in BY_LETTER)


# Checks.


def check_hybrid_pattern(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    pattern, old = s.hybrid_layer_pattern, s.hybrid_override_pattern
    if pattern is None:
        return
    if old is not None and old != pattern:
        yield s.violation("{hybrid_override_pattern} is the old name of {hybrid_layer_pattern}: give the second one.")
    decoder, inside = hybrid_letters(pattern), mtp_letters(pattern)
    letters = decoder + inside.replace(STAGE, "")
    unknown = [*dict.fromkeys(letter for letter in letters if letter not in BY_LETTER and letter not in LATER)]
    if unknown or not decoder:
        yield s.violation(
            f"{{hybrid_layer_pattern}} must have one letter per layer{{unknown}}: {list_letters()}, {STAGE} between "
            f"pipeline stages, and {DEPTH} before each depth of multi-token prediction.",
            unknown=f", not {', '.join(map(repr, unknown))}" if unknown else " of the decoder",
        )
    other = next((depth for depth in mtp_depths(pattern) if depth != inside), None)
    if other is not None:
        yield s.violation(
            "{hybrid_layer_pattern} must repeat the layers of the first depth of multi-token prediction (after /) in "
            "every depth: that has {first!r}, and another one {other!r}.",
            first=inside,
            other=other,
        )
    if STAGE in pattern.partition(DEPTH)[0] and s.given("pipeline_model_parallel_layout"):
        yield s.violation(
            "{hybrid_layer_pattern} has pipeline stages (|): it cannot have those of {pipeline_model_parallel_layout} "
            "too."
        )
    if STAGE in inside:
        yield s.violation(
            "{hybrid_layer_pattern} must not have | in a depth of multi-token prediction (after /): all of its layers "
            "are on the last stage."
        )
    if ATTENTION in letters and _has_latents(letters):
        yield s.violation(
            f"{{hybrid_layer_pattern}} has both {ATTENTION} and latent attention ({' or '.join(LATENT_LETTERS)}): a "
            "model has one of them."
        )
    if MOE in letters and not s.num_experts:
        yield s.violation(f"{{hybrid_layer_pattern}} has layers of experts ({MOE}): it needs {{num_experts:flag}}.")
    if s.num_experts and MOE not in letters and not unknown and not set(LATER).intersection(letters):
        yield s.violation(
            f"{{hybrid_layer_pattern}} has no layer of experts ({MOE}), but {{num_experts}} is given: add {MOE}, or "
            "leave {num_experts:flag} out."
        )
    if MAMBA in letters:
        yield from _head_problems(s, f)
        low, high = s.mamba_step_size_min, s.mamba_step_size_max
        if low is not None and high is not None and low >= high:
            yield s.violation("{mamba_step_size_min} must be below {mamba_step_size_max}.")


def check_pattern_stages(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if layout_flag(s) != PATTERN:
        return
    stages = s.hybrid_layer_pattern.partition(DEPTH)[0].split(STAGE)
    count = len(stages)
    least = 2 if s.requests.get("overlap_p2p_comm", (True,))[0] else 3  # see pipeline.check_interleaving_stages
    fewer = [str(ranks) for ranks in range(least, count) if count % ranks == 0]
    if f.pp == count or str(f.pp) in fewer or (f.pp == 2 and divides(2, count)):
        return
    empty = [str(number) for number, letters in enumerate(stages, start=1) if not letters]
    yield s.violation(
        "{hybrid_layer_pattern} has {count} stages (|){empty}: {pipeline_model_parallel_size:flag} must be {count}"
        "{fewer}, not {ranks}.",
        count=count,
        empty=f", no layer in stage {' or '.join(empty)}" if empty else "",
        fewer=f", or {' or '.join(fewer)} with several stages per rank" if fewer else "",
        ranks=f.pp,
    )


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
        yield s.violation(
            "{mamba_num_groups} must divide the {heads} heads of a Mamba layer ({source}).",
            heads=heads,
            source="--mamba-num-heads" if s.mamba_num_heads else "2 x --hidden-size / --mamba-head-dim",
        )
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
    letters = all_letters(pattern)
    yield Limit(
        set(LATER).intersection(letters),
        "{hybrid_layer_pattern:flag} with C, H, W or groups in [ ], which a later Megatron-LM has, is not implemented "
        "yet.",
    )
    yield Limit(
        pattern and s.multi_latent_attention and not _has_latents(letters),
        f"{{hybrid_layer_pattern:flag}} cannot be combined with {{multi_latent_attention:flag}}: {ATTENTION} is "
        f"{SOFTMAX_ATTENTION.name}, {LATENT} {LATENT_ATTENTION.name}.",
    )
    yield Limit(
        pattern and s.values[VARIANT] != letter_flags(pattern, None).get(VARIANT),
        f"{{hybrid_layer_pattern:flag}} cannot be combined with {{{VARIANT}:flag}}: its letters "
        f"{' and '.join(VARIANT_LETTERS)} select {' and '.join(map(str, VARIANT_LETTERS.values()))}.",
    )
