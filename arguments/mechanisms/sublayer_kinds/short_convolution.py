"""Gated short convolutions (LFM2)."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_ATTENTION,
    OF_TRAINING,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected

SHORT_CONVOLUTION = SublayerDeclaration(
    key="short_convolution",
    name="short convolution",
    built_by="short_convolution.ShortConvolution",
    variant="short_conv",
    in_some_layers=True,
    is_upstream=False,
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
