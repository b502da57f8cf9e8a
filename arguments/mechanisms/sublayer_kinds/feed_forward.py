"""The sublayers that mix no positions: an MLP, or experts."""

from collections.abc import Mapping
from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_ATTENTION,
    OF_TRAINING,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Support

_CAPABILITIES: Mapping[SublayerCapability, Support] = MappingProxyType(
    {
        **dict.fromkeys(OF_TRAINING, True),
        **dict.fromkeys(OF_ATTENTION, NoEffect("it mixes no positions")),
        SublayerCapability.LINEAR_LAYERS: NoEffect("it mixes no positions"),
        SublayerCapability.NORM_AFTER: NoEffect("it mixes no positions"),
        SublayerCapability.NORMED_RESIDUAL: True,
        SublayerCapability.FROZEN_BACKBONE: True,
        SublayerCapability.UPCYCLING: True,
        SublayerCapability.LEGACY_FORMAT: True,
    }
)
MLP = SublayerDeclaration(key="mlp", name="feed-forward", letter="-", capabilities=_CAPABILITIES)
EXPERTS = SublayerDeclaration(key="experts", name="experts", letter="E", capabilities=_CAPABILITIES)
