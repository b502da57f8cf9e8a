"""Tests of suite/tiers.py: what a change in a checkout selects."""

import subprocess

import numpy
import pytest
from suite import record, tiers

BEFORE = """
SIZE = 1

def first():
    return SIZE

class Second:
    def method(self):
        return 2
"""
TESTS = [f"tests/test_{name}.py::test_{name}" for name in ("first", "second", "slow", "other")]


@pytest.fixture
def change(tmp_path, monkeypatch):
    """Return a function that changes a file of a small checkout and returns the tier of its changes."""
    (tmp_path / "product.py").write_text(BEFORE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").touch()
    (tmp_path / "tests" / "test_first.py").write_text("def test_first(): pass\n")
    (tmp_path / "tests" / "test_other.py").write_text("from helper import nothing\n")
    (tmp_path / "tests" / "structure").mkdir()
    (tmp_path / "tests" / "structure" / "test_source.py").touch()
    (tmp_path / "tests" / "folder").mkdir()
    (tmp_path / "tests" / "folder" / "test_table.py").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    blocks = [("product.py", name, 0) for name in ("", "first", "Second.method")]
    reached = numpy.array([[0, 1, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]], bool)
    known = record.Record(TESTS, [1.0, 2.0, 300.0, 1.0], blocks, numpy.packbits(reached, axis=1))
    monkeypatch.setattr(record, "read", lambda: known)
    monkeypatch.setattr(record, "read_seconds", lambda: dict(zip(known.tests, known.seconds)))
    monkeypatch.setattr(tiers, "ROOT", tmp_path)

    def apply(file, text, limit_s=1e4):
        (tmp_path / file).write_text(text)
        return tiers.changed_tier(limit_s, 2)

    return apply


def test_a_changed_function_selects_the_tests_that_reach_it(change):
    tier = change("product.py", BEFORE.replace("return 2", "return 3"))
    assert tier.names == {TESTS[1], TESTS[2]}


def test_what_does_not_fit_is_left_out_and_counted(change):
    tier = change("product.py", BEFORE.replace("return 2", "return 3"), limit_s=60)
    assert tier.names == {TESTS[1]}
    assert any("left out: 1 of those, 300 s" in line for line in tier.summary())


def test_a_change_outside_functions_selects_all_that_reach_the_file(change):
    tier = change("product.py", BEFORE.replace("SIZE = 1", "SIZE = 2"))
    assert tier.names == set(TESTS[:3])


def test_a_comment_selects_nothing(change):
    assert change("product.py", BEFORE + "# the end\n").names == frozenset()


def test_a_changed_helper_selects_the_modules_that_import_it(change, tmp_path):
    tier = change("tests/helper.py", "nothing = 0\n")
    assert tier.has_module(tmp_path / "tests" / "test_other.py")
    assert not tier.has_module(tmp_path / "tests" / "test_first.py")


@pytest.mark.parametrize("file", ["conftest.py", "rows.yaml"])
def test_what_no_module_names_selects_those_of_its_folder(change, tmp_path, file):
    tier = change(f"tests/folder/{file}", "nothing: 0\n")
    assert tier.has_module(tmp_path / "tests" / "folder" / "test_table.py")
    assert not tier.has_module(tmp_path / "tests" / "test_first.py")


def test_changed_code_selects_the_tests_that_read_it(change, tmp_path):
    source = tmp_path / "tests" / "structure" / "test_source.py"
    assert change("product.py", BEFORE.replace("return 2", "return 3")).has_module(source)


def test_what_affects_every_test_is_named(change):
    tier = change("pytest.ini", "[pytest]\n")
    assert any("can affect every test: pytest.ini" in line for line in tier.summary())


def test_changed_modules_that_exceed_the_limit_are_said(change):
    tier = change("tests/test_first.py", "def test_first(): assert True\n", limit_s=1)
    assert tier.names == frozenset() and "about 1 s" in tier.header
    assert any("the changed test modules alone need 1 s" in line for line in tier.summary())


def test_code_that_no_test_reaches_is_named(change):
    tier = change("alone.py", "def new():\n    return 0\n")
    assert any("no recorded test reaches: alone.py" in line for line in tier.summary())
