"""Sinkhorn routing: logits are normalized over tokens and experts."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import (
    Capability,
    NoEffect,
    Rejected,
    Selection,
    asked_by_balancing,
)

_SCORES = NoEffect("computes weights and choice of experts differently")
_BALANCES = Rejected("balances by its choice of experts")
KIND = "sinkhorn"

SINKHORN = Selection(
    key="sinkhorn",
    name="sinkhorn balancing",
    mention=f"{{moe_router_load_balancing_type:flag}} {KIND}",
    asked=asked_by_balancing(KIND),
    balancing=KIND,
    learns_from_one=True,
    counts="rank",
    counts_because="sinkhorn balances the tokens of one rank",
    capabilities=MappingProxyType(
        {
            Capability.PRE_SOFTMAX: _SCORES,
            Capability.SCALING_FACTOR: _SCORES,
            Capability.GROUPS: _SCORES,
            Capability.HASH_LAYERS: True,
            Capability.FUSED_KERNEL: NoEffect("the kernel does not normalize logits over tokens"),
            Capability.OTHER_SCORES: _SCORES,
            Capability.EXPERT_BIAS: _SCORES,
            Capability.REPLAY: _BALANCES,
            Capability.FINE_GRAINED: Rejected("is not defined for groups of experts"),
            Capability.SPARSEMIXER: _BALANCES,
            Capability.LOSSES: Rejected("balances without a loss"),
            Capability.CAPACITY: Rejected("is not defined with dropped tokens"),
            Capability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            Capability.PADDING: True,
            Capability.GRAPH: Rejected("it checks for convergence on the host", "later"),
            Capability.UPCYCLING: True,
        }
    ),
)
