"""From tokens to values: what a command line contains, before any rule applies.

The syntax is argparse's without abbreviations: a token that starts with a dash and is no number is a flag,
`--flag=value` is two tokens in one, a list takes everything up to the next flag, and the last of several wins. Beyond
argparse: every error is collected, old spellings are read as their replacement, values of other products' flags are
skipped, `--switch=true|false` sets a switch (which undoes a preset's), quotes that a launcher left around a value are
dropped, and `--flag: value` from YAML-like documents is accepted.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from arguments import schema
from arguments.container import OPTIONS
from arguments.flag_status import (
    OLD_SPELLINGS,
    RENAMED,
    RENAMED_VALUES,
    OldSpelling,
    find_out_of_scope,
    is_known_spelling,
)
from arguments.schema import Option, is_text
from arguments.settings import Settings, Violation

FIELDS = MappingProxyType(schema.by_spelling(OPTIONS))
"""Option by spelling, for every flag that is a field."""

COMMON_ABBREVIATIONS = MappingProxyType(
    {
        "--tp": "--tensor-model-parallel-size",
        "--pp": "--pipeline-model-parallel-size",
        "--cp": "--context-parallel-size",
        "--ep": "--expert-model-parallel-size",
        "--etp": "--expert-tensor-parallel-size",
        "--vpp": "--num-virtual-stages-per-pipeline-rank",
        "--mbs": "--micro-batch-size",
        "--gbs": "--global-batch-size",
        "--topk": "--moe-router-topk",
        "--experts": "--num-experts",
        "--layers": "--num-layers",
    }
)
"""Abbreviations that are suggested, not accepted."""

MAX_SUGGESTION_SEARCHES = 50
"""Number of unknown flags for which close spellings are searched; every search compares with all flags."""

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Dashes that editors and web pages make of hyphens."""


@dataclass(frozen=True)
class ParsedFlag:
    """A flag with its value and spelling; None unsets it."""

    dest: str
    value: Any
    spelling: str


