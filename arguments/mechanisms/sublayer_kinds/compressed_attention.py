"""Compressed attention of DeepSeek-V4: a window, and compressed keys among which an indexer selects."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

COMPRESSED_ATTENTION = Sublayer(
    key="compressed_attention",
    name="compressed attention",
    built_by="compressed_attention.CompressedAttention",
    variant="dsv4_hybrid",
    is_attention=True,
    reads_latents=True,
    has_indexer=True,
    compresses_keys=True,
    is_megatron_attention=True,
    is_upstream=False,
    has_rules=True,
)
