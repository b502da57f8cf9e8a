"""Clones of hot experts: ranks below the average load compute tokens of overloaded experts (ECHO)."""

from types import MappingProxyType
from typing import Any

from arguments.mechanisms.placement_kinds.declaration import PlacementCapability, PlacementDeclaration
from arguments.mechanisms.support import NoEffect, Rejected

EXCHANGE_ELEMENTS = 1 << 26
"""Maximum elements that a rank sends at a time where every rank sends the slots of clones to every rank."""
PLAN_KERNELS = (66, 39)
"""Kernels that plan the clones: once, and in each of its 3 + slots rounds (moe/placement/clone_plan.py).

Counted in a recorded step.
"""


def _slots(moe: Any) -> int:
    return moe.moe_clone_hot_experts


def _plan_kernels(moe: Any) -> int:
    once, each = PLAN_KERNELS
    return once + each * (3 + _slots(moe))


def _held_elements(moe: Any, local: float, ep: int, num_experts: int) -> float:
    clones = local * _slots(moe) * ep // num_experts
    exchanged = 2 * clones  # sent and received
    if moe.moe_expert_rank_capacity_factor is not None:
        exchanged = 2 * min(ep * clones, EXCHANGE_ELEMENTS)
    # weights of experts and clones in one stack, and its gradient
    return 2 * (local + clones) + exchanged


CLONED = PlacementDeclaration(
    key="cloned",
    name="clones of hot experts",
    dest="moe_clone_hot_experts",
    slots=_slots,
    is_planned=True,
    plan_kernels=_plan_kernels,
    held_elements=_held_elements,
    moved_rate="clone_rate",
    unmoved_maximum="rank_max_over_mean_before_cloning",
    has_rules=True,
    alias="echo",
    capabilities=MappingProxyType(
        {
            PlacementCapability.LIBRARY_EXPERTS: NoEffect(
                "its number of experts is fixed, and that of clones changes (--moe-clone-hot-experts)"
            ),
            PlacementCapability.PREPROCESS_GRAPH: NoEffect("gathers the counts of all ranks first, to plan the clones"),
            PlacementCapability.PADDED_GRAPH: Rejected(
                "experts that are padded to capacity have equally many tokens, so none is hot"
            ),
            PlacementCapability.MLP_CHUNKS: Rejected("every chunk would exchange the weights of clones again"),
            PlacementCapability.ADAPTERS: Rejected("clones of experts have no adapters"),
            PlacementCapability.OUTPUT_SLICES: Rejected("results of clones have no slice"),
        }
    ),
)
