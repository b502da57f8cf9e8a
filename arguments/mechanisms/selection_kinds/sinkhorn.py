"""Sinkhorn routing: logits are normalized over tokens and experts."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import DeclaredSelection, RoutingCapability, balancing_kinds
from arguments.mechanisms.support import NoEffect, Rejected

_SCORES = NoEffect("computes weights and choice of experts differently")
_BALANCES = Rejected("balances by its choice of experts")
KIND = "sinkhorn"

SINKHORN = DeclaredSelection(
    key="sinkhorn",
    name="sinkhorn balancing",
    mention=f"{{moe_router_load_balancing_type:flag}} {KIND}",
    asked=lambda moe: balancing_kinds(moe) == (KIND,),
    balancing=KIND,
    learns_from_one=True,
    counts="rank",
    counts_because="sinkhorn balances the tokens of one rank",
    capabilities=MappingProxyType(
        {
            RoutingCapability.PRE_SOFTMAX: _SCORES,
            RoutingCapability.SCALING_FACTOR: _SCORES,
            RoutingCapability.GROUPS: _SCORES,
            RoutingCapability.HASH_LAYERS: True,
            RoutingCapability.FUSED_KERNEL: NoEffect("the kernel does not normalize logits over tokens"),
            RoutingCapability.OTHER_SCORES: _SCORES,
            RoutingCapability.EXPERT_BIAS: _SCORES,
            RoutingCapability.REPLAY: _BALANCES,
            RoutingCapability.SPARSEMIXER: _BALANCES,
            RoutingCapability.LOSSES: Rejected("balances without a loss"),
            RoutingCapability.CAPACITY: Rejected("is not defined with dropped tokens"),
            RoutingCapability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            RoutingCapability.PADDING: True,
            RoutingCapability.GRAPH: Rejected("it checks for convergence on the host", "later"),
            RoutingCapability.UPCYCLING: True,
        }
    ),
)
