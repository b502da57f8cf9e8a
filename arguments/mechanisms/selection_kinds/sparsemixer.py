"""Two experts by logits, each with a separate softmax."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import Capability, Rejected, Selection

_BY_LOGITS = Rejected("its two experts are those of the largest logits")

SPARSEMIXER = Selection(
    key="sparsemixer",
    name="SparseMixer",
    mention="{moe_router_sparsemixer_jitter:flag}",
    asked=lambda moe: moe.moe_router_sparsemixer_jitter is not None,
    capabilities=MappingProxyType(
        {
            Capability.PRE_SOFTMAX: _BY_LOGITS,
            Capability.SCALING_FACTOR: True,
            Capability.GROUPS: _BY_LOGITS,
            Capability.HASH_LAYERS: _BY_LOGITS,
            Capability.FUSED_KERNEL: Rejected("the kernel computes one softmax of both experts"),
            Capability.OTHER_SCORES: Rejected("its weights are shares of a softmax"),
            Capability.EXPERT_BIAS: _BY_LOGITS,
            Capability.REPLAY: _BY_LOGITS,
            Capability.FINE_GRAINED: _BY_LOGITS,
            Capability.SPARSEMIXER: True,
            Capability.LOSSES: True,
            Capability.CAPACITY: True,
            Capability.OUR_KERNEL: True,
            Capability.PADDING: True,
            Capability.GRAPH: True,
            Capability.UPCYCLING: True,
        }
    ),
)
