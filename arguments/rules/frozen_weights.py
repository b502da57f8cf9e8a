"""What excludes frozen weights, whatever else is trained: adapters, or experts alone."""

from arguments.mechanisms.formats import FLAGS
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import SHARDINGS
from arguments.mechanisms.support import rejected_flags

EXCLUDED = (
    *rejected_flags(SHARDINGS, ShardingCapability.FROZEN),
    *tuple((flags.name, "it would quantize frozen weights in every iteration again") for flags in FLAGS),
    ("qk_clip", "it scales weights, which are frozen"),
    ("cuda_graph_impl", "no graph has captured layers with frozen weights yet"),
)
"""Destinations of flags, and why."""
