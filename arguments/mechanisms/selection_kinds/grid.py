"""FineRMoE: in every slice of the grid of experts the best group, and in it the best experts."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import DeclaredSelection, RoutingCapability
from arguments.mechanisms.support import Rejected

GRID = DeclaredSelection(
    key="grid",
    name="FineRMoE",
    mention="{finermoe_intermediate_granularity:flag} and {finermoe_output_granularity:flag}",
    asked=lambda moe: moe.finermoe_intermediate_granularity is not None or moe.finermoe_output_granularity is not None,
    learns_from_one=True,  # slices are counted by rules/finermoe.py
    capabilities=MappingProxyType(
        {
            RoutingCapability.PRE_SOFTMAX: Rejected(
                "its weights are a softmax over the chosen experts of all slices together"
            ),
            RoutingCapability.SCALING_FACTOR: Rejected("its weights add up to 1"),
            RoutingCapability.GROUPS: Rejected("it selects groups itself"),
            RoutingCapability.HASH_LAYERS: Rejected("a table of experts has no slices"),
            RoutingCapability.FUSED_KERNEL: Rejected("the fused kernel does not know its groups"),
            RoutingCapability.OTHER_SCORES: Rejected("its scores are a softmax"),
            RoutingCapability.EXPERT_BIAS: True,
            RoutingCapability.REPLAY: Rejected("their experts are chosen slice by slice"),
            RoutingCapability.FINE_GRAINED: True,
            RoutingCapability.SPARSEMIXER: True,  # which rejects this one
            RoutingCapability.LOSSES: True,
            RoutingCapability.CAPACITY: True,
            RoutingCapability.OUR_KERNEL: Rejected(
                "the kernel of the router does not know its groups; name the others"
            ),
            RoutingCapability.PADDING: True,
            RoutingCapability.GRAPH: True,
            RoutingCapability.UPCYCLING: True,
        }
    ),
)
