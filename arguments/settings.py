"""What is known about every flag while a command line is being understood.

`Settings` is the mutable state between reading the tokens and freezing the result: rules read it by destination name
and write derived values through `set_derived`, so that every value keeps its source. `Violation` is one thing that is
wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arguments.schema import Option

SOURCES = ("default", "preset", "recipe", "command line", "derived")
KINDS = ("rule", "unknown", "value", "product", "later", "recipe", "machine", "build", "note")


@dataclass(frozen=True)
class Violation:
    """One reason why a command line cannot run.

    `flags` as the user typed them (or their usual spelling), `message` a whole sentence with values, need and reason;
    `kind` one of KINDS: "later" names a feature that this version does not have yet, "product" a flag of another
    product, "machine" and "note" come from machine.py (a note is said, and the run goes on), "build" is what Megatron-LM meets only when it
    builds the model or the groups: `parse_args` lets it pass as Megatron's parser does, every start refuses it.
    """

    flags: tuple[str, ...]
    message: str
    kind: str = "rule"

    def __str__(self) -> str:
        return self.message


class ArgumentError(ValueError):
    """A command line that cannot run; `violations` lists every reason, `settings` holds what was resolved so far."""

    def __init__(self, violations: Iterable[Violation], settings: "Settings | None" = None):
        self.violations = list(violations)
        self.settings = settings
        self.notes = settings.lines() if settings is not None else []
        count = len(self.violations)
        head = "1 problem with the arguments:" if count == 1 else f"{count} problems with the arguments:"
        super().__init__("\n".join([head, *(f"  - {violation.message}" for violation in self.violations)]))


def evaluates_only(skip_train: bool, moe_use_upcycling: bool, ckpt_convert_format: str | None) -> bool:
    """Does a run with these flags evaluate a model and nothing else: --skip-train that neither upcycles nor converts a checkpoint?"""
    return bool(skip_train) and not moe_use_upcycling and ckpt_convert_format is None


class Settings:
    """Every flag's value by destination name, with its source.

    Attributes besides the destinations: `typed` (destinations typed on the command line), `source[dest]` (one of
    SOURCES), `spelling[dest]` (the flag as typed), `why[dest]` (reason of a derived value), `notes` (one-line
    notices), `renamed` and `idle` (pairs of flag and text: what became of old spellings, why flags have no effect),
    `recipe_env` (environment variables a recipe asks for), `changes` (how often a value was written).
    Reading or writing a name that is no destination raises AttributeError.
    """

    _own = ("typed", "source", "spelling", "why", "notes", "renamed", "idle", "recipe_env", "changes", "values", "_options")

    def __init__(self, options: Mapping[str, Option]):
        self._options = options
        self.values = {dest: option.default for dest, option in options.items()}
        self.typed: set[str] = set()
        self.source = dict.fromkeys(options, "default")
        self.spelling: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.notes: list[str] = []
        self.renamed: list[tuple[str, str]] = []
        self.idle: list[tuple[str, str]] = []
        self.recipe_env: dict[str, str] = {}
        self.changes = 0

    def __getattr__(self, dest: str) -> object:
        try:
            return self.__dict__["values"][dest]
        except KeyError:
            raise AttributeError(f"there is no flag with the destination {dest!r}") from None

    def __setattr__(self, dest: str, value: object) -> None:
        if dest in Settings._own:
            object.__setattr__(self, dest, value)
        else:
            self.set_derived(dest, value, "")

    @property
    def evaluates_only(self) -> bool:
        """As `Arguments.evaluates_only`, before the settings are frozen."""
        return evaluates_only(self.skip_train, self.moe_use_upcycling, self.ckpt_convert_format)

    def set_given(self, dest: str, value: object, source: str, spelling: str) -> None:
        """Record a value from a preset, a recipe or the command line."""
        self._known(dest)
        self._write(dest, value, source)
        self.spelling[dest] = spelling
        if source == "command line":
            self.typed.add(dest)

    def set_derived(self, dest: str, value: object, why: str) -> None:
        """Record a value that follows from others; a value that is already so keeps its source."""
        self._known(dest)
        if self.values[dest] == value and type(self.values[dest]) is type(value):
            return
        self._write(dest, value, "derived")
        self.why[dest] = why

    def given(self, dest: str) -> bool:
        """Did a preset, a recipe or the command line set this flag (whatever a rule made of it since)?"""
        self._known(dest)
        return dest in self.spelling

    def flag(self, dest: str) -> str:
        """The flag as the user spelled it, or its usual spelling."""
        self._known(dest)
        return self.spelling.get(dest, self._options[dest].spellings[0])

    def shown(self, dest: str) -> str:
        """`--flag value`, for messages."""
        value = self.values[dest]
        if isinstance(value, bool) or value is None:
            return self.flag(dest)
        return f"{self.flag(dest)} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"

    def note(self, line: str) -> None:
        """Say something in one line, once."""
        if line not in self.notes:
            self.notes.append(line)

    def default(self, dest: str) -> object:
        """Megatron's default of a flag."""
        self._known(dest)
        return self._options[dest].default

    def given_dests(self) -> tuple[str, ...]:
        """The destinations that were given, in order of declaration."""
        return tuple(dest for dest in self._options if dest in self.spelling)

    def forget(self, dest: str) -> None:
        """Put a flag back to its default, as if it had not been given."""
        self._known(dest)
        self._write(dest, self._options[dest].default, "default")
        self.typed.discard(dest)
        self.spelling.pop(dest, None)
        self.why.pop(dest, None)

    def say_renamed(self, flag: str, became: str) -> None:
        """Record once that an old spelling was understood."""
        if (flag, became) not in self.renamed:
            self.renamed.append((flag, became))

    def say_idle(self, flag: str, reason: str) -> None:
        """Record once that a given flag has no effect."""
        if (flag, reason) not in self.idle:
            self.idle.append((flag, reason))

    def lines(self) -> list[str]:
        """Everything worth a line in the log: renamed flags, flags without effect, notices."""
        return [
            *(f"{flag} is now {became}" for flag, became in self.renamed),
            *(f"{flag} is idle: {reason}" for flag, reason in self.idle),
            *self.notes,
        ]

    def _write(self, dest: str, value: object, source: str) -> None:
        self.values[dest], self.source[dest] = value, source
        self.changes += 1

    def _known(self, dest: str) -> None:
        if dest not in self.values:
            raise AttributeError(f"there is no flag with the destination {dest!r}")
