"""argv -> Arguments."""

import difflib
import sys

from arguments import schema
from arguments.container import SECTIONS, Arguments, freeze
from arguments.settings import ArgumentError, Settings, Violation


def _is_value(token: str) -> bool:
    """Is this token a value? As argparse sees it: no leading dash, or a negative number, or a dash with a blank."""
    if not token.startswith("-") or token == "-" or " " in token:
        return True
    try:
        float(token)
    except ValueError:
        return False
    return True


def new_settings() -> Settings:
    """Settings at Megatron's defaults."""
    known = schema.options(SECTIONS)
    return Settings({d: o.default for d, o in known.items()}, {d: o.spellings[0] for d, o in known.items()})


def read_tokens(settings: Settings, tokens: list[str], source: str) -> list[Violation]:
    """Read flags into settings; returns every mistake found."""
    spellings = schema.by_spelling(schema.options(SECTIONS))
    violations: list[Violation] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        name, equals, inline = token.partition("=")
        option = spellings.get(name)
        values = [inline] if equals else []
        if option is None or not equals:
            while at < len(tokens) and _is_value(tokens[at]) and (option is None or option.takes != len(values)):
                values.append(tokens[at])
                at += 1
        if option is None:
            close = difflib.get_close_matches(name, spellings, n=3)
            hint = f"; close: {', '.join(close)}" if close else ""
            violations.append(Violation((name,), f"{name}: this flag is unknown{hint}", "unknown"))
            continue
        if option.takes == 0:
            settings.set_given(option.dest, name in option.on, source, name)
            continue
        try:
            read = [option.convert(text) for text in values]
        except ValueError as error:
            violations.append(Violation((name,), f"{name} {' '.join(values)}: needs {error}", "value"))
            continue
        if option.takes == "+" and not read or isinstance(option.takes, int) and len(read) != option.takes:
            violations.append(Violation((name,), f"{name}: needs a value, {len(read)} given", "value"))
            continue
        settings.set_given(option.dest, read if option.is_list else read[0], source, name)
    return violations


def parse_args(argv: list[str] | None = None, world_size: int | None = None) -> Arguments:
    """Read, resolve and check a command line.

    argv None means sys.argv[1:]; world_size None means that the rules on the number of ranks are left out.
    Raises: ArgumentError with every violation.
    """
    settings = new_settings()
    violations = read_tokens(settings, list(sys.argv[1:] if argv is None else argv), "command line")
    if not violations:
        try:
            from arguments import rules
        except ImportError:
            rules = None
        if rules is not None and hasattr(rules, "resolve"):
            rules.resolve(settings, world_size)
            violations += rules.check(settings, world_size)
    if violations:
        raise ArgumentError(violations, settings)
    return freeze(settings, world_size)
