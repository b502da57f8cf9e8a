"""FineRMoE: every expert computes one slice of the output.

The experts form a grid [slices, candidates, group_size]. For every slice a token takes the best group, and in it the
best experts. Source: arXiv 2603.13364.
"""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from arguments.mechanisms.selection_kinds.declaration import (
    BALANCING,
    ExpertSplit,
    SelectionCapability,
    SelectionDeclaration,
    UpcycledExperts,
)
from arguments.mechanisms.support import FOR_WHO_ASKS, Rejected

CUTS, SLICES = "finermoe_intermediate_granularity", "finermoe_output_granularity"
COPIES, CANDIDATES = "finermoe_intermediate_expansion", "finermoe_output_expansion"
BALANCED_BY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""Values of --moe-router-load-balancing-type that it is defined with."""
_UPCYCLED_STD = 0.02


class ExpertGrid(NamedTuple):
    """Layout of the experts as [slices, candidates, group_size], the last fastest.

    Each slice of the output comes from one of its candidate groups of experts.
    """

    slices: int
    candidates: int
    group_size: int

    @property
    def num_experts(self) -> int:
        """Total number of experts."""
        return self.slices * self.candidates * self.group_size


def is_asked(moe: Any) -> bool:
    return getattr(moe, CUTS) is not None or getattr(moe, SLICES) is not None


def expert_grid(moe: Any) -> ExpertGrid:
    """Return the layout of the experts; `moe` has the fields of MoEArgs, and zero or None where one number follows."""
    cuts, slices = getattr(moe, CUTS) or 1, getattr(moe, SLICES) or 1
    return ExpertGrid(slices, getattr(moe, CANDIDATES) or slices, cuts * (getattr(moe, COPIES) or cuts))


def _saved_indices(rows: int, tokens: int, chunks: int, slices: int) -> dict[str, int]:
    """Return the lengths of what SlicedPermutation saves."""
    return {"slice_rows": rows, "slice_offsets": tokens * slices + chunks}


def _upcycle(args: Mapping[str, Any], pieces: int) -> UpcycledExperts:
    """Scale the experts to add up to the dense network only if it is not there as the shared expert."""
    is_alone = args["moe_shared_expert_intermediate_size"] is None
    fc2 = float(pieces) if is_alone else 1.0
    return UpcycledExperts(repeats=1, slices=args[SLICES], fc1=1.0, fc2=fc2, bias=1.0, std=_UPCYCLED_STD)


def _draw(rng: Random, ep: int, values: Mapping[str, object]) -> dict[str, object]:
    slices, candidates, cuts, copies = rng.choice((2, 4)), rng.choice((1, 2)), 3, rng.choice((1, 2))
    while slices * candidates * cuts * copies % ep:
        copies += 1
    options: dict[str, object] = {
        CUTS: cuts,
        SLICES: slices,
        COPIES: copies,
        CANDIDATES: candidates,
        "moe_router_topk": slices * rng.choice((1, 2)),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "num_experts": None,
        "moe_ffn_hidden_size": None,
    }
    options |= dict.fromkeys("moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk".split())
    if not set(values[BALANCING]) <= set(BALANCED_BY):  # type: ignore[call-overload]
        options |= {BALANCING: ["seq_aux_loss"], "moe_aux_loss_coeff": [1e-2]}
    return options


def _shrink(s: Any, ep: int, ffn: int) -> dict[str, object]:
    """Return small numbers, with enough copies for equally many experts per rank; 1 stays 1."""
    cuts = 3 if getattr(s, CUTS) > 1 else 1
    slices, candidates = min(getattr(s, SLICES), 2), min(getattr(s, CANDIDATES), 2)
    each = min(s.moe_router_topk // getattr(s, SLICES), 2)
    copies = min(getattr(s, COPIES), 2)
    while (count := slices * candidates * cuts * copies) % ep or cuts * copies < each or count < 4:
        copies += 1
    values: dict[str, object] = {
        CUTS: cuts,
        SLICES: slices,
        COPIES: copies,
        CANDIDATES: candidates,
        "moe_router_topk": slices * each,
    }
    if s.moe_shared_expert_intermediate_size:
        values["moe_shared_expert_intermediate_size"] = ffn
    return values


FINERMOE = SelectionDeclaration(
    key="finermoe",
    name="FineRMoE",
    mention=f"{{{CUTS}:flag}} and {{{SLICES}:flag}}",
    asked=is_asked,
    learns_from_one=True,  # its rules count slices
    has_rules=True,
    lists_limits=True,
    split=ExpertSplit(
        width_shares=CUTS,
        slices=SLICES,
        projection="moe_concat_proj",
        saves=_saved_indices,
        upcycle=_upcycle,
        draw=_draw,
        shrink=_shrink,
    ),
    capabilities=MappingProxyType(
        {
            SelectionCapability.PRE_SOFTMAX: Rejected(
                "its weights are a softmax over the chosen experts of all slices together"
            ),
            SelectionCapability.SCALING_FACTOR: Rejected("its weights add up to 1"),
            SelectionCapability.GROUPS: Rejected("it selects groups itself"),
            SelectionCapability.HASH_LAYERS: Rejected("a table of experts has no slices"),
            SelectionCapability.FUSED_KERNEL: Rejected("the fused kernel does not know its groups"),
            SelectionCapability.OTHER_SCORES: Rejected("its scores are a softmax"),
            SelectionCapability.EXPERT_BIAS: True,
            SelectionCapability.REPLAY: Rejected("their experts are chosen slice by slice"),
            SelectionCapability.LARGEST_LOGITS: FOR_WHO_ASKS,
            SelectionCapability.LOSSES: True,
            SelectionCapability.CAPACITY: True,
            SelectionCapability.OUR_KERNEL: Rejected(
                "the kernel of the router does not know its groups; name the others"
            ),
            SelectionCapability.PADDING: True,
            SelectionCapability.GRAPH: True,
            SelectionCapability.UPCYCLING: True,
        }
    ),
)
