"""What is known about every flag while a command line is being understood.

`Settings` is the mutable state between reading the tokens and freezing the result: rules read it by destination name and
write derived values through `set_derived`, so that every value keeps its source. `Violation` is one thing that is wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SOURCES = ("default", "preset", "recipe", "command line", "derived")
KINDS = ("rule", "unknown", "value", "product", "later", "recipe", "machine")


@dataclass(frozen=True)
class Violation:
    """One reason why a command line cannot run.

    `flags` as the user typed them (or their usual spelling), `message` a whole sentence with values, need and reason;
    `kind` one of KINDS: "later" names a feature that this version does not have yet, "product" a flag of another product.
    """

    flags: tuple[str, ...]
    message: str
    kind: str = "rule"

    def __str__(self) -> str:
        return self.message


class ArgumentError(ValueError):
    """A command line that cannot run; `violations` lists every reason, `settings` and `notes` what was resolved so far."""

    def __init__(self, violations: Iterable[Violation], settings: "Settings | None" = None):
        self.violations = list(violations)
        self.settings = settings
        self.notes = list(settings.notes) if settings is not None else []
        count = len(self.violations)
        head = "1 problem with the arguments:" if count == 1 else f"{count} problems with the arguments:"
        super().__init__("\n".join([head, *(f"  - {violation.message}" for violation in self.violations)]))


class Settings:
    """Every flag's value by destination name, with its source.

    Attributes besides the destinations: `typed` (destinations typed on the command line), `source[dest]` (one of SOURCES),
    `spelling[dest]` (the flag as typed), `why[dest]` (reason of a derived value), `notes` (one-line notices),
    `renamed` and `idle` (what was said about old spellings and flags without effect), `recipe_env`.
    Reading or writing a name that is no destination raises AttributeError.
    """

    _own = ("typed", "source", "spelling", "why", "notes", "renamed", "idle", "recipe_env", "values", "_usual")

    def __init__(self, defaults: dict[str, object], usual: dict[str, str]):
        self.values = dict(defaults)
        self.typed: set[str] = set()
        self.source = dict.fromkeys(defaults, "default")
        self.spelling: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self.notes: list[str] = []
        self.renamed: list[str] = []
        self.idle: list[str] = []
        self.recipe_env: dict[str, str] = {}
        self._usual = usual

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

    def set_given(self, dest: str, value: object, source: str, spelling: str) -> None:
        """Record a value from a preset, a recipe or the command line."""
        self._known(dest)
        self.values[dest], self.source[dest], self.spelling[dest] = value, source, spelling
        if source == "command line":
            self.typed.add(dest)

    def set_derived(self, dest: str, value: object, why: str) -> None:
        """Record a value that follows from others; a value that is already so keeps its source."""
        self._known(dest)
        if self.values[dest] == value and type(self.values[dest]) is type(value):
            return
        self.values[dest], self.source[dest], self.why[dest] = value, "derived", why

    def given(self, dest: str) -> bool:
        """Did a preset, a recipe or the command line set this flag (whatever a rule made of it since)?"""
        self._known(dest)
        return dest in self.spelling

    def flag(self, dest: str) -> str:
        """The flag as the user spelled it, or its usual spelling."""
        self._known(dest)
        return self.spelling.get(dest, self._usual[dest])

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

    def _known(self, dest: str) -> None:
        if dest not in self.values:
            raise AttributeError(f"there is no flag with the destination {dest!r}")
