"""A converter between keys of config.json and flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Flags = dict[str, Any]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigConverter:
    """A pair of functions, config -> flags and flags -> config, which may raise CheckpointError."""

    read: Callable[[Config], Flags]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]
