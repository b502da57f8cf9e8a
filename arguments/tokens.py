"""From tokens to values: what a command line says, before any rule looks at it.

The reading follows argparse without abbreviations: a token that starts with a dash and is no number is a flag,
`--flag=value` is two tokens in one, a list takes everything up to the next flag, the last of several wins. Beyond
argparse: every mistake is collected, old spellings are read as what they became, flags of other products are read
over with their values, `--switch=true|false` sets a switch (which is how a preset's switch is undone), quotes that a
launcher left round a value are dropped, and `--flag: value` from YAML-like documents is understood.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from arguments import products, retired, schema
from arguments.container import OPTIONS
from arguments.schema import Option
from arguments.settings import Settings, Violation
from arguments.standing import VALUES

FIELDS = MappingProxyType(schema.by_spelling(OPTIONS))
"""Every spelling of every flag that is a field."""

SHORT = MappingProxyType(
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
"""What people say for a flag; offered, not accepted."""

MAX_SEARCHES = 50
"""Unknown flags for which close spellings are looked up: every search reads all flags."""

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What an editor or a web page makes of hyphens."""


@dataclass(frozen=True)
class Given:
    """One flag with its value, as it was spelled."""

    dest: str
    value: object
    spelling: str


@dataclass
class Reading:
    """What a list of tokens says: values in order, and everything worth saying about them."""

    given: list[Given] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    idle: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Destinations whose value could not be read: rules that miss it have nothing to say."""

    def last(self, dest: str) -> object:
        """The value that wins, or None."""
        return next((item.value for item in reversed(self.given) if item.dest == dest), None)

    def apply(self, settings: Settings, source: str) -> None:
        """Write everything into settings."""
        for item in self.given:
            settings.set_given(item.dest, item.value, source, item.spelling)
        for flag, became in self.renamed:
            settings.say_renamed(flag, became)
        for flag, reason in self.idle:
            settings.say_idle(flag, reason)
        for line in self.notes:
            settings.note(line)


def is_value(token: str) -> bool:
    """Is this token a value? No leading dash, or a number, or a dash followed by something with a blank in it."""
    if not token.startswith("-") or token == "-" or " " in token:
        return True
    try:
        float(token)
    except ValueError:
        return False
    return True


def read(tokens: Sequence[str], where: str = "") -> Reading:
    """Read tokens; `where` (a file name) is put before every message."""
    return _Reader(list(tokens), where).run()


class _Reader:
    """One pass over a list of tokens."""

    def __init__(self, tokens: list[str], where: str):
        self.tokens = tokens
        self.at = 0
        self.prefix = f"{where}: " if where else ""
        self.searches = MAX_SEARCHES
        self.out = Reading()

    def run(self) -> Reading:
        flag = ""
        while self.at < len(self.tokens):
            token = self.take()
            if token[:1] in DASHES and token:
                self.values("*")
                name = "--" + token.lstrip(DASHES + "-").partition("=")[0]
                hint = f"; did you mean {name}?" if self.known(name) else self.hint(name)
                self.refuse(token, f"{token}: this flag is unknown: it begins with a typographic dash, not with --{hint}", "unknown")
            elif is_value(token):
                self.stray(token, flag)
            else:
                flag, equals, inline = token.partition("=")
                self.flag(flag, [inline] if equals else [])
        return self.out

    def stray(self, token: str, flag: str) -> None:
        """Refuse a value that no flag takes; `flag` is the one before it."""
        after = ""
        if flag in FIELDS:
            takes = FIELDS[flag].takes
            after = f": {flag} before it takes {('no value', 'one value')[takes] if takes in (0, 1) else f'{takes} values'}"
        hint = f"; did you mean --{token}?" if f"--{token}" in FIELDS else ""
        self.refuse(token, f"{token!r} belongs to no flag{after}{hint}", "unknown")

    def flag(self, name: str, inline: list[str]) -> None:
        """Read one flag and the values that follow it."""
        if name.endswith(":") and self.known(name[:-1]):
            self.out.renamed.append((name, name[:-1]))
            name = name[:-1]
            option = FIELDS.get(name)
            if option is not None and option.takes == 0 and self.peek() in ("true", "false"):
                inline = [self.take()]
        if name in FIELDS:
            option = FIELDS[name]
            self.store(option, name, inline or self.values(option.takes))
        elif name in retired.BY_SPELLING:
            record = retired.BY_SPELLING[name]
            self.retired(record, inline or self.values(record.takes))
        elif name in products.BY_SPELLING:
            product, takes = products.BY_SPELLING[name]
            if not inline:
                self.values(takes)
            self.refuse(name, f"{name}: this flag is for {product.name}; {product.instead}", "product")
        else:
            self.values("*")
            self.refuse(name, f"{name}: this flag is unknown{self.hint(name)}", "unknown")

    def store(self, option: Option, name: str, texts: list[str]) -> None:
        """Convert and keep the values of a field."""
        if option.takes == 0:
            self.switch(option, name, texts)
            return
        if (option.takes == "+" and not texts) or (isinstance(option.takes, int) and len(texts) != option.takes):
            wanted = "a value" if option.takes in (1, "+") else f"{option.takes} values"
            found = f", {len(texts)} given" if texts else ""
            self.refuse(name, f"{' '.join([name, *texts])}: needs {wanted}{found}", "value", option.dest)
            return
        values = []
        for text in texts:
            bare = self.unquote(name, text)
            if not bare.strip() and option.default != "":
                self.refuse(name, f"{name} {text!r}: the value is empty (a variable that is not set?)", "value", option.dest)
                return
            if not _is_text(bare):
                self.refuse(name, f"{name} {text}: the value is no text in UTF-8", "value", option.dest)
                return
            if (option.dest, bare) in retired.LATER_VALUES:
                what, feature = retired.LATER_VALUES[option.dest, bare]
                self.refuse(name, f"{name} {bare}: this version does not have {what} yet (feature: {feature})", "later", option.dest)
                return
            new = VALUES.get((option.dest, bare))
            if new is not None:
                self.out.renamed.append((f"{name} {bare}", f"{name} {new}"))
            try:
                values.append(option.convert(new or bare))
            except ValueError as error:
                close = _close(bare, [str(choice) for choice in option.choices or ()], 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                self.refuse(name, f"{name} {text}: the value must be {error}{hint}", "value", option.dest)
                return
        self.out.given.append(Given(option.dest, values if option.is_list else values[0], name))

    def switch(self, option: Option, name: str, texts: list[str]) -> None:
        """Keep a flag without values; `=true` and `=false` are allowed."""
        if texts and texts[0].lower() not in ("true", "false"):
            text = f"{name}={texts[0]}: this flag takes no value (or =true, =false)"
            self.refuse(name, text, "value", option.dest)
            return
        on = not texts or texts[0].lower() == "true"
        self.out.given.append(Given(option.dest, (name in option.on) == on, name))

    def retired(self, record: retired.Retired, texts: list[str]) -> None:
        """Read an old spelling: as what it became, over it, or refuse it."""
        name, shown = record.spelling, " ".join([record.spelling, *texts])
        if not all(map(_is_text, texts)):
            self.refuse(name, f"{shown}: the value is no text in UTF-8", "value")
        elif isinstance(record.takes, int) and len(texts) < record.takes:
            self.refuse(name, f"{name}: needs a value", "value")
        elif record.standing == "idle":
            self.out.idle.append((shown, record.text))
        elif record.standing == "later" and (not texts or texts[0] not in record.harmless):
            text = f"{shown}: this version does not have {record.text} yet (feature: {record.feature})"
            self.refuse(name, text, "later")
        elif record.standing == "refused":
            self.refuse(name, f"{shown}: this flag has gone; {record.text}", "unknown")
        elif record.standing == "renamed":
            tokens = record.replacement(texts)
            if tokens is None:
                self.refuse(name, f"{shown}: use {record.text.replace('{}', 'N')}", "unknown")
                return
            self.out.renamed.append((shown, " ".join(tokens) or "the default"))
            self.take_over(tokens, name)

    def take_over(self, tokens: list[str], spelling: str) -> None:
        """Read replacement tokens as if the user had typed them under the old spelling."""
        new = read(tokens)
        self.out.given += [Given(item.dest, item.value, spelling) for item in new.given]
        for violation in new.violations:
            self.refuse(spelling, f"{spelling}, now {violation.message}", violation.kind)

    def values(self, takes: int | str) -> list[str]:
        """Take the values that follow: a fixed number, at most one ("?"), or all up to the next flag."""
        most = {"?": 1, "+": len(self.tokens), "*": len(self.tokens)}.get(takes, takes)
        found: list[str] = []
        while len(found) < most and self.at < len(self.tokens) and is_value(self.tokens[self.at]):
            found.append(self.take())
        return found

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def peek(self) -> str | None:
        return self.tokens[self.at].lower() if self.at < len(self.tokens) else None

    def unquote(self, name: str, text: str) -> str:
        if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
            self.out.notes.append(f"{self.prefix}{name} {text}: the quotes round the value were dropped")
            return text[1:-1]
        return text

    def refuse(self, flag: str, message: str, kind: str, dest: str | None = None) -> None:
        shown = message.encode("utf-8", "backslashreplace").decode()  # what is no text can still be printed
        self.out.violations.append(Violation((flag,), self.prefix + shown, kind))
        if dest is not None:
            self.out.unread.add(dest)

    @staticmethod
    def known(name: str) -> bool:
        return name in FIELDS or name in retired.BY_SPELLING or name in products.BY_SPELLING

    def hint(self, name: str) -> str:
        if name in SHORT:
            return f"; did you mean {SHORT[name]}?"
        if self.searches == 0:
            return ""
        self.searches -= 1
        shown = [spelling for spelling, option in FIELDS.items() if not option.hidden]
        starts = [spelling for spelling in shown if spelling.startswith(name)] if len(name) > 4 else []
        close = (starts or _close(name.replace("_", "-"), shown, 3))[:3]
        return f"; did you mean {' or '.join(close)}?" if close else ""


def _is_text(value: str) -> bool:
    """Can it be printed, and stand in a file's name? The system passes bytes that are no UTF-8 as lone surrogates."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _close(word: str, words: list[str], count: int) -> list[str]:
    import difflib  # (only for a mistake)

    return difflib.get_close_matches(word, words, n=count)
