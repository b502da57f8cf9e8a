"""The table of command lines and what must come of them: reads refusals.txt."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from arguments.machine import check_machine
from arguments.parse import resolve_command_line
from arguments.settings import Settings, Violation
from tests.arguments.rule_lines import base_line, without

TABLE = Path(__file__).with_suffix(".txt")


@dataclass(frozen=True)
class Line:
    """A command line with the words of the table that it comes from."""

    words: str
    argv: tuple[str, ...]
    ranks: int
    arch: int | None
    env: dict[str, str]

    def resolve(self) -> tuple[Settings, list[Violation]]:
        """Return the settings, and everything that is wrong with them but notes."""
        settings, violations = resolve_command_line(list(self.argv), self.ranks)
        violations += check_machine(settings, self.env, self.arch)
        return settings, [violation for violation in violations if violation.kind != "note"]


@dataclass(frozen=True)
class Row:
    """One line of the table, for one of its ends.

    Attributes:
        rules: names of the rules, or kinds of violations, that refuse it.
        kind: of the first rule's violation.
        texts: flags or words of that violation, or of a note.
        fixed: lines that are accepted.
    """

    line: Line
    rules: tuple[str, ...]
    kind: str
    texts: tuple[str, ...]
    fixed: tuple[Line, ...]


def read_line(words: str, macros: dict[str, str]) -> Line:
    """Apply the words of the table to the base line."""
    argv, settings, env = base_line(), {"ranks": 8, "sm": None}, {}
    for word in _expand(words, macros).split():
        name, equals, value = word.partition("=")
        if word.startswith("~"):
            argv = without(argv, [word[1:]])
        elif name in settings and equals:
            settings[name] = int(value)
        elif equals and re.fullmatch("[A-Z][A-Z0-9_]+", name):
            env[name] = value
        else:
            argv.append(word)
    return Line(words, tuple(argv), settings["ranks"], settings["sm"], env)


def _expand(words: str, macros: dict[str, str]) -> str:
    while (expanded := re.sub(r"\{([A-Z0-9_]+)\}", lambda name: macros[name[1]], words)) != words:
        words = expanded
    return words


def _ends(words: str) -> Iterator[str]:
    """Yield the words with each of their ends."""
    first, *others = words.split(" / ")
    yield first
    kept = first.split()
    while others and not kept[-1].startswith(("--", "{")):
        kept.pop()
    for other in others:
        yield " ".join([*(kept[:-1] if other.startswith("--") else kept), other])


@cache
def rows() -> tuple[Row, ...]:
    """Read the table."""
    macros, found = {}, []
    for text in TABLE.read_text(encoding="utf-8").splitlines():
        if not text or text.startswith("#"):
            continue
        if macro := re.fullmatch(r"([A-Z0-9_]+) = (.+)", text):
            macros[macro[1]] = macro[2]
            continue
        words, _, outcome = text.partition(" -> ")
        rules, _, texts = outcome.partition(": ")
        rules, kind = re.sub(r"\[\w+\]", "", rules), re.search(r"\[(\w+)\]", rules)
        texts, *fixes = texts.split(" ; ")
        first = rules.partition(",")[0]
        for each in _ends(words):
            flags = [word.partition("=")[0] for word in each.split() if word.startswith("--")]
            named = [text.replace("FLAG", flags[-1]) if "FLAG" in text else text for text in (texts, *fixes)]
            found.append(
                Row(
                    read_line(each, macros),
                    () if rules == "ok" else tuple(rules.split(", ")),
                    kind[1] if kind else "rule" if "." in first else first,
                    tuple(named[0].split(" & ")) if texts else (),
                    tuple(read_line(f"{each} {fix}", macros) for fix in named[1:]),
                )
            )
    return tuple(found)
