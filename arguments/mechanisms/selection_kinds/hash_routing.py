"""Experts by token id in the first layers: a table says which."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import DeclaredSelection, RoutingCapability
from arguments.mechanisms.support import NoEffect, Rejected

_BY_TABLE = NoEffect("a table chooses the experts")

HASH = DeclaredSelection(
    key="hash_routing",
    name="hash routing",
    mention="{moe_n_hash_layers}",
    asked=lambda moe: moe.moe_n_hash_layers > 0,
    asked_by=RoutingCapability.HASH_LAYERS,
    num_layers=lambda moe: moe.moe_n_hash_layers,
    tables=("tid2eid",),
    has_rules=True,
    capabilities=MappingProxyType(
        {
            RoutingCapability.PRE_SOFTMAX: NoEffect("a softmax is always over all experts"),
            RoutingCapability.SCALING_FACTOR: True,
            RoutingCapability.GROUPS: _BY_TABLE,
            RoutingCapability.HASH_LAYERS: True,
            RoutingCapability.FUSED_KERNEL: _BY_TABLE,
            RoutingCapability.OTHER_SCORES: True,
            RoutingCapability.EXPERT_BIAS: _BY_TABLE,
            RoutingCapability.REPLAY: _BY_TABLE,
            RoutingCapability.SPARSEMIXER: True,  # which rejects this one
            RoutingCapability.LOSSES: True,
            RoutingCapability.CAPACITY: True,
            RoutingCapability.OUR_KERNEL: True,
            RoutingCapability.PADDING: True,
            RoutingCapability.GRAPH: True,
            RoutingCapability.UPCYCLING: Rejected("a dense model has no table of experts"),
        }
    ),
)
