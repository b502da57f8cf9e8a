"""Experts by token id in the first layers: a table says which."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability, SelectionDeclaration
from arguments.mechanisms.support import NoEffect, Rejected

_BY_TABLE = NoEffect("a table chooses the experts")

HASH = SelectionDeclaration(
    key="hash_routing",
    name="hash routing",
    mention="{moe_n_hash_layers}",
    asked=lambda moe: moe.moe_n_hash_layers > 0,
    asked_by=SelectionCapability.HASH_LAYERS,
    num_layers=lambda moe: moe.moe_n_hash_layers,
    tables=("tid2eid",),
    has_rules=True,
    capabilities=MappingProxyType(
        {
            SelectionCapability.PRE_SOFTMAX: NoEffect("a softmax is always over all experts"),
            SelectionCapability.SCALING_FACTOR: True,
            SelectionCapability.GROUPS: _BY_TABLE,
            SelectionCapability.HASH_LAYERS: True,
            SelectionCapability.FUSED_KERNEL: _BY_TABLE,
            SelectionCapability.OTHER_SCORES: True,
            SelectionCapability.EXPERT_BIAS: _BY_TABLE,
            SelectionCapability.REPLAY: _BY_TABLE,
            SelectionCapability.LARGEST_LOGITS: True,  # in the layers without a table
            SelectionCapability.LOSSES: True,
            SelectionCapability.CAPACITY: True,
            SelectionCapability.OUR_KERNEL: True,
            SelectionCapability.PADDING: True,
            SelectionCapability.GRAPH: True,
            SelectionCapability.UPCYCLING: Rejected("a dense model has no table of experts"),
        }
    ),
)
