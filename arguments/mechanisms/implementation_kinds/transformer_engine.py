"""TransformerEngine's layers, where it supports what flags ask for (arguments/te_support.py)."""

from types import MappingProxyType

from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability, ImplementationDeclaration

TRANSFORMER_ENGINE = ImplementationDeclaration(
    key="transformer_engine",
    name="TransformerEngine",
    package="transformer_engine",
    has_attention=True,
    has_quantizers=True,
    fuses_norms=True,
    switches=MappingProxyType({"apply_query_key_layer_scaling": "NVTE_APPLY_QK_LAYER_SCALING"}),
    capabilities=MappingProxyType(
        {
            ImplementationCapability.DELAYED_WGRAD: True,
            ImplementationCapability.ACTIVATION_OFFLOAD: True,
            ImplementationCapability.OP_FUSER: True,
        }
    ),
)
