"""Tests of suite/tiers.py: what a change in a checkout selects."""

import subprocess
from types import SimpleNamespace

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
TABLE, SOURCE = "tests/folder/test_table.py::test_table", "tests/structure/test_source.py::test_source"


@pytest.fixture
def change(tmp_path, monkeypatch):
    """Return a function that changes a file of a small checkout and returns the tier of its changes."""
    (tmp_path / "product.py").write_text(BEFORE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").touch()
    (tmp_path / "tests" / "test_first.py").write_text("def test_first(): pass\n")
    (tmp_path / "tests" / "test_other.py").write_text("from helper import nothing\n")
    (tmp_path / "tests" / "structure").mkdir()
    (tmp_path / "tests" / "structure" / "test_source.py").write_text("def test_source(): pass\n")
    (tmp_path / "tests" / "folder").mkdir()
    (tmp_path / "tests" / "folder" / "test_table.py").write_text("def test_table(): pass\n")
    (tmp_path / "tests" / "folder" / "cases").mkdir()
    (tmp_path / "folder").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    blocks = [("product.py", name, 0) for name in ("", "first", "Second.method")]
    reached = numpy.array([[0, 1, 0], [0, 0, 1], [0, 1, 1], *[[0, 0, 0]] * 3], bool)
    tests, seconds = [*TESTS, TABLE, SOURCE], [1.0, 2.0, 300.0, 1.0, 1.0, 1.0]
    known = record.Record(tests, seconds, blocks, numpy.packbits(reached, axis=1))
    monkeypatch.setattr(record, "read", lambda: known)
    monkeypatch.setattr(record, "read_seconds", lambda: dict(zip(known.tests, known.seconds)))
    monkeypatch.setattr(tiers, "ROOT", tmp_path)

    def apply(file, text, limit_s=1e4):
        (tmp_path / file).write_text(text)
        return tiers.changed_tier(limit_s, 2)

    return apply


def test_a_changed_function_selects_the_tests_that_reach_it(change):
    tier = change("product.py", BEFORE.replace("return 2", "return 3"))
    assert tier.names == {TESTS[1], TESTS[2], SOURCE}, "tests/structure reads all code"


def test_what_does_not_fit_is_left_out_and_counted(change):
    tier = change("product.py", BEFORE.replace("return 2", "return 3"), limit_s=60)
    assert tier.names == {TESTS[1], SOURCE}
    assert any("left out: 1 of those, 300 s" in line for line in tier.summary())


def test_a_change_outside_functions_selects_all_that_reach_the_file(change):
    tier = change("product.py", BEFORE.replace("SIZE = 1", "SIZE = 2"))
    assert tier.names == {*TESTS[:3], SOURCE}


def test_a_comment_selects_nothing(change):
    assert change("product.py", BEFORE + "# the end\n").names == {SOURCE}


def test_a_changed_helper_selects_the_modules_that_import_it(change, tmp_path):
    tier = change("tests/helper.py", "nothing = 0\n")
    assert tier.names == {TESTS[3]}
    assert tier.has_module(tmp_path / "tests" / "test_other.py")
    assert not tier.has_module(tmp_path / "tests" / "test_first.py")
    assert tier.has_module(tmp_path / "tests" / "test_unknown.py"), "new modules belong to every tier"


@pytest.mark.parametrize(
    ("text", "is_import"),
    {
        "from folder import a, record\n": True,
        "from folder import (\n    a,\n    record,\n)\n": True,
        "import folder.record\n": True,
        "    from folder.record import read\n": True,
        "from moe_trainer.metrics import record\n": False,
        "from folder import recorder\n": False,
        "from folder import (\n    a,\n)\n\nrecord = a\n": False,
    }.items(),
)
def test_a_helper_is_imported_by_its_path(change, tmp_path, text, is_import):
    (tmp_path / "tests" / "test_other.py").write_text(text)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "second"], cwd=tmp_path, check=True
    )
    assert (TESTS[3] in change("tests/folder/record.py", "read = 0\n").names) == is_import


@pytest.mark.parametrize("file", ["tests/folder/conftest.py", "tests/folder/cases/a.yaml", "folder/a.yaml"])
def test_what_no_module_names_selects_those_of_its_folder(change, file):
    assert change(file, "nothing: 0\n").names == {TABLE}


@pytest.mark.parametrize("file", ["pytest.ini", "setup.py", "a.yaml"])
def test_what_affects_any_test_is_named(change, file):
    tier = change(file, "[pytest]\n")
    assert any(f"can affect any test: {file}" in line for line in tier.summary())


def test_tests_of_a_tier_that_are_gone_are_named(change):
    tier = change("tests/helper.py", "nothing = 0\n")
    kept, left_out = tier.select([SimpleNamespace(nodeid=f"{TESTS[3]}[new id]"), SimpleNamespace(nodeid=TESTS[0])])
    assert [item.nodeid for item in kept] == [f"{TESTS[3]}[new id]"] and len(left_out) == 1
    assert any(
        f"not there any more, renew the record: 1 tests of this tier, {TESTS[3]}" in line for line in tier.summary()
    )


def test_changed_modules_that_exceed_the_limit_are_said(change):
    tier = change("tests/test_first.py", "def test_first(): assert True\n", limit_s=1)
    assert tier.names == frozenset() and "about 1 s" in tier.header, "of it, and not of what reads all code"
    assert any("the changed test modules alone need 1 s" in line for line in tier.summary())


def test_code_that_no_test_reaches_is_named(change):
    tier = change("alone.py", "def new():\n    return 0\n")
    assert any("no recorded test reaches: alone.py" in line for line in tier.summary())


def test_what_git_does_not_know_is_an_error(change, tmp_path, monkeypatch):
    """Else a checkout of which git knows nothing would be one without changes, and its tests pass."""
    subprocess.run(["git", "branch", "-qm", "other"], cwd=tmp_path, check=True)
    with pytest.raises(pytest.UsageError, match="compares with main"):
        change("product.py", BEFORE)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nothing"))
    with pytest.raises(pytest.UsageError, match="not a git repository"):
        change("product.py", BEFORE)


def test_a_renamed_helper_selects_those_that_import_its_old_name(change, tmp_path):
    (tmp_path / "tests" / "helper.py").rename(tmp_path / "tests" / "helpers.py")
    assert TESTS[3] in change("product.py", BEFORE).names


def test_methods_are_known_by_their_class(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_a(): pass\nclass TestB:\n    def test_a(self): pass\n")
    assert tiers.function_names(tmp_path / "test_a.py") == {"test_a", "TestB::test_a"}
