"""Rules as functions: all are run, have a source or are listed as limits, and take any value; refusals.txt has what they refuse."""

import ast
import inspect
import re
from string import Formatter

from structure.source import ROOT, source_files

from arguments import rules
from arguments.container import OPTIONS
from arguments.machine import check_machine
from arguments.parse import resolve_command_line
from arguments.rules.derived_sizes import derive_sizes
from tests.arguments.rule_lines import base_line, changed, findings, recorded

SOURCES = recorded("check_sources")
"""Check -> {"source": numbers in reference/rules.md, or words; "yields": the number of its violations}."""


def test_every_rule_function_is_registered():
    """A rule whose name does not match the naming scheme would never run."""
    for area in rules.AREAS:
        run = {rule for rule in (*rules.RESOLVERS, *rules.CHECKS, *rules.LIMITS) if rule.__module__ == area.__name__}
        written = [
            item
            for name, item in vars(area).items()
            if callable(item) and getattr(item, "__module__", "") == area.__name__ and not name.startswith("_")
        ]
        rule_like = [item for item in written if item.__code__.co_varnames[:2] in (("s", "f"), ("s", "_f"))]
        assert set(rule_like) == run, area.__name__


def test_every_check_has_a_source():
    """A new check names Megatron-LM's rule in tests/data/check_sources.json, or is a limit (arguments/rules)."""
    found = {}
    for rule in rules.CHECKS:
        nodes = list(ast.walk(ast.parse(inspect.getsource(rule))))
        found[f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"] = sum(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes
        )
    assert found == {name: entry["yields"] for name, entry in SOURCES.items()}


def test_sources_are_rules_of_megatron(shared):
    text = (shared / "reference" / "rules.md").read_text(encoding="utf-8")
    rules_of_megatron = re.findall(r"^(\d+)\. +(.+)", text, re.MULTILINE)
    errors = {int(number) for number, rule in rules_of_megatron if re.search(r"\bE\b|\bmust\b", rule)}
    named = {number for entry in SOURCES.values() if isinstance(entry["source"], list) for number in entry["source"]}
    assert len(named) > 70 and named <= errors


def test_limits_are_yielded_without_conditions():
    """What is yielded only under some flags would be missing on the page."""
    for rule in rules.LIMITS:
        nodes = list(ast.walk(ast.parse(inspect.getsource(rule))))
        branches = [node for node in nodes if isinstance(node, ast.If | ast.While | ast.Try | ast.Match)]
        assert not any(isinstance(node, ast.Return | ast.Continue | ast.Break) for node in nodes), rule
        assert not any(isinstance(node, ast.Yield) for branch in branches for node in ast.walk(branch)), rule


def test_limits_are_listed_whatever_the_settings():
    listed = listed_messages([])
    assert len(listed) > 90
    for case in recorded("rule_cases")["cases"]:
        assert listed_messages(changed(" ".join(case["added"]))) == listed, case["name"]


def listed_messages(argv):
    settings, _ = resolve_command_line(argv, 8)
    return [(topic, limit.message) for topic, limit in rules.limits(settings, derive_sizes(settings, 8))]


def test_fields_of_messages_exist():
    """The messages of rules are format strings: every field is a flag's destination or a value that the call gives."""
    problems, calls = [], list(violation_calls())
    for place, call in calls:
        values = {keyword.arg for keyword in call.keywords}
        fields = [field for _, field, _, _ in Formatter().parse(call.args[0].value) if field is not None]
        problems += [f"{place}: {field}" for field in fields if field and field not in values and field not in OPTIONS]
        unknown = any(isinstance(argument, ast.Starred) for argument in call.args)
        if not unknown and fields.count("") > len(call.args) - 1:
            problems.append(f"{place}: more {{}} than flags")
    assert len(calls) > 200 and not problems, "\n".join(problems)


def violation_calls():
    """Yield (place, call) for every `settings.violation("...")` with a literal message."""
    for path in source_files("arguments"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="violation"), args=[ast.Constant(), *_]):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_world_size_rules_are_skipped_when_it_is_unknown():
    line = changed("--tensor-model-parallel-size 3 --num-attention-heads 6 --kv-channels 64 --seq-length 1023")
    settings, violations = findings(line, None)
    assert not violations
    assert sum("--world-size" in note for note in settings.notes) == 1


def test_rules_do_not_crash_on_any_flag_value():
    """Negative numbers are in tests/training/test_bad_input.py."""
    base = base_line()
    for option in OPTIONS.values():
        texts = ("0", "7", "nan") if option.type_name == "float" else ("0", "7")
        values = [""] if option.takes == 0 else map(str, option.choices[:2] if option.choices else texts)
        for value in values:
            words = [] if option.takes == 0 else [value] * (option.takes if isinstance(option.takes, int) else 1)
            settings, _ = resolve_command_line([*base, option.spellings[-1], *words], None if value == "7" else 8)
            check_machine(settings, {}, 9)
            rules.derived(settings, 8)


def test_a_constant_loss_scale_keeps_the_nan_check():
    for words, expected in (["--loss-scale", "1024"], True), ([], False):
        argv = [word for word in base_line() if word != "--bf16"]
        settings, _ = resolve_command_line([*argv, "--fp16", *words], 8)
        assert settings.check_for_nan_in_loss_and_grad is expected
