"""Which layers have experts, how tokens choose them, and how the choice is balanced."""

from collections.abc import Iterator

from arguments.container import OPTIONS
from arguments.demands import demands, leading_demands
from arguments.mechanisms.selection_kinds.declaration import UPSTREAM, SelectionCapability, SelectionDeclaration
from arguments.mechanisms.selections import (
    BALANCING_KINDS,
    NO_BALANCING,
    SELECTIONS,
    named_selections,
    of_balancing,
)
from arguments.mechanisms.support import rejecting
from arguments.rules.derived_sizes import DerivedSizes, as_list, balancing_types, divides, positive, quotient
from arguments.settings import Limit, Settings, Violation

MANY_EXPERTS = 32
KERNELS = ("all", "router")
"""Values of --triton-kernels that ask for kernels of the router."""


# Derived values.


def resolve_single_values(s: Settings, _f: DerivedSizes) -> None:
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        values = as_list(getattr(s, dest))
        if isinstance(getattr(s, dest), list | tuple) and len(values) == 1:
            _set_keeping_source(s, dest, values[0])


def _set_keeping_source(s: Settings, dest: str, value: object) -> None:
    """Store another form of the value that the user gave, with its source."""
    source = s.source[dest]
    s.set_derived(dest, value, "")
    s.source[dest] = source


def note_router_dtype(s: Settings, f: DerivedSizes) -> None:
    if f.experts and f.experts >= MANY_EXPERTS and s.moe_router_dtype is None:
        s.note(
            f"{s.shown('num_experts')}: with this many experts the router is more stable in fp32 (--moe-router-dtype "
            "fp32); it now computes in the activation type."
        )


def note_no_balancing(s: Settings, f: DerivedSizes) -> None:
    is_even = s.moe_router_force_load_balancing or s.moe_router_topk == f.experts
    kinds = balancing_types(s)
    chosen = NO_BALANCING in kinds or of_balancing(kinds)
    losses = any(as_list(s.moe_aux_loss_coeff))
    if s.is_eval_only:
        return
    if f.experts and f.experts > 1 and not (losses or chosen or is_even or s.moe_router_enable_expert_bias):
        s.note(
            f"{s.shown('num_experts')}: nothing balances the load of the experts; give --moe-aux-loss-coeff above 0 or "
            "--moe-router-enable-expert-bias (--moe-router-load-balancing-type none: on purpose)."
        )


# Checks.


