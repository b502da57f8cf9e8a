"""FineRMoE: sizes that follow from its four numbers, and what its routing cannot be combined with.

Its router chooses one group of experts for every slice of the output, by the groups' sums of logits. What other flags would change in
that choice (bias, groups of another kind, capacity) is defined nowhere, so it is refused.
"""

from collections.abc import Iterator

from arguments.fine_grid import FineGrid
from arguments.rules.facts import Facts, balancing_types, broken, divides, positive, quotient, say
from arguments.settings import Settings, Violation

CUTS, SLICES = "finermoe_intermediate_granularity", "finermoe_output_granularity"
COPIES, CANDIDATES = "finermoe_intermediate_expansion", "finermoe_output_expansion"
EXCLUDED = (
    ("moe_router_pre_softmax", "its weights are a softmax over the chosen experts of all slices together"),
    ("moe_router_topk_scaling_factor", "its weights add up to 1"),
    ("moe_router_group_topk", "it chooses groups of its own"),
    ("moe_router_enable_expert_bias", "a bias has no meaning for sums over groups"),
    ("moe_expert_capacity_factor", "a slice of the output whose rows are dropped would be missing"),
    ("moe_clone_hot_experts", "results of clones have no slice"),
    ("moe_router_fusion", "the fused kernel does not know its groups"),
    ("moe_permute_fusion", "the fused kernel adds up whole rows, not slices"),
    ("moe_latent_size", "slices of latents are defined nowhere"),
)
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
KERNELS = ("all", "permute", "router")


def _asked(s: Settings) -> bool:
    return getattr(s, CUTS) is not None or getattr(s, SLICES) is not None


def _grid(s: Settings) -> FineGrid | None:
    """The layout of the experts; None where it is not asked for, or its numbers are no sizes."""
    cuts, slices, copies, candidates = (getattr(s, dest) for dest in (CUTS, SLICES, COPIES, CANDIDATES))
    if not _asked(s) or not all(positive(value) for value in (cuts, slices, copies, candidates)):
        return None
    return FineGrid(slices, candidates, cuts * copies)


# Derived and normalised values.


def granularities(s: Settings, _f: Facts) -> None:
    if not _asked(s):
        return
    for dest in (CUTS, SLICES):
        if getattr(s, dest) is None:
            s.set_derived(dest, 1, "not cut")
    for dest, of in ((COPIES, CUTS), (CANDIDATES, SLICES)):
        if getattr(s, dest) == 0:
            s.set_derived(dest, getattr(s, of), f"0 means as {s.flag(of)}")


def experts_of_the_grid(s: Settings, _f: Facts) -> None:
    grid = _grid(s)
    if grid is None:
        return
    if not s.given("num_experts"):
        s.set_derived("num_experts", grid.num_experts, "slices x candidate groups x experts of a group")
    if not s.given("moe_router_topk"):
        s.set_derived("moe_router_topk", grid.slices, "one expert for every slice")


# Checks.


def grid_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None:
        return
    if s.num_experts != grid.num_experts:
        yield broken(s, f"{say(s, 'num_experts')} must be {grid.num_experts}: {say(s, SLICES)} x {say(s, CANDIDATES)} x {say(s, CUTS)} x "
                     f"{say(s, COPIES)}; or leave it out.", "num_experts", SLICES, CANDIDATES, CUTS, COPIES)  # fmt: skip
    if not divides(grid.slices, s.hidden_size):
        yield broken(s, f"{say(s, 'hidden_size')} must be a multiple of {say(s, SLICES)}: slices are equally wide.", "hidden_size", SLICES)
    if not divides(getattr(s, CUTS), s.ffn_hidden_size):
        yield broken(s, f"{say(s, 'ffn_hidden_size')} must be a multiple of {say(s, CUTS)}: experts are equally wide.", "ffn_hidden_size", CUTS)
    width = quotient(s.ffn_hidden_size, getattr(s, CUTS))
    if width is not None and s.moe_ffn_hidden_size not in (None, width):
        yield broken(s, f"{say(s, 'moe_ffn_hidden_size')} must be {width}: {say(s, 'ffn_hidden_size')} / {say(s, CUTS)}; or leave it out.",
                     "moe_ffn_hidden_size", "ffn_hidden_size", CUTS)  # fmt: skip


def choice_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    grid = _grid(s)
    if grid is None or not positive(s.moe_router_topk):
        return
    if not divides(grid.slices, s.moe_router_topk):
        yield broken(s, f"{say(s, 'moe_router_topk')} must be a multiple of {say(s, SLICES)}: every slice gets as many experts.",
                     "moe_router_topk", SLICES)  # fmt: skip
    elif s.moe_router_topk // grid.slices > grid.group_size:
        yield broken(s, f"{say(s, 'moe_router_topk')} is {s.moe_router_topk // grid.slices} experts for every slice, but a group has "
                     f"{grid.group_size}: {say(s, CUTS)} x {say(s, COPIES)}.", "moe_router_topk", CUTS, COPIES)  # fmt: skip
    elif s.moe_router_topk == 1:
        yield broken(s, f"{say(s, 'moe_router_topk')} with {say(s, SLICES)} leaves one expert in all, whose weight is always 1, and the router would "
                     "not learn; choose 2 or more.", "moe_router_topk", SLICES)  # fmt: skip


def fine_routing_excludes(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not _asked(s):
        return
    asks = s.flag(CUTS if s.given(CUTS) else SLICES)
    dest = CUTS if s.given(CUTS) else SLICES
    for other, why in EXCLUDED:
        if s.values[other] not in (None, False, 0):
            yield broken(s, f"{asks} cannot be combined with {s.flag(other)}: {why}.", dest, other)
    if s.moe_router_score_function != "softmax":
        yield broken(s, f"{asks} cannot be combined with {say(s, 'moe_router_score_function')}: its scores are a softmax.", dest,
                     "moe_router_score_function")  # fmt: skip
    strange = [kind for kind in balancing_types(s) if kind not in BALANCING]
    if strange:
        yield broken(s, f"{asks} needs --moe-router-load-balancing-type {', '.join(BALANCING)}, not {' '.join(strange)}: it is not defined for "
                     "groups of experts.", dest, "moe_router_load_balancing_type")  # fmt: skip
    if s.moe_token_dispatcher_type == "flex":
        yield broken(s, f"{asks} needs --moe-token-dispatcher-type alltoall or allgather: the libraries behind flex add up whole rows, not slices.",
                     dest, "moe_token_dispatcher_type")  # fmt: skip
    named = [name for name in s.triton_kernels if name in KERNELS]
    if named:
        yield broken(s, f"{asks} cannot be combined with --triton-kernels {' '.join(named)}: the kernels of router and permutation do not know "
                     "slices; name the others.", dest, "triton_kernels")  # fmt: skip


RESOLVE = (granularities, experts_of_the_grid)
CHECKS = (grid_fits, choice_fits, fine_routing_excludes)
