"""The top-k of scores, of groups or of all experts, with or without a bias: what runs if no flag asks for another."""

from types import MappingProxyType

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability, SelectionDeclaration

TOPK = SelectionDeclaration(
    key="topk",
    name="top-k",
    mention="{moe_router_topk:flag}",
    asked=lambda _moe: True,
    capabilities=MappingProxyType(dict.fromkeys(SelectionCapability, True)),
)
