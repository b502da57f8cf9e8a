"""Multi-head and grouped-query softmax attention."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

SOFTMAX_ATTENTION = Sublayer(
    key="softmax_attention",
    name="softmax attention",
    built_by="attention.SelfAttention",
    letter="*",
    is_attention=True,
    has_legacy_places=True,
)
