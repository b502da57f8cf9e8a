"""Latent attention, with low-rank compressed keys and values (MLA)."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

LATENT_ATTENTION = Sublayer(
    key="latent_attention",
    name="latent attention",
    built_by="mla.MultiLatentAttention",
    letter="+",
    is_attention=True,
    reads_latents=True,
    has_legacy_places=True,
)