@dataclass
class ParsedTokens:
    """Result of parsing a list of tokens."""

    given: list[ParsedFlag] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    no_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Destinations whose value could not be read; rules about them are not reported."""

    def last(self, dest: str) -> Any:
        """Return the value that wins, or None."""
        return next((item.value for item in reversed(self.given) if item.dest == dest), None)

    def apply(self, settings: Settings, source: str) -> None:
        """Write values and notices into settings."""
        for item in self.given:
            if item.value is None:
                settings.forget(item.dest)
            else:
                settings.set_given(item.dest, item.value, source, item.spelling)
        for flag, became in self.renamed:
            settings.note_renamed(flag, became)
        for flag, reason in self.no_effect:
            settings.note_no_effect(flag, reason)
        for line in self.notes:
            settings.note(line)


def is_value(token: str) -> bool:
    """Return whether a token is a value: no leading dash, a number, or a dash followed by text with a space in it.

    The space may be in the value of --flag=value, if the flag is known.
    """
    if not token.startswith("-") or token == "-":
        return True
    if " " in token:
        name, equals, _ = token.partition("=")
        return not equals or " " in name or not _is_known(name.removesuffix(":"))
    try:
        float(token)
    except ValueError:
        return False
    return True


def _is_known(name: str) -> bool:
    return name in FIELDS or is_known_spelling(name)


def parse_tokens(tokens: Sequence[str], where: str = "") -> ParsedTokens:
    """Parse tokens; `where` (a file name) prefixes every message."""
    return _TokenParser(list(tokens), where).run()


def with_old_spellings(dests: Iterable[str]) -> frozenset[str]:
    """Return destinations with those of old spellings that set one of them."""
    new = frozenset(dests)
    words = {old: text.split() for old, text in RENAMED.items()}
    return new | {
        old for old, text in words.items() if any(word in FIELDS and FIELDS[word].dest in new for word in text)
    }


def drop_flags(tokens: Sequence[str], dests: Set[str]) -> list[str]:
    """Return the command line without the flags of these destinations and their values."""
    return [token for token, within in _marked(tokens, dests) if not within]


def select_flags(tokens: Sequence[str], dests: Set[str]) -> list[str]:
    """Return the flags of these destinations and their values."""
    return [token for token, within in _marked(tokens, dests) if within]


def _marked(tokens: Sequence[str], dests: Set[str]) -> Iterator[tuple[str, bool]]:
    within = False
    for token in tokens:
        if token.startswith("--") and not is_value(token):
            within = not dests.isdisjoint(_dests(token.partition("=")[0].removesuffix(":")))
        yield token, within


def _dests(name: str) -> tuple[str, ...]:
    """Return the destinations that a flag, or an old spelling of one, sets."""
    if name in FIELDS:
        return (FIELDS[name].dest,)
    became = OLD_SPELLINGS[name].becomes if name in OLD_SPELLINGS else ()
    return tuple(FIELDS[word].dest for _, text in became for word in text.split() if word in FIELDS)


class _TokenParser:
    """One pass over a list of tokens."""

    def __init__(self, tokens: list[str], where: str):
        self.tokens = tokens
        self.position = 0
        self.prefix = f"{where}: " if where else ""
        self.searches_left = MAX_SUGGESTION_SEARCHES
        self.out = ParsedTokens()

    def run(self) -> ParsedTokens:
        flag = ""
        while self.position < len(self.tokens):
            token = self.take()
            if token[:1] in DASHES and token:
                self.take_values("*")
                name = "--" + token.lstrip(DASHES + "-").partition("=")[0]
                hint = f"; did you mean {name}?" if _is_known(name) else self.suggest(name)
                self.reject(
                    token, f"{token}: this flag is unknown: it begins with a typographic dash, not with --{hint}"
                )
            elif is_value(token):
                self.reject_stray_value(token, flag)
            else:
                flag, equals, inline = token.partition("=")
                self.parse_flag(flag, [inline] if equals else [])
        return self.out

    def reject_stray_value(self, token: str, flag: str) -> None:
        """Reject a value that no flag takes; `flag` is the one before it."""
        name, equals, _ = token.partition("=")
        if equals and name.startswith("--") and name != "--" and " " not in name:
            self.reject(name, f"{name}: this flag is unknown{self.suggest(name)}")
            return
        after = ""
        if flag in FIELDS:
            takes = FIELDS[flag].takes
            count = "no value" if takes == 0 else "one value" if takes == 1 else f"{takes} values"
            after = f": {flag} before it takes {count}"
        hint = f"; did you mean --{token}?" if f"--{token}" in FIELDS else ""
        self.reject(token, f"unexpected argument {token!r}{after}{hint}")

    def parse_flag(self, name: str, inline: list[str]) -> None:
        """Parse one flag and the values that follow it."""
        if name.endswith(":") and _is_known(name[:-1]):
            self.out.renamed.append((name, name[:-1]))
            name = name[:-1]
            option = FIELDS.get(name)
            if option is not None and option.takes == 0 and self.peek() in ("true", "false"):
                inline = [self.take()]
        if name in FIELDS:
            option = FIELDS[name]
            self.store(option, name, inline or self.take_values(option.takes))
        elif name in OLD_SPELLINGS:
            record = OLD_SPELLINGS[name]
            self.parse_old_spelling(record, inline or self.take_values(record.takes))
        elif (match := find_out_of_scope(name)) is not None:
            product, takes = match
            if not inline:
                self.take_values(takes)
            self.reject(name, f"{name}: this flag is for {product.name}; {product.instead}", "product")
        else:
            self.take_values("*")
            self.reject(name, f"{name}: this flag is unknown{self.suggest(name)}")

    def store(self, option: Option, name: str, texts: list[str]) -> None:
        """Convert and store the values of a field."""
        if option.takes == 0:
            self.store_switch(option, name, texts)
            return
        if (option.takes == "+" and not texts) or (isinstance(option.takes, int) and len(texts) != option.takes):
            needed = "a value" if option.takes in (1, "+") else f"{option.takes} values"
            given = f", {len(texts)} given" if texts else ""
            after = self.tokens[self.position] if self.position < len(self.tokens) else ""
            if not texts and option.takes == 1 and after.startswith("-") and not after.startswith("--"):
                self.take()
                given = f"; {after} begins with a dash, as flags do: {name}={after}"
            self.reject(name, f"{' '.join([name, *texts])}: needs {needed}{given}", "value", option.dest)
            return
        values = []
        for text in texts:
            bare = self.unquote(name, text)
            if not bare.strip() and option.default != "":
                self.reject(name, f"{name} {text!r}: the value is empty (an unset variable?)", "value", option.dest)
                return
            if not is_text(bare):
                self.reject(name, f"{name} {text}: the value is not valid UTF-8", "value", option.dest)
                return
            new = RENAMED_VALUES.get((option.dest, bare))
            if new is not None:
                self.out.renamed.append((f"{name} {bare}", f"{name} {new}"))
            try:
                values.append(option.convert(new or bare))
            except ValueError as error:
                close = _close_matches(bare, [str(choice) for choice in option.choices or ()], 1)
                hint = f" (did you mean {close[0]}?)" if close else _owner_of(bare, option)
                self.reject(name, f"{name} {text}: the value must be {error}{hint}", "value", option.dest)
                return
        self.out.given.append(ParsedFlag(option.dest, values if option.is_list else values[0], name))

    def store_switch(self, option: Option, name: str, texts: list[str]) -> None:
        """Store a flag without values; `=true` and `=false` are allowed."""
        if texts and texts[0].lower() not in ("true", "false"):
            text = f"{name}={texts[0]}: this flag takes no value (or =true, =false)"
            self.reject(name, text, "value", option.dest)
            return
        on = not texts or texts[0].lower() == "true"
        self.out.given.append(ParsedFlag(option.dest, (name in option.on) == on, name))

    def parse_old_spelling(self, record: OldSpelling, texts: list[str]) -> None:
        """Replace, skip or reject an old spelling."""
        name, shown = record.spelling, " ".join([record.spelling, *texts])
        if not all(map(is_text, texts)):
            self.reject(name, f"{shown}: the value is not valid UTF-8", "value")
        elif isinstance(record.takes, int) and len(texts) < record.takes:
            self.reject(name, f"{name}: needs a value", "value")
        elif record.status == "no effect":
            self.out.no_effect.append((shown, record.text))
        elif record.status == "not implemented" and (not texts or texts[0] not in record.harmless):
            self.reject(name, f"{shown}: {record.text} is not implemented yet", "later")
        elif record.status == "removed":
            self.reject(name, f"{shown}: this flag has been removed; {record.text}")
        elif record.status == "renamed":
            tokens = record.replacement(texts)
            if tokens is None:
                self.reject(name, f"{shown}: use {record.text.replace('{}', 'N')}")
                return
            self.out.renamed.append((shown, " ".join(tokens) or "the default"))
            self.parse_replacement(tokens, name)

    def parse_replacement(self, tokens: list[str], spelling: str) -> None:
        """Parse replacement tokens as if the user had typed them under the old spelling."""
        new = parse_tokens(tokens)
        self.out.given += [ParsedFlag(item.dest, item.value, spelling) for item in new.given]
        for violation in new.violations:
            self.reject(spelling, f"{spelling}, now {violation.message}", violation.kind)

    def take_values(self, takes: int | str) -> list[str]:
        """Take the values that follow: a fixed number, at most one ("?"), or all up to the next flag."""
        limit = takes if isinstance(takes, int) else 1 if takes == "?" else len(self.tokens)
        values: list[str] = []
        while len(values) < limit and self.position < len(self.tokens) and is_value(self.tokens[self.position]):
            values.append(self.take())
        return values

    def take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def peek(self) -> str | None:
        return self.tokens[self.position].lower() if self.position < len(self.tokens) else None

    def unquote(self, name: str, text: str) -> str:
        if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
            self.out.notes.append(f"{self.prefix}{name} {text}: the quotes around the value were dropped")
            return text[1:-1]
        return text

    def reject(self, flag: str, message: str, kind: str = "unknown", dest: str | None = None) -> None:
        printable = message.encode("utf-8", "backslashreplace").decode()
        self.out.violations.append(Violation((flag,), self.prefix + printable, kind))
        if dest is not None:
            self.out.unread.add(dest)

    def suggest(self, name: str) -> str:
        if name in COMMON_ABBREVIATIONS:
            return f"; did you mean {COMMON_ABBREVIATIONS[name]}?"
        switch = "--" + name.removeprefix("--no-")
        if switch in FIELDS and FIELDS[switch].takes == 0:
            return f"; did you mean {switch}=false?"
        if self.searches_left == 0:
            return ""
        self.searches_left -= 1
        spellings = [spelling for spelling, option in FIELDS.items() if not option.hidden]
        starts = [spelling for spelling in spellings if spelling.startswith(name)] if len(name) > 4 else []
        same = [spelling for spelling in spellings if spelling.lower() == name.lower().replace("_", "-")]
        close = (same or starts or _close_matches(name.replace("_", "-"), spellings, 3))[:3]
        return f"; did you mean {' or '.join(close)}?" if close else ""


def _owner_of(value: str, option: Option) -> str:
    """Return a hint to the flag, with a similar name, that has such a value; "" if none or several have."""
    words = set(option.dest.split("_")) - {"moe", "use", "type"}
    owners = [
        each.on[0]
        for each in OPTIONS.values()
        if value in map(str, each.choices or ()) and words.intersection(each.dest.split("_"))
    ]
    return f" ({value} is a value of {owners[0]})" if len(owners) == 1 else ""


def _close_matches(word: str, words: list[str], count: int) -> list[str]:
    import difflib  # imported only for an error message

    return difflib.get_close_matches(word, words, n=count)
