"""Kimi delta attention: a gated DeltaNet with a decay for each channel of a key (Kimi-Linear)."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

KIMI_DELTA_ATTENTION = Sublayer(
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
)
