"""Multi-head and grouped-query softmax attention."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_HEADS,
    OF_LATENTS,
    OF_ROTATION,
    OF_SCORES,
    OF_TRAINING,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected

SOFTMAX_ATTENTION = SublayerDeclaration(
    key="softmax_attention",
    name="softmax attention",
    built_by="attention.SelfAttention",
    letter="*",
    is_attention=True,
    capabilities=MappingProxyType(
        {
            **dict.fromkeys((*OF_SCORES, *OF_ROTATION, *OF_HEADS, *OF_TRAINING), True),
            **dict.fromkeys(OF_LATENTS, Rejected("it has no latents")),
            SublayerCapability.INDEXER_LOSS: NoEffect("it has no indexer"),
            SublayerCapability.OUTPUT_BIAS: True,
            SublayerCapability.LINEAR_LAYERS: True,
            SublayerCapability.NORM_AFTER: True,
            SublayerCapability.NORMED_RESIDUAL: True,
            SublayerCapability.FROZEN_BACKBONE: True,
            SublayerCapability.UPCYCLING: True,
            SublayerCapability.LEGACY_FORMAT: True,
        }
    ),
)