def check_layer_frequency(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    freq = s.moe_layer_freq
    if f.experts is None:
        return
    if isinstance(freq, list | tuple):
        invalid = sorted({str(entry) for entry in freq if entry not in (0, 1)})
        if invalid:
            yield s.violation(
                "{moe_layer_freq:flag} holds {entries}; each entry is 0 (dense) or 1 (experts).",
                entries=", ".join(invalid),
            )
        if f.layers is not None and len(freq) != f.layers:
            yield s.violation(
                "{moe_layer_freq:flag} describes {count} layers, but {num_layers}; give one entry for each layer.",
                kind="build",
                count=len(freq),
            )
    elif not positive(freq):
        yield s.violation("{moe_layer_freq} must be at least 1 (every N-th layer has experts).")


def check_topk(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts is None:
        return
    if not positive(s.moe_router_topk):
        yield s.violation("{moe_router_topk} must be at least 1.")
    elif s.moe_router_topk > f.experts:
        yield s.violation(
            "{moe_router_topk} is more than {num_experts}: a token cannot choose more experts than there are."
        )


def check_top1_pre_softmax(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if (
        f.experts
        and s.moe_router_topk == 1
        and s.moe_router_score_function == "softmax"
        and not s.moe_router_pre_softmax
        and not any(each.learns_from_one and each.asked(s) for each in SELECTIONS)
    ):
        yield s.violation(
            "{moe_router_topk} with {moe_router_score_function} needs {moe_router_pre_softmax:flag}: softmax over a "
            "single choice is always 1, and the router would not learn."
        )


def check_probs_on_input(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_apply_probs_on_input and s.moe_router_topk != 1:
        yield s.violation(
            "{moe_apply_probs_on_input:flag} needs {moe_router_topk:flag} 1, not {topk}, as in Megatron-LM.",
            topk=s.moe_router_topk,
        )


def check_expert_bias_scores(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    softmax = s.moe_router_score_function == "softmax"
    if f.experts and s.moe_router_enable_expert_bias and softmax and s.moe_router_group_topk:
        yield s.violation(
            "{moe_router_enable_expert_bias} with {moe_router_score_function} cannot be combined with "
            "{moe_router_group_topk}: groups with a bias need sigmoid or sqrtsoftplus."
        )


def check_group_topk(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    topk, groups = s.moe_router_group_topk, s.moe_router_num_groups
    if f.experts is None or topk is None:
        return
    if groups is None:
        yield s.violation(
            "{moe_router_group_topk} needs {moe_router_num_groups:flag}: into how many groups the experts fall."
        )
        return
    if not positive(groups) or not divides(groups, f.experts):
        yield s.violation("{num_experts} must be a multiple of {moe_router_num_groups}: groups are equally large.")
    if not positive(topk) or (positive(groups) and topk > groups):
        yield s.violation("{moe_router_group_topk} must be between 1 and {moe_router_num_groups}.")
        return
    per_group = quotient(f.experts, groups)
    if per_group is not None and positive(s.moe_router_topk) and topk * per_group < s.moe_router_topk <= f.experts:
        yield s.violation(
            "{moe_router_topk} is more than the {available} experts of {moe_router_group_topk} groups with {per_group} "
            "experts each.",
            "moe_router_num_groups",
            available=topk * per_group,
            per_group=per_group,
        )
    scored = s.moe_router_group_score_topk
    if scored is not None and per_group is not None and scored > per_group:
        yield s.violation(
            "{moe_router_group_score_topk} is more than the {per_group} experts of a group.",
            "moe_router_num_groups",
            per_group=per_group,
        )


def check_balancing_lists(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds, coeffs = balancing_types(s), as_list(s.moe_aux_loss_coeff)
    unknown = [kind for kind in kinds if kind not in BALANCING_KINDS]
    if unknown:
        yield s.violation(
            "{moe_router_load_balancing_type:flag} {unknown}: needs {accepted}.",
            unknown=" ".join(unknown),
            accepted=", ".join(BALANCING_KINDS),
        )
    if f.experts and len(kinds) != len(coeffs) and (len(kinds) > 1 or len(coeffs) > 1):
        yield s.violation(
            "{moe_router_load_balancing_type} names {count} and {moe_aux_loss_coeff} gives {num_coeffs} values; give "
            "one coefficient for each.",
            count=len(kinds),
            num_coeffs=len(coeffs),
        )


def check_selecting_balancing_alone(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    kinds = balancing_types(s)
    if f.experts and len(kinds) > 1 and (selections := of_balancing(kinds)):
        yield s.violation(
            "{moe_router_load_balancing_type}: {balancing} chooses experts by itself and cannot be combined with other "
            "kinds of balancing.",
            balancing=selections[0].balancing,
        )


def check_selections(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    """Check what selections reject in Megatron-LM too: losses, and flags."""
    for each in named_selections(s) if f.experts else ():
        if each.rejects(SelectionCapability.LOSSES) and any(as_list(s.moe_aux_loss_coeff)):
            why = each.because(SelectionCapability.LOSSES)
            yield s.violation(f"{{moe_aux_loss_coeff}} must be 0 with {each.mention}{why}.")
        for dest, capability in leading_demands(SelectionCapability).items():
            is_given = getattr(s, dest) and getattr(s, dest) != s.default(dest)
            if is_given and each.capabilities[capability] == UPSTREAM:
                yield s.violation(f"{each.mention} cannot be combined with {{}}.", dest)


def limit_selections(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    """List what selections reject here: weights or a choice for which they are not defined."""
    selections = tuple(each for each in SELECTIONS if not each.lists_limits)
    named = named_selections(s) if f.experts is not None else ()
    for each in selections:
        for dest, capability in _rejected_flags(each):
            applies = each in named and s.values[dest] != s.default(dest)
            yield Limit(applies, _combination(each, dest, capability), (dest,))
    for each, _ in rejecting(selections, SelectionCapability.OUR_KERNEL):
        why = each.because(SelectionCapability.OUR_KERNEL)
        for name in KERNELS:
            applies = each in named and name in s.triton_kernels
            yield Limit(applies, f"{{triton_kernels:flag}} {name} cannot be combined with {each.mention}{why}.")
    # dispatcher.py has what balancing rejects, as in Megatron-LM
    by_flags = tuple(each for each in selections if each.balancing is None)
    for each, _ in rejecting(by_flags, SelectionCapability.CAPACITY):
        why = each.because(SelectionCapability.CAPACITY)
        applies = each in named and s.moe_expert_capacity_factor is not None
        yield Limit(applies, f"{{moe_expert_capacity_factor}} cannot be combined with {each.mention}{why}.")


def _rejected_flags(selection: SelectionDeclaration) -> Iterator[tuple[str, SelectionCapability]]:
    """Yield what this program rejects, by destination."""
    for dest, capability in leading_demands(SelectionCapability).items():
        if selection.rejects(capability) and selection.capabilities[capability] != UPSTREAM:
            yield dest, capability


def _combination(selection: SelectionDeclaration, dest: str, capability: SelectionCapability) -> str:
    """Return the text of a limit whose destination is the flag that demands a capability."""
    flag, why = "{}" if OPTIONS[dest].choices else "{:flag}", selection.because(capability)
    if selection.balancing is not None:
        return f"{flag} cannot be combined with {selection.mention}{why}."
    return f"{selection.mention} cannot be combined with {flag}{why}."


def check_routing_replay(s: Settings, f: DerivedSizes) -> Iterator[Violation]:
    if f.experts and s.moe_routing_replay_path is not None and not s.moe_enable_routing_replay:
        yield s.violation("{moe_routing_replay_path:flag} needs {moe_enable_routing_replay:flag}.")


def limit_routing_replay(s: Settings, f: DerivedSizes) -> Iterator[Limit]:
    is_on = f.experts is not None and s.moe_enable_routing_replay
    yield Limit(
        is_on and s.moe_routing_replay_path is not None and s.cuda_graph_impl != "none",
        "{moe_routing_replay_path:flag} cannot be combined with {cuda_graph_impl:flag}: a graph would route every "
        "microbatch as the captured one.",
    )


def note_ignored_flags(s: Settings, f: DerivedSizes) -> None:
    """Note flags that a selection of all layers accepts and does not read; where it has only some, others read them."""
    given = [
        (dest, capability)
        for dest, capability in demands(SelectionCapability).items()
        if f.experts and s.given(dest) and getattr(s, dest)
    ]
    for each in (each for each in named_selections(s) if each.num_layers is None):
        ignored = [(s.shown(dest), each.because(capability)) for dest, capability in given if each.ignores(capability)]
        for why in dict.fromkeys(why for _, why in ignored):
            shown = ", ".join(flag for flag, reason in ignored if reason == why)
            s.note(f"{shown}: no effect with {s.words(each.mention)}{why}.")
