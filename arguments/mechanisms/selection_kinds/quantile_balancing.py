"""Quantile balancing: a bias per expert instead of a loss."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import (
    UPSTREAM,
    DeclaredSelection,
    RoutingCapability,
    balancing_kinds,
)
from arguments.mechanisms.support import NoEffect, Rejected

_BALANCES = Rejected("balances by its choice of experts")
KIND = "quantile_balancing"

QUANTILE_BALANCING = DeclaredSelection(
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
            RoutingCapability.PRE_SOFTMAX: True,
            RoutingCapability.SCALING_FACTOR: True,
            RoutingCapability.GROUPS: UPSTREAM,
            RoutingCapability.HASH_LAYERS: True,
            RoutingCapability.FUSED_KERNEL: UPSTREAM,
            RoutingCapability.OTHER_SCORES: True,
            RoutingCapability.EXPERT_BIAS: NoEffect("has another bias"),
            RoutingCapability.REPLAY: _BALANCES,
            RoutingCapability.SPARSEMIXER: _BALANCES,
            RoutingCapability.LOSSES: Rejected("balances without a loss"),
            RoutingCapability.CAPACITY: Rejected("is not defined with dropped tokens"),
            RoutingCapability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            RoutingCapability.PADDING: Rejected("its estimate counts padding", "later"),
            RoutingCapability.GRAPH: True,
            RoutingCapability.UPCYCLING: True,
        }
    ),
)
