"""Quantile balancing: a bias per expert instead of a loss."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import (
    UPSTREAM,
    Capability,
    NoEffect,
    Rejected,
    Selection,
    asked_by_balancing,
)

_BALANCES = Rejected("balances by its choice of experts")
KIND = "quantile_balancing"

QUANTILE_BALANCING = Selection(
    key="quantile_balancing",
    name="quantile balancing",
    mention=f"{{moe_router_load_balancing_type:flag}} {KIND}",
    asked=asked_by_balancing(KIND),
    balancing=KIND,
    biases=("qb_beta",),
    counts="microbatch",
    counts_because="quantile balancing estimates its bias from one microbatch",
    draws=(("moe_router_quantile_balancing_ema", (0.0, 0.6)),),
    capabilities=MappingProxyType(
        {
            Capability.PRE_SOFTMAX: True,
            Capability.SCALING_FACTOR: True,
            Capability.GROUPS: UPSTREAM,
            Capability.HASH_LAYERS: True,
            Capability.FUSED_KERNEL: UPSTREAM,
            Capability.OTHER_SCORES: True,
            Capability.EXPERT_BIAS: NoEffect("has another bias"),
            Capability.REPLAY: _BALANCES,
            Capability.FINE_GRAINED: Rejected("is not defined for groups of experts"),
            Capability.SPARSEMIXER: _BALANCES,
            Capability.LOSSES: Rejected("balances without a loss"),
            Capability.CAPACITY: Rejected("is not defined with dropped tokens"),
            Capability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            Capability.PADDING: Rejected("its estimate counts padding", "later"),
            Capability.GRAPH: True,
            Capability.UPCYCLING: True,
        }
    ),
)
