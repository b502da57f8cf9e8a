"""Command lines for the tests of rules: a base line, changes to it, and the recorded cases."""

import json
from functools import cache
from pathlib import Path

from arguments.machine import check_machine
from arguments.parse import resolve_command_line
from arguments.settings import Settings, Violation

DATA = Path(__file__).parents[1] / "data"
ACCEPTED = ("later", "note")
"""Kinds of findings that are no mistake of the command line."""


@cache
def recorded(name: str):
    """Read tests/data/NAME.json."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def base_line() -> list[str]:
    """A valid line: 8 layers, 8 experts, bf16, 16 sequences of 1024 tokens, for 8 ranks."""
    return [*recorded("rule_cases")["base"]]


def without(argv: list[str], names: list[str]) -> list[str]:
    """Leave flags out, with their values."""
    kept, drop = [], False
    for token in argv:
        if token.startswith("--"):
            drop = token in names
        if not drop:
            kept.append(token)
    return kept


def changed(added: str = "", removed: str = "") -> list[str]:
    """The base line without some flags and with others at its end."""
    return without(base_line(), removed.split()) + added.split()


def findings(
    argv: list[str], world_size: int | None, env: dict[str, str] | None = None, arch: int | None = None
) -> tuple[Settings, list[Violation]]:
    """Resolve a line, and everything that is wrong with it here and on that machine."""
    settings, violations = resolve_command_line(argv, world_size)
    violations += check_machine(settings, {} if env is None else env, arch)
    return settings, [violation for violation in violations if violation.kind not in ACCEPTED]


def violated_flags(violations: list[Violation]) -> set[str]:
    return {flag for violation in violations for flag in violation.flags}
