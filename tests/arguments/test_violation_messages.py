"""The messages of rules are format strings: every field is a flag's destination or a value that the call gives."""

import ast
from string import Formatter

from structure.source import ROOT, source_files

from arguments.container import OPTIONS


def violation_calls():
    """Yield (place, call) for every `settings.violation("...")` with a literal message."""
    for path in source_files("arguments"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="violation"), args=[ast.Constant(), *_]):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_fields_of_messages_exist():
    problems, calls = [], list(violation_calls())
    for place, call in calls:
        values = {keyword.arg for keyword in call.keywords}
        fields = [field for _, field, _, _ in Formatter().parse(call.args[0].value) if field is not None]
        problems += [f"{place}: {field}" for field in fields if field and field not in values and field not in OPTIONS]
        unknown = any(isinstance(argument, ast.Starred) for argument in call.args)
        if not unknown and fields.count("") > len(call.args) - 1:
            problems.append(f"{place}: more {{}} than flags")
    assert len(calls) > 200 and not problems, "\n".join(problems)
