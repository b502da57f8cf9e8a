"""Capabilities that declarations state, and the code that asks for them."""

import re
from enum import Enum

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


def is_named(capability: Enum, code: str) -> bool:
    return re.search(rf"\b{type(capability).__name__}\.{capability.name}\b", code) is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.capabilities.__name__)
def test_every_capability_is_asked_by_code_or_demanded_by_a_flag(kind):
    code, demanded = asking_code(), {each for option in OPTIONS.values() for each in option.demands}
    asked = [each for each in kind.capabilities if each in demanded or is_named(each, code)]
    assert [*kind.capabilities] == asked
