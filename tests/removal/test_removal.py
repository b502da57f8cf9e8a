"""Features can be taken out: nothing names them afterwards, every module is imported, the tests of what remains pass."""

import subprocess

import pytest
from removal import remove

SPECS = sorted(path.stem for path in remove.HERE.glob("*.yaml"))
IN_SUITE = [name for name in SPECS if remove.read_spec(remove.HERE / f"{name}.yaml").suite]
SOURCE = '''import os
import sys


@decorated
def first(
    value,
):
    return value


class Table:
    a: int = 1
    b: int = field(
        2,
        needs="a",
    )
    """Acts with a."""
    c: int = 3


NAMES = [
    "a",
    "b",
]
'''


def test_some_features_are_taken_out_in_every_run():
    assert IN_SUITE or not SPECS


@pytest.mark.parametrize("name", SPECS)
def test_specifications_fit_the_checkout(name):
    """Every file is tracked, every line is there once; a feature that the suite takes out is tried below."""
    spec = remove.read_spec(remove.HERE / f"{name}.yaml")
    names = remove.tracked(remove.ROOT)
    patterns = [*spec.files, *spec.allowed, *spec.tests]
    missing = [
        each
        for each in patterns
        if not any(found == each or (each[-1] == "/" and found.startswith(each)) for found in names)
    ]
    assert not missing
    for path, lines in spec.lines.items():
        text = (remove.ROOT / path).read_text()
        for line in lines:
            text = remove.without_lines(text, line, path.endswith(".py"))
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert not set(spec.tests) & set(spec.files), "tests to run are among the files that go"


@pytest.mark.parametrize("name", IN_SUITE)
def test_features_can_be_taken_out(name, tmp_path):
    assert not list(remove.take_out(name, tmp_path / "copy"))
    assert remove.run_tests(tmp_path / "copy", remove.read_spec(remove.HERE / f"{name}.yaml").tests) == 0


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("import sys", "import sys"),
        ("@decorated", "@decorated|def first(|value,|):|return value"),
        ("b: int = field(", 'b: int = field(|2,|needs="a",|)|"""Acts with a."""'),
        ('"b",', '"b",'),
        ("import os\nimport sys", "import os|import sys"),
    ],
)
def test_a_line_goes_with_the_statement_that_it_begins(line, gone):
    rows = [row.strip() for row in SOURCE.splitlines() if row.strip()]
    left = [row.strip() for row in remove.without_lines(SOURCE, line, is_python=True).splitlines() if row.strip()]
    assert left == [row for row in rows if row not in gone.split("|")]


@pytest.mark.parametrize("line", ["import json", "a"])
def test_a_line_that_is_not_there_once_is_an_error(line):
    with pytest.raises(remove.SpecError, match="is there (0|2) times, not once"):
        remove.without_lines("a\nb\na\n", line, is_python=False)


def test_rows_and_ends_of_rows_go_with_the_names_that_they_use():
    rows = ["ONE = --old-flag", "TWO = {ONE} --other", "{TWO} -> ok", "--other -> ok", "# of --old-flag"]
    rows += ["--a 1 / --old-flag / {TWO} / 2 -> ok", "--old-flag / --a -> ok", "--a / --b -> note: --old-flag"]
    assert remove._kept_rows(rows, lambda row: "old-flag" in row) == [*rows[3:5], "--a 1 / 2 -> ok"]


def test_recorded_flags_of_the_feature_are_dropped():
    spec = remove.Spec(feature="old", words=["old-flag"])
    recorded = {
        "source": "of --old-flag",
        "flags": [{"flags": ["--old-flag-size"]}, {"flags": ["--kind"], "choices": ["new", "old-flag"]}],
        "retired": [["--old-flag-too", None, "why"], [["--old-flag"], 0], ["--other", "--old-flag"]],
    }
    assert remove._kept_records(recorded, spec) == {
        "source": "of --old-flag",
        "flags": [{"flags": ["--kind"], "choices": ["new"]}],
        "retired": [["--other"]],
    }


def test_what_still_names_a_feature_is_reported(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = OLD_Name\n")
    (tmp_path / "old_name.md").write_text("nothing\n")
    (tmp_path / "facts").mkdir()
    for name in ("CHANGELOG.md", "facts/upstream.md"):
        (tmp_path / name).write_text("old_name\n")
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    spec = remove.Spec(feature="old", words=["old_name"], allowed=["facts/"])
    assert list(remove.naming_lines(tmp_path, spec)) == ["a.py:2: y = OLD_Name", "old_name.md: the name of the file"]


@pytest.mark.parametrize("text", ["words: old", "feature: one", "feature: one\nwords: [a]\nlines: {a: b}", "file: [a]"])
def test_what_is_no_specification_is_an_error(text, tmp_path):
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(remove.SpecError, match="one.yaml"):
        remove.read_spec(tmp_path / "one.yaml")
