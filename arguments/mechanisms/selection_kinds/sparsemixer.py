"""Two experts by logits, each with a separate softmax."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability, SelectionDeclaration
from arguments.mechanisms.support import Rejected

_BY_LOGITS = Rejected("its two experts are those of the largest logits")

SPARSEMIXER = SelectionDeclaration(
    key="sparsemixer",
    name="SparseMixer",
    mention="{moe_router_sparsemixer_jitter:flag}",
    asked=lambda moe: moe.moe_router_sparsemixer_jitter is not None,
    has_rules=True,
    saves=lambda tokens, experts, topk: (  # a softmax of each choice, and what it leaves out
        ("indices", (tokens, topk), 8),
        ("scores", (topk, tokens, experts), None),
        ("masks", (topk, tokens, experts), 1),
    ),
    asked_by=SelectionCapability.LARGEST_LOGITS,
    asked_because="SparseMixer's two experts are those of the largest logits",
    capabilities=MappingProxyType(
        {
            SelectionCapability.PRE_SOFTMAX: _BY_LOGITS,
            SelectionCapability.SCALING_FACTOR: True,
            SelectionCapability.GROUPS: _BY_LOGITS,
            SelectionCapability.HASH_LAYERS: _BY_LOGITS,
            SelectionCapability.FUSED_KERNEL: Rejected("the kernel computes one softmax of both experts"),
            SelectionCapability.OTHER_SCORES: Rejected("its weights are shares of a softmax"),
            SelectionCapability.EXPERT_BIAS: _BY_LOGITS,
            SelectionCapability.REPLAY: _BY_LOGITS,
            SelectionCapability.LARGEST_LOGITS: True,
            SelectionCapability.LOSSES: True,
            SelectionCapability.CAPACITY: True,
            SelectionCapability.OUR_KERNEL: True,
            SelectionCapability.PADDING: True,
            SelectionCapability.GRAPH: True,
            SelectionCapability.UPCYCLING: True,
        }
    ),
)
