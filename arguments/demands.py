"""Which flags demand which capabilities of mechanisms, as they declare it (schema.py)."""

from enum import Enum
from typing import TypeVar

from arguments.container import OPTIONS

C = TypeVar("C", bound=Enum)


def demands(capabilities: type[C]) -> dict[str, C]:
    """Return, by destination, the capability of a kind of mechanism that a flag demands by values but its default."""
    found = ((dest, each) for dest, option in OPTIONS.items() for each in option.demands)
    return {dest: each for dest, each in found if isinstance(each, capabilities)}


def leading_demands(capabilities: type[C]) -> dict[str, C]:
    """Return `demands` without flags that need another one which demands the same: that one is rejected instead."""
    found = demands(capabilities)
    return {
        dest: each for dest, each in found.items() if not any(found.get(other) is each for other in OPTIONS[dest].needs)
    }
