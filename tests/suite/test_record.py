"""Tests of suite/record.py: what is stored, and what a renewed part replaces."""

import json
import pickle
import zlib
from dataclasses import replace

import numpy as np
from structure.source import ROOT
from suite import probes, record, tiers

BLOCKS = [("a.py", "", 0), ("a.py", "f", 0), ("b.py", "g", 0)]
KEPT = "tests/suite/test_runner.py::test_kept"
RENEWED = "tests/suite/test_record.py::test_renewed"


def make(tests, blocks, reached):
    return record.Record(
        tests, [float(len(name)) for name in tests], blocks, np.packbits(np.array(reached, bool), axis=1)
    )


def reached(known, test):
    row = np.unpackbits(known.bits[known.tests.index(test)], count=len(known.blocks))
    return {block for block, is_reached in zip(known.blocks, row) if is_reached}


def test_a_written_record_is_read(tmp_path):
    known = make([RENEWED, KEPT], BLOCKS, [[1, 1, 0], [0, 1, 1]])
    record.write(known, tmp_path / "record.xz")
    found = record.read(tmp_path / "record.xz")
    assert {test: reached(found, test) for test in found.tests} == {test: reached(known, test) for test in known.tests}
    assert record.read_seconds(tmp_path / "record.xz") == dict(zip(known.tests, known.seconds))
    assert [found.tests[at] for at in found.tests_that_reach(found.columns["a.py", "f"])] == sorted(known.tests)
    assert [found.tests[at] for at in found.tests_that_reach(found.columns["b.py", None])] == [KEPT]


def test_a_renewed_module_replaces_its_tests():
    gone = ["tests/no_such_module.py::test_gone", RENEWED + "_before"]
    skipped = [RENEWED + "_skipped", RENEWED + "_always_skipped"]
    old = make([*gone, KEPT, *skipped], BLOCKS, [[1, 0, 0], [1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]])
    new = make([RENEWED], BLOCKS[1:] + [("c.py", "h", 0)], [[1, 0, 1]])
    merged = record.merge(old, replace(new, skipped=frozenset(skipped)))
    assert sorted(merged.tests) == sorted([RENEWED, KEPT, skipped[0]])
    assert reached(merged, RENEWED) == {("a.py", "f", 0), ("c.py", "h", 0)}
    assert reached(merged, KEPT) == {("b.py", "g", 0)}, "blocks that are not there any more are forgotten"


def test_skipped_tests_are_not_recorded(tmp_path):
    folder = tmp_path / "record"
    folder.mkdir()
    (folder / "blocks.json").write_text(json.dumps([("a.py", "", 1), ("a.py", "f", 3)]))
    with (folder / "reached0.pickles").open("wb") as file:
        for name, row in (("a", bytes([1, 0])), ("b", None)):
            pickle.dump((name, 1.0, row and zlib.compress(row)), file)
    found = record.read_raw(folder)
    assert found.tests == ["a"] and found.skipped == {"b"}


def test_modules_of_a_changed_copy_are_not_replaced_by_prepared_code(tmp_path):
    file, copy = ROOT / "moe_trainer" / "version.py", tmp_path / "moe_trainer"
    copy.mkdir()
    (copy / "version.py").write_text("changed = True")
    prepared = probes.code_path(tmp_path / "prepared", file)
    prepared.parent.mkdir()
    prepared.write_bytes(b"")
    finder = probes.Finder(tmp_path / "prepared", 1)
    assert finder.find_spec("moe_trainer.version", [str(file.parent)]).origin == str(file)
    assert finder.find_spec("moe_trainer.version", [str(copy)]) is None


def test_the_record_knows_most_tests():
    """Unknown tests run in every tier, and mutants are not tried with them."""
    known = {name.partition("[")[0] for name in record.read_seconds()}
    paths = (ROOT / "tests").rglob("test_*.py")
    names = [f"{path.relative_to(ROOT).as_posix()}::{name}" for path in paths for name in tiers.function_names(path)]
    unknown = sorted(name for name in names if name not in known)
    assert len(unknown) < len(names) / 20, f"renew the record (docs/test_suite.md): {unknown[:20]} ..."
