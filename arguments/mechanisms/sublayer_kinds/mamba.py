"""Mamba-2."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_ATTENTION,
    OF_TRAINING,
    PATTERN,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected

MAMBA = SublayerDeclaration(
    key="mamba",
    name="Mamba-2",
    built_by="mamba.MambaMixer",
    letter="M",
    switch=PATTERN,
    capabilities=MappingProxyType(
        {
            **dict.fromkeys(OF_TRAINING, True),
            **dict.fromkeys(OF_ATTENTION, NoEffect("it has no keys that are compared with queries")),
            SublayerCapability.LINEAR_LAYERS: NoEffect("the letters of the pattern select layers"),
            SublayerCapability.NORM_AFTER: Rejected("Mamba layers have one norm, and their input as residual"),
            SublayerCapability.NORMED_RESIDUAL: Rejected("Mamba layers have one norm, and their input as residual"),
            SublayerCapability.FROZEN_BACKBONE: Rejected("Mamba layers are not sorted into backbone and rest"),
            SublayerCapability.UPCYCLING: Rejected("there is no dense model of such layers"),
            SublayerCapability.LEGACY_FORMAT: True,
        }
    ),
)
