"""Every row of refusals.txt: lines that rules refuse, by name, lines that they accept, and lines with a note."""

import pytest

from arguments import refused, rules
from arguments.rules.derived_sizes import derive_sizes
from arguments.settings import Limit
from tests.arguments import refusals

ROWS = refusals.rows()
REFUSED = [row for row in ROWS if row.rules and "note" not in row.rules]
NOTED = [row for row in ROWS if "note" in row.rules]
RULES = {f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}": rule for rule in (*rules.CHECKS, *rules.LIMITS)}


def violations_of(name, settings, ranks, found):
    """Return what a rule or a kind of violation contributes to what was found."""
    if name not in RULES:
        return [violation for violation in found if violation.kind == name]
    mine = []
    for each in RULES[name](settings, derive_sizes(settings, ranks)):
        if not isinstance(each, Limit):
            mine.append(each)
        elif each.applies:
            mine.append(settings.violation(each.message, *each.dests, kind=each.kind))
    return [violation for violation in mine if violation in found]


def has(violation, text):
    is_flag = text.startswith("--") and " " not in text
    return text in (violation.flags if is_flag else violation.message)


@pytest.fixture(scope="module")
def resolved():
    """Settings and violations of every row."""
    return {id(row): row.line.resolve() for row in ROWS}


def test_lines_are_refused_by_exactly_these_rules_which_name_the_flag(resolved):
    problems = []
    for row in REFUSED:
        settings, found = resolved[id(row)]
        by_rule = {name: violations_of(name, settings, row.line.ranks, found) for name in row.rules}
        problems += [f"{row.line.words}: {name} accepts it" for name, mine in by_rule.items() if not mine]
        first = by_rule[row.rules[0]]
        if not any(each.kind == row.kind and all(has(each, text) for text in row.texts) for each in first):
            problems.append(f"{row.line.words}: {row.kind}: {row.texts} is not in {first}")
        more = set(found).difference(*by_rule.values())
        problems += [f"{row.line.words}: also refused: {violation}" for violation in more]
    assert not problems, "\n".join(problems)


def test_lines_are_accepted_with_their_fix():
    lines = [line for row in REFUSED for line in row.fixed] + [row.line for row in ROWS if not row.rules]
    different = {(line.argv, line.ranks, line.arch, *line.env.items()): line for line in lines}.values()
    problems = [f"{line.words}: {violation}" for line in different for violation in line.resolve()[1]]
    assert not problems, "\n".join(problems)


def test_every_rule_refuses_a_line_and_accepts_a_similar_one():
    """A rule that refuses no line is dead, or untested."""
    assert set(RULES) - {name for row in REFUSED for name in row.rules} == set()
    assert set(RULES) - {name for row in REFUSED if row.fixed for name in row.rules} == set()


def test_flags_of_rows_are_in_the_message(resolved):
    """tests/training/test_bad_input.py draws rows, and reads what is printed."""
    problems = []
    for row in REFUSED:
        if row.kind in ("rule", "build"):
            printed = "\n".join(violation.message for violation in resolved[id(row)][1])
            problems += [f"{row.line.words}: {text} is not in {printed}" for text in row.texts if text not in printed]
    assert not problems, "\n".join(problems)


def test_messages_are_short_complete_and_name_their_first_flag(resolved):
    problems = [
        str(violation)
        for row in REFUSED
        for violation in resolved[id(row)][1]
        if violation.kind == "rule"
        and not (
            violation.message.endswith(".")
            and len(violation.message) < 420
            and (violation.flags[0] in violation.message or "ranks" in violation.message)
        )
    ]
    assert not problems, "\n".join(problems)


def test_limits_are_on_the_page_of_refused_flags(resolved):
    """Every rejection is Megatron-LM's (or a wrong value), or it is a limit of this program, which the manual lists."""
    page, problems = refused.page(), []
    for row in REFUSED:
        settings, _ = resolved[id(row)]
        limits = [RULES[name] for name in row.rules if ".limit_" in name]
        for limit in (each for rule in limits for each in rule(settings, derive_sizes(settings, row.line.ranks))):
            if limit.applies and f"- {refused.limit_text(limit)}\n" not in page:
                problems.append(f"{row.line.words}: {limit.message}")
    assert not problems, "\n".join(problems)


def test_notes_are_given_once_and_only_where_they_apply(resolved):
    problems = []
    for row in NOTED:
        settings, found = resolved[id(row)]
        for text in row.texts:
            if sum(text in line for line in settings.lines()) != 1:
                problems.append(f"{row.line.words}: not one note with {text!r}: {settings.lines()}")
        problems += [f"{row.line.words}: {violation}" for violation in found]
        for line in row.fixed:
            settings, found = line.resolve()
            left = [note for note in settings.lines() if any(text in note for text in row.texts)]
            problems += [f"{line.words}: {each}" for each in (*left, *found)]
    assert not problems, "\n".join(problems)


def test_resolving_twice_changes_nothing(resolved):
    for row in ROWS:
        if not row.rules:
            settings, _ = resolved[id(row)]
            before = dict(settings.values)
            rules.resolve(settings, row.line.ranks)
            assert settings.values == before, row.line.words
