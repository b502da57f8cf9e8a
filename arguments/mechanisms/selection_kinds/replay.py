"""Experts from outside, weighed as top-k weighs them."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability, SelectionDeclaration

REPLAY = SelectionDeclaration(
    key="replay",
    name="replay of routing",
    mention="{moe_enable_routing_replay:flag}",
    asked=lambda moe: moe.moe_enable_routing_replay,
    asked_by=SelectionCapability.REPLAY,
    capabilities=MappingProxyType(dict.fromkeys(SelectionCapability, True)),
)
