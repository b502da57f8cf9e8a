"""Values by destination, spelled as flags: the way back from what parse.py makes of a command line."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf

from arguments.container import OPTIONS
from arguments.rules.derived_sizes import as_list
from arguments.schema import Option
from arguments.tokens import is_value


def to_command_line(values: MappingOf[str, object]) -> list[str]:
    """Spell values as flags in order of declaration; None and switches at their default are left out."""
    words: list[str] = []
    for dest, option in OPTIONS.items():
        if dest in values and values[dest] is not None:
            words += _spelled(option, values[dest])
    return words


def _spelled(option: Option, value: object) -> list[str]:
    if option.takes == 0:
        return [] if value == option.default else [(option.on if value else option.off)[0]]
    if option.is_list:
        return [option.on[0], *map(str, as_list(value))]
    if isinstance(value, list):
        return [option.on[0], _pattern_text(value)]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [option.on[0], text] if is_value(text) else [f"{option.on[0]}={text}"]


def _pattern_text(values: list[int]) -> str:
    """A per-layer pattern as the flags write it, such as ([0]*1+[1]*3)."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"
