"""State of all flags while a command line is being resolved.

`Settings` is the mutable state between parsing and freezing. Rules read it by destination name and write derived values
through `set_derived`, so that every value has a recorded source.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

from arguments.schema import Option

SOURCES = ("default", "preset", "recipe", "command line", "derived")
_LONG_WORD, _KEPT_LETTERS, _MAX_LINE = re.compile(r"\S{500,}"), 80, 4000
KINDS = ("rule", "unknown", "value", "product", "later", "recipe", "machine", "build", "note")


def shorten(text: str) -> str:
    """Cut words and lines of a message: what was given may have any length."""
    lines = (
        _LONG_WORD.sub(lambda word: f"{word[0][:_KEPT_LETTERS]}... ({len(word[0])} characters)", line)
        for line in text.split("\n")
    )
    return "\n".join(
        line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}... ({len(line)} characters)" for line in lines
    )


@dataclass(frozen=True)
class Violation:
    """One reason why a command line cannot run.

    Attributes:
        flags: as the user spelled them, or their usual spelling.
        message: a full sentence with the values, what is needed, and why.
        kind: one of KINDS. "later": a feature that is not implemented yet. "product": a flag of another product.
            "machine" and "note": found by machine.py; a note is logged and the run continues. "build": an error that
            Megatron-LM raises only when it builds the model or the groups; `parse_args` accepts it, as Megatron-LM's
            parser does, and every start of a run rejects it.
    """

    flags: tuple[str, ...]
    message: str
    kind: str = "rule"

    def __post_init__(self):
        object.__setattr__(self, "message", shorten(self.message))

    def __str__(self) -> str:
        return self.message


class Limit(NamedTuple):
    """A combination that this program rejects, although Megatron-LM runs it or has no such flag.

    A rule yields its limits whether they apply or not, so that the manual's page of rejected combinations
    (arguments/refused.py) lists them all.

    Attributes:
        applies: whether the settings have the combination.
        message, dests, kind: see `Settings.violation`. The message needs no other values.
    """

    applies: object
    message: str
    dests: tuple[str, ...] = ()
    kind: str = "rule"


class ArgumentError(ValueError):
    """A command line that cannot run.

    `violations` lists every reason; `settings` holds what was resolved so far; `subject` is what was checked.
    """

    def __init__(
        self,
        violations: Iterable[Violation],
        settings: "Settings | None" = None,
        subject: str = "the arguments",
    ):
        self.violations = list(violations)
        self.settings = settings
        self.notes = settings.lines() if settings is not None else []
        count = len(self.violations)
        head = f"{count} problem{'s' if count > 1 else ''} with {subject}:"
        super().__init__("\n".join([head, *(f"  - {violation.message}" for violation in self.violations)]))


def is_eval_only(skip_train: bool, moe_use_upcycling: bool, ckpt_convert_format: str | None) -> bool:
    """Return whether a run with these flags only evaluates a model: --skip-train without upcycling or conversion."""
    return bool(skip_train) and not moe_use_upcycling and ckpt_convert_format is None


class Settings:
    """Value and source of every flag, by destination name.

    Reading or writing a name that is no destination raises AttributeError.

    Attributes:
        values: value by destination.
        source: one of SOURCES by destination.
        spelling: the flag as typed, by destination; only of flags that were given.
        requests: value and source of a flag as it was given, by destination; rules may change both.
        why: reason of a derived value, by destination.
        typed: destinations given on the command line.
        notes: one-line notices.
        renamed: pairs of an old spelling and its replacement.
        no_effect: pairs of a flag and the reason why it has no effect.
        recipe_env: environment variables that a recipe sets.
        changes: number of writes so far.
    """

    _ATTRIBUTES = (
        "typed",
        "source",
        "spelling",
        "requests",
        "why",
        "notes",
        "renamed",
        "no_effect",
        "recipe_env",
        "changes",
        "values",
        "_options",
    )

    def __init__(self, options: Mapping[str, Option]):
        self._options = options
        self.values: dict[str, Any] = {dest: option.default for dest, option in options.items()}
        self.typed: set[str] = set()
        self.source = dict.fromkeys(options, "default")
        self.spelling: dict[str, str] = {}
        self.requests: dict[str, tuple[object, str]] = {}
        self.why: dict[str, str] = {}
        self.notes: list[str] = []
        self.renamed: list[tuple[str, str]] = []
        self.no_effect: list[tuple[str, str]] = []
        self.recipe_env: dict[str, str] = {}
        self.changes = 0

    def __getattr__(self, dest: str) -> Any:
        try:
            return self.__dict__["values"][dest]
        except KeyError:
            raise AttributeError(f"there is no flag with the destination {dest!r}") from None

    def __setattr__(self, dest: str, value: object) -> None:
        if dest in Settings._ATTRIBUTES:
            object.__setattr__(self, dest, value)
        else:
            self.set_derived(dest, value, "")

    @property
    def is_eval_only(self) -> bool:
        """The same as `Arguments.is_eval_only`, before the settings are frozen."""
        return is_eval_only(self.skip_train, self.moe_use_upcycling, self.ckpt_convert_format)

    def set_given(self, dest: str, value: object, source: str, spelling: str) -> None:
        """Record a value from a preset, a recipe or the command line."""
        self._check_known(dest)
        self._write(dest, value, source)
        self.spelling[dest], self.requests[dest] = spelling, (value, source)
        if source == "command line":
            self.typed.add(dest)

    def set_derived(self, dest: str, value: object, why: str) -> None:
        """Record a value that follows from others; a flag that has the value already keeps its source."""
        self._check_known(dest)
        if self.values[dest] == value and type(self.values[dest]) is type(value):
            return
        self._write(dest, value, "derived")
        self.why[dest] = why

    def given(self, dest: str) -> bool:
        """Return whether a preset, a recipe or the command line set this flag, even if a rule changed it since."""
        self._check_known(dest)
        return dest in self.spelling

    def flag(self, dest: str) -> str:
        """Return the flag as the user spelled it, or its usual spelling."""
        self._check_known(dest)
        return self.spelling.get(dest, self._options[dest].spellings[0])

    def shown(self, dest: str) -> str:
        """Return `--flag value`, for messages."""
        return self.with_value(dest, self.values[dest])

    def with_value(self, dest: str, value: object) -> str:
        """Return `--flag value` for another value than the flag has now."""
        if isinstance(value, bool) or value is None:
            return self.flag(dest)
        return f"{self.flag(dest)} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"

    def describe(self, dest: str) -> str:
        """Return `--flag value` for messages, marked if the user did not give the value."""
        if self.values[dest] is None:
            return f"{self.flag(dest)} (not given)"
        source, why = self.source[dest], self.why.get(dest, "")
        if source not in ("default", "derived"):
            return self.shown(dest)
        if source == "default" or not why:
            return f"{self.shown(dest)} ({source})"
        return f"{self.shown(dest)} ({why if why.startswith('from --') else f'derived: {why}'})"

    def violation(self, message: str, *dests: str, kind: str = "rule", **values: object) -> Violation:
        """Return the violation of a rule about the flags in its message, the most important first.

        Args:
            message: a format string. `{dest}` stands for `describe(dest)`, `{dest:flag}` for `flag(dest)`,
                `{dest:shown}` for `shown(dest)` and `{dest:value}` for the value; `{}` for the next of `dests`.
            dests: flags whose names only the caller knows, then flags that the message does not name.
            kind: one of KINDS.
            values: other values in the message, by name.
        """
        fields = [name for _, name, _, _ in Formatter().parse(message) if name is not None and name not in values]
        unnamed = iter(dests)
        in_order = [*(name or next(unnamed) for name in fields), *unnamed]
        mentions = {dest: _Mention(self, dest) for dest in in_order}
        text = message.format(*(mentions[dest] for dest in dests), **mentions, **values)
        return Violation(tuple(map(self.flag, mentions)), text, kind)

    def words(self, mention: str) -> str:
        """Return a template of `violation` that only names flags, in words."""
        return self.violation(mention).message

    def note(self, line: str) -> None:
        """Record a one-line notice, once."""
        if line not in self.notes:
            self.notes.append(line)

    def default(self, dest: str) -> Any:
        """Return the default of a flag, which is Megatron's."""
        self._check_known(dest)
        return self._options[dest].default

    def given_dests(self) -> tuple[str, ...]:
        """Return the destinations that were given, in order of declaration."""
        return tuple(dest for dest in self._options if dest in self.spelling)

    def path_kinds(self) -> tuple[tuple[str, str], ...]:
        """Return destination and kind (see schema.py) of the given flags whose values are paths."""
        options = ((dest, self._options[dest].path) for dest in self.given_dests())
        return tuple((dest, kind) for dest, kind in options if kind is not None)

    def forget(self, dest: str) -> None:
        """Reset a flag to its default, as if it had not been given."""
        self._check_known(dest)
        self._write(dest, self._options[dest].default, "default")
        self.typed.discard(dest)
        self.spelling.pop(dest, None)
        self.requests.pop(dest, None)
        self.why.pop(dest, None)

    def note_renamed(self, flag: str, became: str) -> None:
        """Record once that an old spelling was read as another flag."""
        if (flag, became) not in self.renamed:
            self.renamed.append((flag, became))

    def note_no_effect(self, flag: str, reason: str) -> None:
        """Record once that a given flag has no effect; the reason may begin with "with" or "without"."""
        if (flag, reason) not in self.no_effect:
            self.no_effect.append((flag, reason))

    def lines(self) -> list[str]:
        """Return the lines to log: renamed flags, flags without effect, notices."""
        lines = [
            *(f"{flag} is now {became}" for flag, became in self.renamed),
            *(f"{flag} has no effect{_join_reason(reason)}" for flag, reason in self.no_effect),
            *self.notes,
        ]
        return [shorten(line) for line in lines]

    def _write(self, dest: str, value: object, source: str) -> None:
        self.values[dest], self.source[dest] = value, source
        self.changes += 1

    def _check_known(self, dest: str) -> None:
        if dest not in self.values:
            raise AttributeError(f"there is no flag with the destination {dest!r}")


class _Mention(NamedTuple):
    """A flag in a message, formatted by the name of a method of Settings, or "value"."""

    settings: Settings
    dest: str

    def __format__(self, style: str) -> str:
        if style == "value":
            return str(self.settings.values[self.dest])
        return getattr(self.settings, style or "describe")(self.dest)


def _join_reason(reason: str) -> str:
    return f" {reason}" if reason.startswith(("with ", "without ")) else f": {reason}"
