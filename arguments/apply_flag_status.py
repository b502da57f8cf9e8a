"""Apply flag_status.py to a command line: reject what is not implemented, and note what is renamed or has no effect."""

from collections.abc import Iterator

from arguments.flag_status import (
    ARCHITECTURE_FLAGS,
    NO_EFFECT,
    NOT_IMPLEMENTED,
    RENAMED,
    UNSUPPORTED,
)
from arguments.settings import Settings, Violation


def check_flag_status(s: Settings) -> list[Violation]:
    """Return a violation for every flag that is not implemented or not supported. The settings must be resolved."""
    return [*_check_not_implemented(s), *_check_unsupported(s)]


def _is_feature_requested(s: Settings, dest: str) -> bool:
    return NOT_IMPLEMENTED[dest].is_requested(s.values[dest], s.default(dest))


def _check_not_implemented(s: Settings) -> Iterator[Violation]:
    for dest, feature in NOT_IMPLEMENTED.items():
        if _is_feature_requested(s, dest) and s.source[dest] != "default":
            asked = s.with_value(dest, feature.requested(s.values[dest]))
            message = "{asked}: {what} is not implemented yet"
            yield s.violation(message, dest, kind="later", asked=asked, what=feature.what)


def _check_unsupported(s: Settings) -> Iterator[Violation]:
    for dest, unsupported in UNSUPPORTED.items():
        value, values = s.values[dest], unsupported.values
        if value in values if values else value != s.default(dest):
            yield s.violation("{:shown}: {instead}", dest, kind="product", instead=unsupported.instead)


def note_flag_status(s: Settings) -> None:
    """Record every given flag that is renamed, or that never has an effect."""
    rejected = {dest for dest in NOT_IMPLEMENTED if _is_feature_requested(s, dest)}
    for dest in s.given_dests():
        if dest in RENAMED:
            s.note_renamed(s.flag(dest), RENAMED[dest])
        elif dest in NO_EFFECT and dest not in rejected:
            given = s.flag(dest) if s.source[dest] == "derived" else s.shown(dest)  # not a value that a rule chose
            s.note_no_effect(given, NO_EFFECT[dest])


def can_count_params(s: Settings, violations: list[Violation]) -> bool:
    """Return whether the model is well defined, so that its parameters can be counted in spite of the violations."""
    if any(violation.kind not in ("later", "product", "machine", "note") for violation in violations):
        return False
    return not any(_is_feature_requested(s, dest) for dest in ARCHITECTURE_FLAGS)
