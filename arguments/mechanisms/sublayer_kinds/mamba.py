"""Mamba-2."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

MAMBA = Sublayer(
    key="mamba",
    name="Mamba-2",
    built_by="mamba.MambaMixer",
    letter="M",
    has_legacy_places=True,
)
