"""Tests of suite/blocks.py: where probes are, and what counts as a change."""

import ast
import builtins

from suite import blocks

SOURCE = '''"""A module."""
from __future__ import annotations

def choose(value):
    """Return a word."""
    if value:
        word = "yes"
    else:
        word = "no"
    return word

class Holder:
    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, value):
        self._size = value
'''


def reach(call, monkeypatch):
    """Return the (function, first line) of the blocks that a call of the module's code runs."""
    prober = blocks.Prober(5)
    code = compile(prober.visit(ast.parse(SOURCE)), "source", "exec", dont_inherit=True)
    buffer = bytearray(5 + len(prober.blocks))
    monkeypatch.setattr(builtins, blocks.BUFFER, buffer, raising=False)
    module = {"__name__": "source"}
    exec(code, module)
    buffer[:] = bytes(len(buffer))
    call(module)
    return [prober.blocks[at - 5] for at, is_reached in enumerate(buffer) if is_reached]


def test_probes_say_which_blocks_ran(monkeypatch):
    assert reach(lambda module: module["choose"](True), monkeypatch) == [("choose", 6), ("choose", 7), ("choose", 10)]
    assert reach(lambda module: module["choose"](False), monkeypatch) == [("choose", 6), ("choose", 9), ("choose", 10)]
    assert reach(lambda module: setattr(module["Holder"](), "size", 3), monkeypatch) == [("Holder.size", 19)]


def test_blocks_are_numbered_by_function():
    assert blocks.blocks_of(SOURCE) == [
        ("", 0, 1),
        ("choose", 0, 6),
        ("choose", 1, 7),
        ("choose", 2, 9),
        ("choose", 3, 10),
        ("Holder.size", 0, 15),
        ("Holder.size", 1, 19),
    ]


def test_spans_are_those_of_every_function_of_the_name():
    assert blocks.function_spans(SOURCE, "Holder.size") == [(13, 15), (17, 19)]


def changed(old: str, new: str) -> set[str]:
    before, after = blocks.function_hashes(SOURCE), blocks.function_hashes(SOURCE.replace(old, new))
    return {name for name in before if before[name] != after[name]}


def test_changes_are_those_of_code():
    assert changed('"""A module."""', "# A module.") <= {""}
    assert changed('"yes"', '"YES"') == {"choose"}
    assert changed("choose(value)", "choose(value=1)") == {"choose", ""}
    assert changed("return self._size", "return 2 * self._size") == {"Holder.size"}
    assert changed("self._size = value", "self._size = 2 * value") == {"Holder.size"}
    assert changed("    return word", "    return word  # said") == set()
