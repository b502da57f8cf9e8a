"""Experts by token id in the first layers: a table says which."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import Capability, NoEffect, Rejected, Selection

_BY_TABLE = NoEffect("a table chooses the experts")

HASH = Selection(
    key="hash_routing",
    name="hash routing",
    mention="{moe_n_hash_layers}",
    asked=lambda moe: moe.moe_n_hash_layers > 0,
    num_layers=lambda moe: moe.moe_n_hash_layers,
    tables=("tid2eid",),
    capabilities=MappingProxyType(
        {
            Capability.PRE_SOFTMAX: NoEffect("a softmax is always over all experts"),
            Capability.SCALING_FACTOR: True,
            Capability.GROUPS: _BY_TABLE,
            Capability.HASH_LAYERS: True,
            Capability.FUSED_KERNEL: _BY_TABLE,
            Capability.OTHER_SCORES: True,
            Capability.EXPERT_BIAS: _BY_TABLE,
            Capability.REPLAY: _BY_TABLE,
            Capability.FINE_GRAINED: True,  # which rejects this one
            Capability.SPARSEMIXER: True,  # which rejects this one
            Capability.LOSSES: True,
            Capability.CAPACITY: True,
            Capability.OUR_KERNEL: True,
            Capability.PADDING: True,
            Capability.GRAPH: True,
            Capability.UPCYCLING: Rejected("a dense model has no table of experts"),
        }
    ),
)
