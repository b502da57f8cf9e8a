"""Latent attention, with low-rank compressed keys and values (MLA)."""

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

LATENT_ATTENTION = SublayerDeclaration(
    key="latent_attention",
    name="latent attention",
    built_by="mla.MultiLatentAttention",
    letter="+",
    is_attention=True,
    switch="multi_latent_attention",
    reads_latents=True,
    capabilities=MappingProxyType(
        {
            **dict.fromkeys((*OF_SCORES, *OF_ROTATION, *OF_LATENTS, *OF_TRAINING), True),
            **dict.fromkeys(OF_HEADS, Rejected("its keys and values come from latents")),
            SublayerCapability.NORMS_AFTER_ROPE: Rejected("its norms are of latents"),
            SublayerCapability.NORMS_OF_ALL_HEADS: Rejected("its norms are of latents"),
            SublayerCapability.CHANNEL_GATES: Rejected(
                "the gate is part of the fused projection of queries, keys and values, which it does not have; "
                "--head-wise-attn-gate gates its heads"
            ),
            SublayerCapability.MULTIPLIER: Rejected("its scores are divided by the root of the key size"),
            SublayerCapability.WINDOW_SINKS: Rejected("its keys and values come from latents"),
            SublayerCapability.INDEXER_LOSS: NoEffect("it has no indexer"),
            SublayerCapability.OUTPUT_BIAS: Rejected("the bias is built for softmax attention in every layer"),
            SublayerCapability.LINEAR_LAYERS: True,
            SublayerCapability.NORM_AFTER: True,
            SublayerCapability.NORMED_RESIDUAL: True,
            SublayerCapability.FROZEN_BACKBONE: Rejected("its norms belong to frozen projections"),
            SublayerCapability.UPCYCLING: True,
            SublayerCapability.LEGACY_FORMAT: True,
        }
    ),
)
