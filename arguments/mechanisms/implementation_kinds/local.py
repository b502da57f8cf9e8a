"""This program's own layers."""

from types import MappingProxyType

from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability, ImplementationDeclaration
from arguments.mechanisms.support import NoEffect, Rejected

LOCAL_LAYERS = ImplementationDeclaration(
    key="local",
    name="local layers",
    capabilities=MappingProxyType(
        {
            ImplementationCapability.DELAYED_WGRAD: Rejected("as in Megatron-LM"),
            ImplementationCapability.ACTIVATION_OFFLOAD: Rejected("as in Megatron-LM"),
            ImplementationCapability.OP_FUSER: NoEffect("experts are no operations of the library"),
        }
    ),
)
