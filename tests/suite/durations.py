"""Seconds of every test: recorded by every run, used for the order of the next."""

from __future__ import annotations

import pytest
from suite import record

CACHE = "moe-trainer/seconds"


def read(config: pytest.Config) -> dict[str, float]:
    """Return seconds by test: those of this checkout's last runs, else those of the repository's record."""
    cache = getattr(config, "cache", None)
    return record.read_seconds() | {name: max(pair) for name, pair in _own(cache).items()}


def write(config: pytest.Config, measured: dict[str, tuple[float, float]]) -> None:
    """Add what a run measured to this checkout's seconds: (wall, processor) by test."""
    cache = getattr(config, "cache", None)
    if cache is not None and measured:
        cache.set(CACHE, _own(cache) | measured)


def _own(cache: pytest.Cache | None) -> dict[str, tuple[float, float]]:
    """Return what earlier runs stored; a cache that something else has written is none."""
    stored = cache.get(CACHE, {}) if cache else {}
    pairs = stored.items() if isinstance(stored, dict) else ()
    return {
        name: pair
        for name, pair in pairs
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(each, (int, float)) for each in pair)
    }
