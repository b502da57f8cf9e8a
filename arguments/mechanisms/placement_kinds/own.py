"""Every rank computes the tokens of its own experts."""

from types import MappingProxyType

from arguments.mechanisms.placement_kinds.declaration import PlacementCapability, PlacementDeclaration

OWN = PlacementDeclaration(
    key="own",
    name="own experts",
    capabilities=MappingProxyType(
        {
            PlacementCapability.LIBRARY_EXPERTS: True,
            PlacementCapability.PREPROCESS_GRAPH: True,
            PlacementCapability.PADDED_GRAPH: True,
            PlacementCapability.MLP_CHUNKS: True,
            PlacementCapability.ADAPTERS: True,
            PlacementCapability.OUTPUT_SLICES: True,
        }
    ),
)
