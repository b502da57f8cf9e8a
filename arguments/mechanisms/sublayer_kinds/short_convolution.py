"""Gated short convolutions (LFM2)."""

from arguments.mechanisms.sublayer_kinds.declaration import Sublayer

SHORT_CONVOLUTION = Sublayer(
    key="short_convolution",
    name="short convolution",
    built_by="short_convolution.ShortConvolution",
    variant="short_conv",
    in_some_layers=True,
    is_upstream=False,
)
