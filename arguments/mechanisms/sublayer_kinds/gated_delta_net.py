"""Gated DeltaNet: linear attention with one decay for each head (Qwen3-Next)."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

GATED_DELTA_NET = Sublayer(
    key="gated_delta_net",
    name="gated DeltaNet",
    built_by="gated_delta_net.GatedDeltaNet",
    letter="G",
    variant="gdn",
    old_variants=("gated_delta_net",),
    unbuilt_variants=("gdn2",),
    in_some_layers=True,
    has_delta_rule=True,
    kernel="delta-rule",
)
