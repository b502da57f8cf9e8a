"""A converter between keys of config.json and flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Flags = dict[str, Any]
Config = Mapping[str, Any]


class ReadKeys(dict[str, Any]):
    """A config.json that keeps which of its keys were read.

    Attributes:
        read: names of keys, also of those that it lacks.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@dataclass(frozen=True)
class ConfigConverter:
    """A pair of functions, config -> flags and flags -> config, which may raise CheckpointError."""

    read: Callable[[Config], Flags]
    write: Callable[[Mapping[str, Any]], dict[str, Any]]
