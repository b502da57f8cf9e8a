"""Quantile balancing: a bias per expert instead of a loss."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import (
    UPSTREAM,
    SelectionCapability,
    SelectionDeclaration,
    balancing_kinds,
)
from arguments.mechanisms.support import NoEffect, Rejected

_BALANCES = Rejected("balances by its choice of experts")
KIND = "quantile_balancing"

QUANTILE_BALANCING = SelectionDeclaration(
    key="quantile_balancing",
    name="quantile balancing",
    mention=f"{{moe_router_load_balancing_type:flag}} {KIND}",
    asked=lambda moe: balancing_kinds(moe) == (KIND,),
    balancing=KIND,
    biases=("qb_beta",),
    counts="microbatch",
    counts_because="quantile balancing estimates its bias from one microbatch",
    has_rules=True,
    draws=(("moe_router_quantile_balancing_ema", (0.0, 0.6)),),
    capabilities=MappingProxyType(
        {
            SelectionCapability.PRE_SOFTMAX: True,
            SelectionCapability.SCALING_FACTOR: True,
            SelectionCapability.GROUPS: UPSTREAM,
            SelectionCapability.HASH_LAYERS: True,
            SelectionCapability.FUSED_KERNEL: UPSTREAM,
            SelectionCapability.OTHER_SCORES: True,
            SelectionCapability.EXPERT_BIAS: NoEffect("has another bias"),
            SelectionCapability.REPLAY: _BALANCES,
            SelectionCapability.LARGEST_LOGITS: _BALANCES,
            SelectionCapability.LOSSES: Rejected("balances without a loss"),
            SelectionCapability.CAPACITY: Rejected("is not defined with dropped tokens"),
            SelectionCapability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            SelectionCapability.PADDING: Rejected("its estimate counts padding", "later"),
            SelectionCapability.GRAPH: True,
            SelectionCapability.UPCYCLING: True,
        }
    ),
)
