"""Attention by fused kernels, which store no scores; and the choice of torch or TransformerEngine among all kernels."""

from types import MappingProxyType

from arguments.mechanisms.attention_backend_kinds.declaration import (
    AttentionBackendCapability,
    AttentionBackendDeclaration,
)
from arguments.mechanisms.support import Rejected

_HALF = Rejected("its kernel takes bf16 and fp16, not fp32")

FLASH = AttentionBackendDeclaration(
    key="flash",
    name="FlashAttention",
    switch="NVTE_FLASH_ATTN",
    capabilities=MappingProxyType(
        {
            AttentionBackendCapability.LIBRARY: True,
            AttentionBackendCapability.FP32: _HALF,
        }
    ),
)
FUSED = AttentionBackendDeclaration(
    key="fused",
    name="cuDNN",
    switch="NVTE_FUSED_ATTN",
    capabilities=MappingProxyType(
        {
            AttentionBackendCapability.LIBRARY: True,
            AttentionBackendCapability.FP32: _HALF,
        }
    ),
)
AUTO = AttentionBackendDeclaration(
    key="auto",
    name="automatic",
    capabilities=MappingProxyType(dict.fromkeys(AttentionBackendCapability, True)),
)
