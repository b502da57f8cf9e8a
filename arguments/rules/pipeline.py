"""How decoder layers are divided among pipeline stages and virtual stages."""

from collections.abc import Iterator

from arguments.layer_pattern import STAGE
from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE, ScheduleCapability
from arguments.mechanisms.schedules import SCHEDULES, asked_schedule, get_schedule
from arguments.mechanisms.support import keys_with, rejecting
from arguments.megatron_differences import middle_layers_per_rank
from arguments.rules.derived_sizes import DerivedSizes, divides, positive, quotient, uneven_ends
from arguments.rules.layout_grammar import problems, read_layout
from arguments.settings import Limit, Settings, Violation

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT, PATTERN = "pipeline_model_parallel_layout", "hybrid_layer_pattern"
PER_VIRTUAL, VIRTUAL = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
PP = "pipeline_model_parallel_size"
_STAGES = f"{STAGE} in "


def layout_flag(s: Settings) -> str:
    """Return the flag that a layout comes from, by destination: its own, or that of a pattern with stages (|)."""
    return PATTERN if s.source[LAYOUT] == "derived" and STAGE in (s.hybrid_layer_pattern or "") else LAYOUT


def _virtual_flags(s: Settings) -> list[str]:
    """Return the flags that decide the number of virtual stages, by destination; the first one does."""
    found = [dest for dest in (LAYOUT, VIRTUAL, PER_VIRTUAL) if getattr(s, dest) is not None]
    return [layout_flag(s) if dest == LAYOUT else dest for dest in found]


# Derived values.


def resolve_p2p_overlap(s: Settings, f: DerivedSizes) -> None:
    """Turn overlap off without virtual stages: stage-to-stage messages have nothing to overlap with."""
    if f.vpp is not None:
        return
    if f.pp > 1 and (s.overlap_p2p_comm or s.align_param_gather):
        s.note("No virtual pipeline stages: overlap of stage-to-stage messages and aligned parameter gathers are off.")
    s.set_derived("overlap_p2p_comm", False, "no virtual pipeline stages")
    s.set_derived("align_param_gather", False, "no virtual pipeline stages")


def resolve_mtp_standalone(s: Settings, f: DerivedSizes) -> None:
    if f.layout is not None and f.layout.mtp_standalone(f.pp):
        s.set_derived("mtp_standalone", True, "the layout puts MTP layers on another rank than the last one")


