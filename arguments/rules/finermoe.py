"""FineRMoE: sizes that follow from its four numbers, and what its routing cannot be combined with.

Its router chooses one group of experts for every slice of the output, by the groups' sums of logits. The effect of
other flags on that choice (bias, other groups, capacity) is not defined, so they are rejected.
"""

from collections.abc import Iterator

from arguments.moe import ExpertGrid
from arguments.rules.derived_sizes import DerivedSizes, balancing_types, divides, positive, quotient
from arguments.settings import Settings, Violation

CUTS, SLICES = "finermoe_intermediate_granularity", "finermoe_output_granularity"
COPIES, CANDIDATES = "finermoe_intermediate_expansion", "finermoe_output_expansion"
EXCLUDED = (
    ("moe_router_pre_softmax", "its weights are a softmax over the chosen experts of all slices together"),
    ("moe_router_topk_scaling_factor", "its weights add up to 1"),
    ("moe_router_group_topk", "it selects groups itself"),
    ("moe_router_enable_expert_bias", "a bias has no meaning for sums over groups"),
    ("moe_expert_capacity_factor", "a slice of the output whose tokens are dropped would be missing"),
    ("moe_clone_hot_experts", "results of clones have no slice"),
    ("moe_router_fusion", "the fused kernel does not know its groups"),
    ("moe_permute_fusion", "the fused kernel adds full outputs, not slices"),
    ("moe_latent_size", "slices of latents are not defined"),
)
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
KERNELS = ("all", "permute", "router")


def _is_finermoe(s: Settings) -> bool:
    return getattr(s, CUTS) is not None or getattr(s, SLICES) is not None


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
    if not s.given("moe_router_topk"):
        s.set_derived("moe_router_topk", grid.slices, "one expert for every slice")


# Checks.


def check_expert_grid(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None:
        return
    if s.num_experts != grid.num_experts:
        yield s.violation(
            f"{s.describe('num_experts')} must be {grid.num_experts}: {s.describe(SLICES)} x {s.describe(CANDIDATES)} "
            f"x {s.describe(CUTS)} x {s.describe(COPIES)}; or leave it out.",
            "num_experts",
            SLICES,
            CANDIDATES,
            CUTS,
            COPIES,
        )
    if not divides(grid.slices, s.hidden_size):
        yield s.violation(
            f"{s.describe('hidden_size')} must be a multiple of {s.describe(SLICES)}: slices are equally wide.",
            "hidden_size",
            SLICES,
        )
    if not divides(getattr(s, CUTS), s.ffn_hidden_size):
        yield s.violation(
            f"{s.describe('ffn_hidden_size')} must be a multiple of {s.describe(CUTS)}: experts are equally wide.",
            "ffn_hidden_size",
            CUTS,
        )
    width = quotient(s.ffn_hidden_size, getattr(s, CUTS))
    if width is not None and s.moe_ffn_hidden_size not in (None, width):
        yield s.violation(
            f"{s.describe('moe_ffn_hidden_size')} must be {width}: {s.describe('ffn_hidden_size')} / "
            f"{s.describe(CUTS)}; or leave it out.",
            "moe_ffn_hidden_size",
            "ffn_hidden_size",
            CUTS,
        )


def check_topk(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None or not positive(s.moe_router_topk):
        return
    if not divides(grid.slices, s.moe_router_topk):
        yield s.violation(
            f"{s.describe('moe_router_topk')} must be a multiple of {s.describe(SLICES)}: every slice gets as many "
            "experts.",
            "moe_router_topk",
            SLICES,
        )
    elif s.moe_router_topk // grid.slices > grid.group_size:
        yield s.violation(
            f"{s.describe('moe_router_topk')} is {s.moe_router_topk // grid.slices} experts for every slice, but a "
            f"group has {grid.group_size}: {s.describe(CUTS)} x {s.describe(COPIES)}.",
            "moe_router_topk",
            CUTS,
            COPIES,
        )
    elif s.moe_router_topk == 1:
        yield s.violation(
            f"{s.describe('moe_router_topk')} with {s.describe(SLICES)} leaves one expert in all, whose weight is "
            "always 1, and the router would not learn; choose 2 or more.",
            "moe_router_topk",
            SLICES,
        )


def check_finermoe_conflicts(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not _is_finermoe(s):
        return
    asks = s.flag(CUTS if s.given(CUTS) else SLICES)
    dest = CUTS if s.given(CUTS) else SLICES
    for other, why in EXCLUDED:
        if s.values[other] not in (None, False, 0):
            yield s.violation(f"{asks} cannot be combined with {s.flag(other)}: {why}.", dest, other)
    if s.moe_router_score_function != "softmax":
        yield s.violation(
            f"{asks} cannot be combined with {s.describe('moe_router_score_function')}: its scores are a softmax.",
            dest,
            "moe_router_score_function",
        )
    strange = [kind for kind in balancing_types(s) if kind not in BALANCING]
    if strange:
        yield s.violation(
            f"{asks} needs --moe-router-load-balancing-type {', '.join(BALANCING)}, not {' '.join(strange)}: it is not "
            "defined for groups of experts.",
            dest,
            "moe_router_load_balancing_type",
        )
    if s.moe_token_dispatcher_type == "flex":
        yield s.violation(
            f"{asks} needs --moe-token-dispatcher-type alltoall or allgather: the libraries of flex add full outputs, "
            "not slices.",
            dest,
            "moe_token_dispatcher_type",
        )
    named = [name for name in s.triton_kernels if name in KERNELS]
    if named:
        yield s.violation(
            f"{asks} cannot be combined with --triton-kernels {' '.join(named)}: the kernels of router and permutation "
            "do not know slices; name the others.",
            dest,
            "triton_kernels",
        )


RESOLVE = (resolve_granularities, resolve_num_experts)
CHECKS = (check_expert_grid, check_topk, check_finermoe_conflicts)
