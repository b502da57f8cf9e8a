"""FineRMoE: in every slice of the grid of experts the best group, and in it the best experts."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import Capability, Rejected, Selection

GRID = Selection(
    key="grid",
    name="FineRMoE",
    mention="{finermoe_intermediate_granularity:flag} and {finermoe_output_granularity:flag}",
    asked=lambda moe: moe.finermoe_intermediate_granularity is not None or moe.finermoe_output_granularity is not None,
    learns_from_one=True,  # slices are counted by rules/finermoe.py
    capabilities=MappingProxyType(
        {
            Capability.PRE_SOFTMAX: Rejected(
                "its weights are a softmax over the chosen experts of all slices together"
            ),
            Capability.SCALING_FACTOR: Rejected("its weights add up to 1"),
            Capability.GROUPS: Rejected("it selects groups itself"),
            Capability.HASH_LAYERS: Rejected("a table of experts has no slices"),
            Capability.FUSED_KERNEL: Rejected("the fused kernel does not know its groups"),
            Capability.OTHER_SCORES: Rejected("its scores are a softmax"),
            Capability.EXPERT_BIAS: True,
            Capability.REPLAY: Rejected("their experts are chosen slice by slice"),
            Capability.FINE_GRAINED: True,
            Capability.SPARSEMIXER: True,  # which rejects this one
            Capability.LOSSES: True,
            Capability.CAPACITY: True,
            Capability.OUR_KERNEL: Rejected("the kernel of the router does not know its groups; name the others"),
            Capability.PADDING: True,
            Capability.GRAPH: True,
            Capability.UPCYCLING: True,
        }
    ),
)
