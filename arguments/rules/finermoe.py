"""FineRMoE: sizes that follow from its four numbers, and what its routing cannot be combined with.

Its router chooses one group of experts for every slice of the output, by the groups' sums of logits. Flags whose
effect on that choice is not defined (other groups, other scores) are rejected.
"""

from collections.abc import Iterator

from arguments.demands import leading_demands
from arguments.mechanisms.placement_kinds.declaration import PlacementCapability
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selection_kinds.finermoe import (
    BALANCED_BY,
    CANDIDATES,
    COPIES,
    CUTS,
    FINERMOE,
    SLICES,
    ExpertGrid,
)
from arguments.mechanisms.selections import SELECTIONS
from arguments.mechanisms.support import reason_among, rejected_flags
from arguments.rules.derived_sizes import DerivedSizes, balancing_types, divides, positive, quotient
from arguments.rules.router import KERNELS
from arguments.settings import Limit, Settings, Violation

EXCLUDED = (
    (
        "moe_permute_fusion",
        "TransformerEngine's kernel sums outputs of full width; --triton-kernels permute does slices",
    ),
    ("moe_latent_size", "slices of latents are not defined"),
)


def _is_finermoe(s: Settings) -> bool:
    return FINERMOE.asked(s)


def _grid(s: Settings) -> ExpertGrid | None:
    """Return the layout of the experts; None if FineRMoE is off or its numbers are not positive."""
    cuts, slices, copies, candidates = (getattr(s, dest) for dest in (CUTS, SLICES, COPIES, CANDIDATES))
    if not _is_finermoe(s) or not all(positive(value) for value in (cuts, slices, copies, candidates)):
        return None
    return ExpertGrid(slices, candidates, cuts * copies)


# Derived values.


def resolve_granularities(s: Settings, _f: DerivedSizes) -> None:
    if not _is_finermoe(s):
        return
    for dest in (CUTS, SLICES):
        if getattr(s, dest) is None:
            s.set_derived(dest, 1, "not split")
    for dest, of in ((COPIES, CUTS), (CANDIDATES, SLICES)):
        if getattr(s, dest) == 0:
            s.set_derived(dest, getattr(s, of), f"0 means as {s.flag(of)}")


def resolve_num_experts(s: Settings, _f: DerivedSizes) -> None:
    grid = _grid(s)
    if grid is None:
        return
    if not s.given("num_experts"):
        s.set_derived("num_experts", grid.num_experts, "slices x candidate groups x experts of a group")
    from_checkpoint = s.use_checkpoint_args and not s.moe_use_upcycling
    if not s.given("moe_router_topk") and not from_checkpoint:
        s.set_derived("moe_router_topk", grid.slices, "one expert for every slice")


# Checks.


def check_expert_grid(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None:
        return
    if s.num_experts != grid.num_experts:
        yield s.violation(
            "{num_experts} must be {product}: {finermoe_output_granularity} x {finermoe_output_expansion} x "
            "{finermoe_intermediate_granularity} x {finermoe_intermediate_expansion}; or leave it out.",
            product=grid.num_experts,
        )
    if not divides(grid.slices, s.hidden_size):
        yield s.violation("{hidden_size} must be a multiple of {finermoe_output_granularity}: slices are equally wide.")
    if not divides(getattr(s, CUTS), s.ffn_hidden_size):
        yield s.violation(
            "{ffn_hidden_size} must be a multiple of {finermoe_intermediate_granularity}: experts are equally wide."
        )
    width = quotient(s.ffn_hidden_size, getattr(s, CUTS))
    if width is not None and s.moe_ffn_hidden_size not in (None, width):
        yield s.violation(
            "{moe_ffn_hidden_size} must be {width}: {ffn_hidden_size} / {finermoe_intermediate_granularity}; or leave "
            "it out.",
            width=width,
        )


def check_topk(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None or not positive(s.moe_router_topk):
        return
    if not divides(grid.slices, s.moe_router_topk):
        yield s.violation(
            "{moe_router_topk} must be a multiple of {finermoe_output_granularity}: every slice gets as many experts."
        )
    elif s.moe_router_topk // grid.slices > grid.group_size:
        yield s.violation(
            "{moe_router_topk} is {per_slice} experts for every slice, but a group has {group_size}: "
            "{finermoe_intermediate_granularity} x {finermoe_intermediate_expansion}.",
            per_slice=s.moe_router_topk // grid.slices,
            group_size=grid.group_size,
        )
    elif s.moe_router_topk == 1:
        yield s.violation(
            "{moe_router_topk} with {finermoe_output_granularity} leaves one expert in all, whose weight is always 1, "
            "and the router would not learn; choose 2 or more."
        )


def limit_finermoe(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_on, dest = _is_finermoe(s), SLICES if s.given(SLICES) and not s.given(CUTS) else CUTS
    routing = tuple(
        (other, reason_among(SELECTIONS, FINERMOE, capability))
        for other, capability in leading_demands(SelectionCapability).items()
        if FINERMOE.rejects(capability)
        and capability not in (SelectionCapability.REPLAY, SelectionCapability.OTHER_SCORES)
    )
    for other, why in (*routing, *rejected_flags(PLACEMENTS, PlacementCapability.OUTPUT_SLICES), *EXCLUDED):
        yield Limit(
            is_on and s.values[other] not in (None, False, 0),
            f"{{:flag}} cannot be combined with {{:flag}}: {why}.",
            (dest, other),
        )
    yield Limit(
        is_on and s.moe_router_score_function != "softmax",
        "{:flag} cannot be combined with {moe_router_score_function}: "
        f"{FINERMOE.reason(SelectionCapability.OTHER_SCORES)}.",
        (dest,),
    )
    yield Limit(
        is_on and not all(kind in BALANCED_BY for kind in balancing_types(s)),
        f"{{:flag}} needs {{moe_router_load_balancing_type:flag}} {', '.join(BALANCED_BY)}: other balancing is not "
        "defined for groups of experts.",
        (dest,),
    )
    for name in KERNELS:
        yield Limit(
            is_on and name in s.triton_kernels,
            f"{{:flag}} cannot be combined with {{triton_kernels:flag}} {name}: "
            f"{FINERMOE.reason(SelectionCapability.OUR_KERNEL)}.",
            (dest,),
        )
    yield Limit(
        is_on and s.moe_enable_routing_replay,
        f"{{moe_enable_routing_replay:flag}} cannot be combined with {FINERMOE.mention}: "
        f"{FINERMOE.reason(SelectionCapability.REPLAY)}.",
    )
    yield Limit(
        is_on and s.moe_use_upcycling and s.save is not None and s.add_bias_linear,
        f"{{moe_use_upcycling}} to the experts of {{{CUTS}:flag}} needs {{add_bias_linear:flag}}: they have no biases.",
    )
