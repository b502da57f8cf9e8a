"""Kimi delta attention: a gated DeltaNet with a decay for each channel of a key (Kimi-Linear)."""

from types import MappingProxyType

from arguments.mechanisms.sublayer_kinds.declaration import (
    OF_ATTENTION,
    OF_TRAINING,
    SublayerCapability,
    SublayerDeclaration,
)
from arguments.mechanisms.support import NoEffect, Rejected

KIMI_DELTA_ATTENTION = SublayerDeclaration(
    key="kimi_delta_attention",
    name="Kimi delta attention",
    built_by="kimi_delta_attention.KimiDeltaAttention",
    variant="kda",
    in_some_layers=True,
    has_delta_rule=True,
    decays_by_channel=True,
    gate_rank="kda_gate_rank",
    is_upstream=False,
    has_rules=True,
    toy_sizes=(("kda_gate_rank", 8),),
    draws=(("kda_gate_rank", (None, 8)), ("kda_decay_lower_bound", (None, -5.0))),
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
