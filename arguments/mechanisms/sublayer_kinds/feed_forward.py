"""The sublayers that mix no positions: an MLP, or experts."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

MLP = Sublayer(key="mlp", name="feed-forward", letter="-", has_legacy_places=True)
EXPERTS = Sublayer(key="experts", name="experts", letter="E", has_legacy_places=True)
