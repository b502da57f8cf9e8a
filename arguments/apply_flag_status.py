"""Apply flag_status.py to a command line: reject what is not implemented, and note what is renamed or has no effect."""

from collections.abc import Collection, Iterator

from arguments.flag_status import (
    ARCHITECTURE_FLAGS,
    NO_EFFECT,
    NOT_IMPLEMENTED,
    RENAMED,
    REQUIRES,
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
            yield s.violation("{:shown}: {what} is not implemented yet", dest, kind="later", what=feature.what)


def _check_unsupported(s: Settings) -> Iterator[Violation]:
    for dest, unsupported in UNSUPPORTED.items():
        value, values = s.values[dest], unsupported.values
        if value in values if values else value != s.default(dest):
            yield s.violation("{:shown}: {instead}", dest, kind="product", instead=unsupported.instead)


def note_flag_status(s: Settings, unread: Collection[str]) -> None:
    """Record every given flag that is renamed or has no effect.

    Args:
        unread: destinations that are given, with a value that is rejected.
    """
    rejected = {dest for dest in NOT_IMPLEMENTED if _is_feature_requested(s, dest)}
    for dest in s.given_dests():
        if dest in RENAMED:
            s.note_renamed(s.flag(dest), RENAMED[dest])
        elif dest in NO_EFFECT and dest not in rejected:
            given = s.flag(dest) if s.source[dest] == "derived" else s.shown(dest)  # not a value that a rule chose
            s.note_no_effect(given, NO_EFFECT[dest])
    for required, dests in REQUIRES:
        if not any(_is_on(s, name) or name.partition("=")[0] in unread for name in required):
            requirement = " or ".join(_requirement(s, name) for name in required)
            for dest in dests.split():
                if s.given(dest) and s.values[dest] != s.default(dest):
                    s.note_no_effect(s.shown(dest), f"without {requirement}")


def _is_on(s: Settings, requirement: str) -> bool:
    """Return whether "dest" is set (the size of a dimension: above 1), or "dest=value" holds."""
    dest, _, wanted = requirement.partition("=")
    value, default = s.values[dest], s.default(dest)
    if wanted:
        return value == wanted
    return bool(value) and not (type(value) is int and value == default == 1)


def _requirement(s: Settings, requirement: str) -> str:
    dest, _, value = requirement.partition("=")
    if value:
        return f"{s.flag(dest)} {value}"
    if dest in NOT_IMPLEMENTED and (values := NOT_IMPLEMENTED[dest].values):
        return f"{s.flag(dest)} {values[0]}"
    default = s.default(dest)
    if default is True:  # on unless it is switched off
        return f"what {s.flag(dest)} switches off"
    return f"{s.flag(dest)} above 1" if isinstance(default, int) and not isinstance(default, bool) else s.flag(dest)


def can_count_params(s: Settings, violations: list[Violation]) -> bool:
    """Return whether the model is well defined, so that its parameters can be counted in spite of the violations."""
    if any(violation.kind not in ("later", "product", "machine", "note") for violation in violations):
        return False
    return not any(_is_feature_requested(s, dest) for dest in ARCHITECTURE_FLAGS)
