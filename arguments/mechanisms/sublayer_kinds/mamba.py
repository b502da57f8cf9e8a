"""Mamba-2."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

MAMBA = Sublayer(
    key="mamba",
    name="Mamba-2",
    built_by="mamba.MambaMixer",
    letter="M",
    input_projection="mixer.in_proj",
    has_legacy_places=True,
)
