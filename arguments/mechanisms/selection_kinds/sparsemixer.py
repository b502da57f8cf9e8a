"""Two experts by logits, each with a separate softmax."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import DeclaredSelection, RoutingCapability
from arguments.mechanisms.support import Rejected

_BY_LOGITS = Rejected("its two experts are those of the largest logits")

SPARSEMIXER = DeclaredSelection(
    key="sparsemixer",
    name="SparseMixer",
    mention="{moe_router_sparsemixer_jitter:flag}",
    asked=lambda moe: moe.moe_router_sparsemixer_jitter is not None,
    has_rules=True,
    asked_by=RoutingCapability.SPARSEMIXER,
    capabilities=MappingProxyType(
        {
            RoutingCapability.PRE_SOFTMAX: _BY_LOGITS,
            RoutingCapability.SCALING_FACTOR: True,
            RoutingCapability.GROUPS: _BY_LOGITS,
            RoutingCapability.HASH_LAYERS: _BY_LOGITS,
            RoutingCapability.FUSED_KERNEL: Rejected("the kernel computes one softmax of both experts"),
            RoutingCapability.OTHER_SCORES: Rejected("its weights are shares of a softmax"),
            RoutingCapability.EXPERT_BIAS: _BY_LOGITS,
            RoutingCapability.REPLAY: _BY_LOGITS,
            RoutingCapability.SPARSEMIXER: True,
            RoutingCapability.LOSSES: True,
            RoutingCapability.CAPACITY: True,
            RoutingCapability.OUR_KERNEL: True,
            RoutingCapability.PADDING: True,
            RoutingCapability.GRAPH: True,
            RoutingCapability.UPCYCLING: True,
        }
    ),
)
