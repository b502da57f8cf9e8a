"""Kinds of --attn-temperature-tuning, by the value of the flag."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class QueryTemperatureKind:
    """Which queries have a factor.

    Attributes:
        first: number of the first position.
        without_rope: only layers without rotary positions have it, not all.
    """

    first: int
    without_rope: bool


QUERY_TEMPERATURES: Mapping[str, QueryTemperatureKind] = MappingProxyType(
    {
        "llama4": QueryTemperatureKind(first=1, without_rope=True),
        "mistral4": QueryTemperatureKind(first=0, without_rope=False),
    }
)
