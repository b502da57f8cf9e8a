"""Attention by plain GEMMs and a softmax, which store the scores."""

from types import MappingProxyType

from arguments.mechanisms.attention_backend_kinds.declaration import (
    AttentionBackendCapability,
    AttentionBackendDeclaration,
)
from arguments.mechanisms.support import NoEffect

UNFUSED = AttentionBackendDeclaration(
    key="unfused",
    name="unfused",
    stores_scores=True,
    switch="NVTE_UNFUSED_ATTN",
    capabilities=MappingProxyType(
        {
            AttentionBackendCapability.LIBRARY: True,
            AttentionBackendCapability.FP32: True,
        }
    ),
)
LOCAL_UNFUSED = AttentionBackendDeclaration(
    key="local",
    name="unfused, by local layers",
    stores_scores=True,
    capabilities=MappingProxyType(
        {
            AttentionBackendCapability.LIBRARY: NoEffect("the local layers compute attention"),
            AttentionBackendCapability.FP32: True,
        }
    ),
)
