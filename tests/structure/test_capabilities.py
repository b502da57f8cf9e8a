"""Capabilities that declarations reject, and the code that asks for them."""

import pytest
from structure.source import ROOT, source_files

from arguments.container import OPTIONS
from scripts.draw_docs import KINDS


def asking_code() -> str:
    """Return the code outside the declarations themselves."""
    paths = [path.relative_to(ROOT).as_posix() for path in source_files("arguments", "moe_trainer")]
    return "".join(
        (ROOT / path).read_text(encoding="utf-8")
        for path in paths
        if "_kinds/" not in path and "_modules.py" not in path
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.capabilities.__name__)
def test_what_a_declaration_rejects_is_asked_by_a_rule_or_demanded_by_a_flag(kind):
    code, demanded = asking_code(), {each for option in OPTIONS.values() for each in option.demands}
    rejected = {each for each in kind.capabilities if any(mechanism.rejects(each) for mechanism in kind.mechanisms)}
    asked = {each for each in rejected if each in demanded or f"{kind.capabilities.__name__}.{each.name}" in code}
    assert rejected == asked