def note_deferred_head(s: Settings, _f: DerivedSizes) -> None:
    """Note where the weight gradient of the output layer is deferred with those of all layers."""
    if not s.defer_embedding_wgrad_compute:
        return
    overlaps = ("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
    others = [s.flag(dest) for dest in overlaps if getattr(s, dest)]
    if get_schedule(s).ignores(ScheduleCapability.HEAD_WGRAD):
        others = [s.shown(PIPELINE_SCHEDULE)]
    if others:
        reason = f"{' and '.join(others)} defers the weight gradients of all layers"
        s.note_no_effect(s.flag("defer_embedding_wgrad_compute"), reason)


# Checks.


def check_layers_per_stage(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if uneven_ends(s) or getattr(s, LAYOUT) is not None or divides(f.pp, f.layers_split):
        return
    extra = [s.flag(dest) for dest in ACCOUNT if getattr(s, dest)]
    counted = f" (+{len(extra)} for {' and '.join(extra)})" if extra else ""
    yield s.violation(
        "{num_layers}{counted} must be a multiple of {pipeline_model_parallel_size}; for uneven stages use {first}"
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout.",
        *(dest for dest in ACCOUNT if getattr(s, dest)),
        counted=counted,
        first=f"{_STAGES}{s.flag(PATTERN)}, " if s.hybrid_layer_pattern else "",
    )


def check_one_virtual_stage_flag(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    given = _virtual_flags(s)[::-1]
    if len(given) > 1:
        shown = " and ".join((_STAGES if dest == PATTERN else "") + s.describe(dest) for dest in given)
        yield s.violation(
            "Use only one of {shown}: each of them decides the number of virtual stages.", *given, shown=shown
        )


def check_virtual_sizes(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in (PER_VIRTUAL, VIRTUAL, "microbatch_group_size_per_vp_stage"):
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield s.violation("{} must be at least 1.", dest)


def check_layers_per_virtual_stage(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    per_stage = getattr(s, PER_VIRTUAL)
    per_rank = middle_layers_per_rank(s, f) if uneven_ends(s) else quotient(f.layers_split, f.pp)
    if not divides(per_stage, per_rank):
        yield s.violation(
            "{num_layers_per_virtual_pipeline_stage} must divide the {per_rank} layers of a pipeline rank "
            "({num_layers}, {pipeline_model_parallel_size}).",
            per_rank=per_rank,
        )


def check_virtual_stages(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    per_rank = quotient(f.layers_split, f.pp)
    if getattr(s, LAYOUT) is None and not uneven_ends(s) and not divides(getattr(s, VIRTUAL), per_rank):
        yield s.violation(
            "{num_virtual_stages_per_pipeline_rank} must divide the {per_rank} layers of a pipeline rank "
            "({num_layers}, {pipeline_model_parallel_size}).",
            per_rank=per_rank,
        )


def check_interleaving_stages(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.vpp is None:
        return
    cause = _virtual_flags(s)[0]
    if f.pp == 1 and cause != PATTERN:  # see hybrid.check_pattern_stages
        yield s.violation(
            "{} makes {vpp} virtual stages, which needs {pipeline_model_parallel_size:flag} above 1: interleaving "
            "reduces the bubble between pipeline ranks.",
            cause,
            vpp=f.vpp,
        )
    elif f.pp == 2 and not s.overlap_p2p_comm:
        yield s.violation(
            "{} with {overlap_p2p_comm} needs {pipeline_model_parallel_size:flag} above 2: with two ranks both "
            "directions would wait for each other.",
            cause,
        )


def check_end_stages(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    for dest in (FIRST, LAST):
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield s.violation("{} must be at least 1.", dest)
        elif not divides(f.vpp, value):
            yield s.violation(
                "{} must be a multiple of the {vpp} virtual stages per pipeline rank: every chunk of a rank holds the "
                "same number of layers.",
                dest,
                *(d for d in (VIRTUAL, PER_VIRTUAL) if s.given(d)),
                vpp=f.vpp,
            )


def check_middle_stages(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    ends = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    if not ends or f.layers is None or not all(positive(getattr(s, dest)) for dest in ends):
        return
    shown = " and ".join(s.describe(dest) for dest in ends)
    rest, ranks = f.layers - sum(getattr(s, dest) for dest in ends), f.pp - len(ends)
    if ranks < 0:
        yield s.violation(
            "{shown} need {count} pipeline ranks; {pipeline_model_parallel_size}.", *ends, shown=shown, count=len(ends)
        )
    elif rest < 0 or (rest > 0 and ranks == 0):
        yield s.violation(
            "{shown} must add up to {num_layers} when there are no stages between.", *ends, PP, shown=shown
        )
    elif ranks and (rest == 0 or rest % ranks):
        yield s.violation(
            "{shown} leave {rest} of {num_layers} for {ranks} middle pipeline ranks, which does not divide evenly.",
            *ends,
            PP,
            shown=shown,
            rest=rest,
            ranks=ranks,
        )
    elif ranks and not divides(f.vpp, rest // ranks):
        yield s.violation(
            "{shown} leave {per_rank} layers on each middle pipeline rank, which must be a multiple of the {vpp} "
            "virtual stages.",
            *ends,
            *(d for d in (VIRTUAL, PER_VIRTUAL) if s.given(d)),
            shown=shown,
            per_rank=rest // ranks,
            vpp=f.vpp,
        )


def check_ends_exclude_accounting(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    ends = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    counted = [dest for dest in ACCOUNT if getattr(s, dest)]
    if ends and counted:
        yield s.violation(
            "{} cannot be combined with {:flag}: both set how many layers the end stages hold.",
            ends[0],
            counted[0],
            *counted,
        )


def check_layout_conflicts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    others = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    others += [dest for dest in ACCOUNT if getattr(s, dest)]
    if getattr(s, LAYOUT) is not None and others:
        yield s.violation(
            "{stages}{} cannot be combined with {flags}: the layout already places every layer.",
            layout_flag(s),
            *others,
            stages=_STAGES if layout_flag(s) == PATTERN else "",
            flags=", ".join(s.describe(dest) for dest in others),
        )


def check_layout_syntax(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if getattr(s, LAYOUT) is None:
        return
    try:
        read_layout(getattr(s, LAYOUT))
    except ValueError as error:
        yield s.violation("{pipeline_model_parallel_layout}: {error}.", error=error)


def check_layout_fits_model(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.layout is None or layout_flag(s) == PATTERN:
        return
    related = {"stages, which": PP, "decoder layers": "num_layers", "MTP": "mtp_num_layers"}
    for clause in problems(f.layout, f.pp, f.layers, f.mtp_depths):
        others = [dest for word, dest in related.items() if word in clause]
        yield s.violation("{pipeline_model_parallel_layout} {clause}.", *others, clause=clause)


def check_microbatch_groups(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    group = s.microbatch_group_size_per_vp_stage
    count = None
    if f.dp is not None and positive(s.micro_batch_size):
        count = quotient(s.global_batch_size, s.micro_batch_size * f.dp)
    if f.vpp is None or f.pp == 1 or count is None or not positive(group):
        return
    if count < f.pp and not s.given("microbatch_group_size_per_vp_stage"):
        yield s.violation(
            "{} makes {vpp} virtual stages per pipeline rank, which needs at least as many microbatches in an "
            "iteration as pipeline ranks ({pipeline_model_parallel_size}), not {count}. Change {global_batch_size}.",
            _virtual_flags(s)[0],
            vpp=f.vpp,
            count=count,
        )
    elif not f.pp <= group <= count:
        yield s.violation(
            "{microbatch_group_size_per_vp_stage} must be between {pipeline_model_parallel_size} and the {count} "
            "microbatches of an iteration ({global_batch_size} / ({micro_batch_size} * {dp} data ranks)).",
            count=count,
            dp=f.dp,
        )
    elif 0 < count % group < f.pp:
        yield s.violation(
            "An iteration has {count} microbatches; in groups of {group} ({microbatch_group_size_per_vp_stage:flag}) "
            "{num_left} are left over, which must be none or at least {pipeline_model_parallel_size}. Change "
            "{global_batch_size}.",
            count=count,
            group=group,
            num_left=count % group,
        )


def limit_pipeline_schedule(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    asked, virtual = asked_schedule(s), ScheduleCapability.VIRTUAL_STAGES
    for schedule, _ in rejecting(SCHEDULES, virtual):
        for cause in (LAYOUT, VIRTUAL, PER_VIRTUAL, PATTERN):
            yield Limit(
                schedule is asked and f.vpp is not None and cause in _virtual_flags(s),
                f"{schedule.mention} cannot run the virtual stages that {{}} makes; choose "
                f"{' or '.join(keys_with(SCHEDULES, virtual))}.",
                (cause,),
            )
    for schedule in (each for each in SCHEDULES if each.needs_virtual_stages):
        yield Limit(
            schedule is asked and f.vpp is None,
            f"{schedule.mention} needs virtual stages: {{num_virtual_stages_per_pipeline_rank:flag}} above 1, "
            "--num-layers-per-virtual-pipeline-stage or --pipeline-model-parallel-layout.",
        )
    for other, capability in (
        ("overlap_moe_expert_parallel_comm", ScheduleCapability.EXCHANGE_OVERLAP),
        ("overlap_dispatch_backward_with_experts_wgrad", ScheduleCapability.WGRAD_OVERLAP),
    ):
        for schedule, rejected in rejecting(SCHEDULES, capability):
            yield Limit(
                schedule is asked and getattr(s, other),
                f"{schedule.mention} cannot be combined with {{:flag}}: {rejected.reason}.",
                (other,),
            )
