"""Kimi delta attention: the bound of its decays."""

import math
from collections.abc import Iterator

from arguments.mechanisms.sublayer_kinds.kimi_delta_attention import KIMI_DELTA_ATTENTION
from arguments.mechanisms.sublayers import variant_of
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Settings, Violation


def check_decay_bound(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    bound = s.kda_decay_lower_bound
    if variant_of(s) is KIMI_DELTA_ATTENTION and bound is not None and not -math.inf < bound < 0:
        yield s.violation("{kda_decay_lower_bound} must be below zero: it bounds the logarithm of a decay.")
