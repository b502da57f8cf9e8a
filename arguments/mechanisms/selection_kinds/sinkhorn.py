"""Sinkhorn routing: logits are normalized over tokens and experts."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability, SelectionDeclaration, balancing_kinds
from arguments.mechanisms.support import NoEffect, Rejected

_SCORES = NoEffect("computes weights and choice of experts differently")
_BALANCES = Rejected("balances by its choice of experts")
KIND = "sinkhorn"

SINKHORN = SelectionDeclaration(
    key="sinkhorn",
    name="sinkhorn balancing",
    mention=f"{{moe_router_load_balancing_type:flag}} {KIND}",
    asked=lambda moe: balancing_kinds(moe) == (KIND,),
    balancing=KIND,
    learns_from_one=True,
    saves=lambda tokens, experts, _: (("scores", (tokens, experts), None), ("map", (tokens, experts), 1)),
    counts="rank",
    counts_because="sinkhorn balances the tokens of one rank",
    capabilities=MappingProxyType(
        {
            SelectionCapability.PRE_SOFTMAX: _SCORES,
            SelectionCapability.SCALING_FACTOR: _SCORES,
            SelectionCapability.GROUPS: _SCORES,
            SelectionCapability.HASH_LAYERS: True,
            SelectionCapability.FUSED_KERNEL: NoEffect("normalizes logits over tokens, unlike the kernel"),
            SelectionCapability.OTHER_SCORES: _SCORES,
            SelectionCapability.EXPERT_BIAS: _SCORES,
            SelectionCapability.REPLAY: _BALANCES,
            SelectionCapability.LARGEST_LOGITS: _BALANCES,
            SelectionCapability.LOSSES: Rejected("balances without a loss"),
            SelectionCapability.CAPACITY: Rejected("is not defined with dropped tokens"),
            SelectionCapability.OUR_KERNEL: NoEffect("there is no kernel for it"),
            SelectionCapability.PADDING: True,
            SelectionCapability.GRAPH: Rejected("it checks for convergence on the host", "later"),
            SelectionCapability.UPCYCLING: True,
        }
    ),
)
