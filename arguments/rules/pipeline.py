"""Rules 21-32: how decoder layers are divided among pipeline stages and virtual stages."""

from collections.abc import Iterator

from arguments.rules.facts import Facts, broken, divides, positive, quotient, say, uneven_ends
from arguments.rules.kinder import middle_layers_per_rank
from arguments.rules.layout_grammar import problems, read_layout
from arguments.settings import Settings, Violation

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"
PER_VIRTUAL, VIRTUAL = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
PP = "pipeline_model_parallel_size"


# Derived and normalised values.


def no_interleaving_no_overlap(s: Settings, f: Facts) -> None:
    """Without virtual stages there is nothing behind which stage-to-stage messages could hide."""
    if f.vpp is not None:
        return
    if f.pp > 1 and (s.overlap_p2p_comm or s.align_param_gather):
        s.note("No virtual pipeline stages: overlap of stage-to-stage messages and aligned parameter gathers are off.")
    s.set_derived("overlap_p2p_comm", False, "no virtual pipeline stages")
    s.set_derived("align_param_gather", False, "no virtual pipeline stages")


def mtp_standalone(s: Settings, f: Facts) -> None:
    if f.layout is not None and f.layout.mtp_standalone(f.pp):
        s.set_derived("mtp_standalone", True, "the layout puts MTP layers on another rank than the last one")


# Checks.


def layers_divide_over_stages(s: Settings, f: Facts) -> Iterator[Violation]:
    if uneven_ends(s) or getattr(s, LAYOUT) is not None or divides(f.pp, f.layers_split):
        return
    extra = [s.flag(dest) for dest in ACCOUNT if getattr(s, dest)]
    counted = f" (+{len(extra)} for {' and '.join(extra)})" if extra else ""
    yield broken(
        s,
        f"{say(s, 'num_layers')}{counted} must be a multiple of {say(s, PP)}; for uneven stages use "
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout.",
        "num_layers",
        PP,
        *(dest for dest in ACCOUNT if getattr(s, dest)),
    )


def one_way_to_interleave(s: Settings, _f: Facts) -> Iterator[Violation]:
    given = [dest for dest in (PER_VIRTUAL, VIRTUAL, LAYOUT) if getattr(s, dest) is not None]
    if len(given) > 1:
        shown = " and ".join(say(s, dest) for dest in given)
        yield broken(s, f"Use only one of {shown}: each of them decides the number of virtual stages.", *given)


def virtual_sizes_are_positive(s: Settings, _f: Facts) -> Iterator[Violation]:
    for dest in (PER_VIRTUAL, VIRTUAL, "microbatch_group_size_per_vp_stage"):
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield broken(s, f"{say(s, dest)} must be at least 1.", dest)


def layers_per_virtual_stage_divide(s: Settings, f: Facts) -> Iterator[Violation]:
    per_stage = getattr(s, PER_VIRTUAL)
    per_rank = middle_layers_per_rank(s, f) if uneven_ends(s) else quotient(f.layers_split, f.pp)
    if not divides(per_stage, per_rank):
        yield broken(
            s,
            f"{say(s, PER_VIRTUAL)} must divide the {per_rank} layers of a pipeline rank ({say(s, 'num_layers')}, "
            f"{say(s, PP)}).",
            PER_VIRTUAL,
            "num_layers",
            PP,
        )


def virtual_stages_divide_layers(s: Settings, f: Facts) -> Iterator[Violation]:
    per_rank = quotient(f.layers_split, f.pp)
    if getattr(s, LAYOUT) is None and not uneven_ends(s) and not divides(getattr(s, VIRTUAL), per_rank):
        yield broken(
            s,
            f"{say(s, VIRTUAL)} must divide the {per_rank} layers of a pipeline rank ({say(s, 'num_layers')}, "
            f"{say(s, PP)}).",
            VIRTUAL,
            "num_layers",
            PP,
        )


