"""Ranges of number flags: the vocabulary of `flag(bounds=..., most=...)`.

What another flag can make right is no range: a rule says it.
"""

from typing import Literal

Bounds = Literal[">0", ">=0", "[0,1)", "[0,1]", "(0,1]", "any"]
"""Which numbers a flag takes; a number that fp32 rounds to 0 is not above 0. "any": negative ones too."""

MAX_LAYERS = 100_000
"""Beyond this a number of layers is a slip of the keyboard, and no list is made for it."""
MAX_SAMPLES = 10**12
"""Beyond this, sample counts no longer fit the 64-bit index of a dataset, whatever the batch size."""
MAX_SIZE = 2**31 - 1
"""Indices in kernels have 32 bits."""
MAX_EXPERTS = 1_000_000
MAX_WORKERS = 1024
MAX_MINUTES = 500_000
MAX_FP32 = 3.4028234663852886e38
MAX_STD = 1e6
