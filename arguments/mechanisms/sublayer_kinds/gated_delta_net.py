"""Gated DeltaNet: linear attention with one decay for each head (Qwen3-Next)."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_ATTENTION,
    OF_TRAINING,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected

GATED_DELTA_NET = SublayerDeclaration(
    key="gated_delta_net",
    name="gated DeltaNet",
    built_by="gated_delta_net.GatedDeltaNet",
    letter="G",
    variant="gdn",
    old_variants=("gated_delta_net",),
    unbuilt_variants=("gdn2",),
    in_some_layers=True,
    has_delta_rule=True,
    kernel="delta-rule",
    capabilities=MappingProxyType(
        {
            **dict.fromkeys(OF_TRAINING, True),
            **dict.fromkeys(OF_ATTENTION, NoEffect("it has no keys that are compared with queries")),
            SublayerCapability.OUTPUT_BIAS: Rejected("the bias is built for softmax attention in every layer"),
            SublayerCapability.LINEAR_LAYERS: True,
            SublayerCapability.NORM_AFTER: True,
            SublayerCapability.NORMED_RESIDUAL: True,
            SublayerCapability.FROZEN_BACKBONE: Rejected("its small parameters are neither norms nor projections"),
            SublayerCapability.UPCYCLING: True,
            SublayerCapability.LEGACY_FORMAT: Rejected("the format has no known places for its parameters"),
        }
    ),
)
