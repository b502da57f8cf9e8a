"""Multi-head and grouped-query softmax attention."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

SOFTMAX_ATTENTION = Sublayer(
    key="softmax_attention",
    name="softmax attention",
    built_by="attention.SelfAttention",
    letter="*",
    input_projection="self_attention.linear_qkv",
    has_legacy_places=True,
)