def interleaving_needs_stages(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.vpp is None:
        return
    cause = next(dest for dest in (LAYOUT, VIRTUAL, PER_VIRTUAL) if getattr(s, dest) is not None)
    if f.pp == 1:
        yield broken(
            s,
            f"{say(s, cause)} makes {f.vpp} virtual stages, which needs --pipeline-model-parallel-size above 1: "
            "interleaving hides the bubble between pipeline ranks.",
            cause,
            PP,
        )
    elif f.pp == 2 and not s.overlap_p2p_comm:
        yield broken(
            s,
            f"{say(s, cause)} with {s.flag('overlap_p2p_comm')} needs --pipeline-model-parallel-size above 2: with "
            "two ranks both directions would wait for each other.",
            cause,
            "overlap_p2p_comm",
            PP,
        )


def ends_are_sound(s: Settings, f: Facts) -> Iterator[Violation]:
    for dest in (FIRST, LAST):
        value = getattr(s, dest)
        if value is not None and not positive(value):
            yield broken(s, f"{say(s, dest)} must be at least 1.", dest)
        elif not divides(f.vpp, value):
            yield broken(
                s,
                f"{say(s, dest)} must be a multiple of the {f.vpp} virtual stages per pipeline rank: every chunk of a "
                "rank holds the same number of layers.",
                dest,
                *(d for d in (VIRTUAL, PER_VIRTUAL) if s.given(d)),
            )


def middle_divides(s: Settings, f: Facts) -> Iterator[Violation]:
    ends = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    if not ends or f.layers is None or not all(positive(getattr(s, dest)) for dest in ends):
        return
    shown = " and ".join(say(s, dest) for dest in ends)
    rest, ranks = f.layers - sum(getattr(s, dest) for dest in ends), f.pp - len(ends)
    if ranks < 0:
        yield broken(s, f"{shown} need {len(ends)} pipeline ranks; {say(s, PP)}.", *ends, PP)
    elif rest < 0 or (rest > 0 and ranks == 0):
        yield broken(
            s,
            f"{shown} must add up to {say(s, 'num_layers')} when there are no stages between.",
            *ends,
            "num_layers",
            PP,
        )
    elif ranks and (rest == 0 or rest % ranks):
        yield broken(
            s,
            f"{shown} leave {rest} of {say(s, 'num_layers')} for {ranks} middle pipeline ranks, which does not divide "
            "evenly.",
            *ends,
            "num_layers",
            PP,
        )
    elif ranks and not divides(f.vpp, rest // ranks):
        yield broken(
            s,
            f"{shown} leave {rest // ranks} layers on each middle pipeline rank, which must be a multiple of the "
            f"{f.vpp} virtual stages.",
            *ends,
            *(d for d in (VIRTUAL, PER_VIRTUAL) if s.given(d)),
        )


def ends_exclude_accounting(s: Settings, _f: Facts) -> Iterator[Violation]:
    ends = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    counted = [dest for dest in ACCOUNT if getattr(s, dest)]
    if ends and counted:
        yield broken(
            s,
            f"{say(s, ends[0])} cannot be combined with {s.flag(counted[0])}: both say how many layers the end stages "
            "hold.",
            ends[0],
            *counted,
        )


def layout_stands_alone(s: Settings, _f: Facts) -> Iterator[Violation]:
    others = [dest for dest in (FIRST, LAST) if getattr(s, dest) is not None]
    others += [dest for dest in ACCOUNT if getattr(s, dest)]
    if getattr(s, LAYOUT) is not None and others:
        yield broken(
            s,
            f"{say(s, LAYOUT)} cannot be combined with {', '.join(say(s, dest) for dest in others)}: the layout "
            "already places every layer.",
            LAYOUT,
            *others,
        )


def layout_is_readable(s: Settings, _f: Facts) -> Iterator[Violation]:
    if getattr(s, LAYOUT) is None:
        return
    try:
        read_layout(getattr(s, LAYOUT))
    except ValueError as error:
        yield broken(s, f"{say(s, LAYOUT)}: {error}.", LAYOUT)


def layout_fits_model(s: Settings, f: Facts) -> Iterator[Violation]:
    if f.layout is None:
        return
    related = {"stages, which": PP, "decoder layers": "num_layers", "MTP": "mtp_num_layers"}
    for clause in problems(f.layout, f.pp, f.layers, s.mtp_num_layers):
        others = [dest for word, dest in related.items() if word in clause]
        yield broken(s, f"{say(s, LAYOUT)} {clause}.", LAYOUT, *others)


def interleaving_has_enough_microbatches(s: Settings, f: Facts) -> Iterator[Violation]:
    group = s.microbatch_group_size_per_vp_stage
    count = None
    if f.dp is not None and positive(s.micro_batch_size):
        count = quotient(s.global_batch_size, s.micro_batch_size * f.dp)
    if f.vpp is None or f.pp == 1 or count is None or not positive(group):
        return
    if not f.pp <= group <= count:
        yield broken(
            s,
            f"{say(s, 'microbatch_group_size_per_vp_stage')} must lie between {say(s, PP)} and the {count} "
            f"microbatches of an iteration ({say(s, 'global_batch_size')} / ({say(s, 'micro_batch_size')} * {f.dp} "
            "data ranks)).",
            "microbatch_group_size_per_vp_stage",
            PP,
            "global_batch_size",
        )
    elif 0 < count % group < f.pp:
        yield broken(
            s,
            f"An iteration has {count} microbatches; in groups of {group} "
            f"({s.flag('microbatch_group_size_per_vp_stage')}) {count % group} are left over, which must be none or "
            f"at least {say(s, PP)}. Change {say(s, 'global_batch_size')}.",
            "global_batch_size",
            "microbatch_group_size_per_vp_stage",
            PP,
        )


def schedule_fits_stages(s: Settings, f: Facts) -> Iterator[Violation]:
    schedule = s.pipeline_schedule
    if schedule == "1f1b" and f.vpp is not None:
        cause = next(dest for dest in (LAYOUT, VIRTUAL, PER_VIRTUAL) if getattr(s, dest) is not None)
        yield broken(
            s,
            f"{say(s, 'pipeline_schedule')} cannot run the {f.vpp} virtual stages that {say(s, cause)} makes; choose "
            "interleaved or zero-bubble.",
            "pipeline_schedule",
            cause,
        )
    if schedule == "interleaved" and f.vpp is None:
        yield broken(
            s,
            f"{say(s, 'pipeline_schedule')} needs virtual stages: --num-virtual-stages-per-pipeline-rank above 1, "
            "--num-layers-per-virtual-pipeline-stage or --pipeline-model-parallel-layout.",
            "pipeline_schedule",
            VIRTUAL,
        )
    others = ("overlap_moe_expert_parallel_comm", "overlap_dispatch_backward_with_experts_wgrad")
    other = next((dest for dest in others if getattr(s, dest)), None)
    if schedule == "zero-bubble" and other is not None:
        yield broken(
            s,
            f"{say(s, 'pipeline_schedule')} cannot be combined with {s.flag(other)}: both decide when weight gradients are "
            "computed.",
            "pipeline_schedule",
            other,
        )


RESOLVE = (no_interleaving_no_overlap, mtp_standalone)
CHECKS = (
    layers_divide_over_stages,
    one_way_to_interleave,
    virtual_sizes_are_positive,
    layers_per_virtual_stage_divide,
    virtual_stages_divide_layers,
    interleaving_needs_stages,
    ends_are_sound,
    middle_divides,
    ends_exclude_accounting,
    layout_stands_alone,
    layout_is_readable,
    layout_fits_model,
    interleaving_has_enough_microbatches,
    schedule_fits_stages,
)
