"""Sparse attention of DeepSeek-V3.2 (DSA): latent attention to keys that an indexer selects."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

SPARSE_ATTENTION = Sublayer(
    key="sparse_attention",
    name="sparse attention",
    built_by="mla.MultiLatentAttention",
    letter="D",
    variant="dsa",
    is_attention=True,
    reads_latents=True,
    has_indexer=True,
    selects_keys=True,
    is_megatron_attention=True,
    has_legacy_places=True,
    kernel="sparse-attention",
    has_rules=True,
)
