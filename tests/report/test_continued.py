"""Files that grow at their end: what a failed append leaves, and where an older file is continued."""

import json
import os

import pytest

from moe_trainer.report import continued
from moe_trainer.report.continued import ContinuedFile, end_before


def test_what_a_failed_append_has_left_is_overwritten(tmp_path, monkeypatch):
    file = ContinuedFile(tmp_path / "file")
    assert file.append(b"first\n") == 0
    real = os.open

    def half(path, flags, mode):
        with open(path, "ab") as target:
            target.write(b"half of a long record that the disk")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(continued.os, "open", half)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"a record\n")
    monkeypatch.setattr(continued.os, "open", real)
    assert file.append(b"next\n") == 6 and file.end == 11
    assert (tmp_path / "file").read_bytes() == b"first\nnext\n"


def test_an_older_file_is_continued_before_the_first_step_that_comes_again(tmp_path):
    path, kept = tmp_path / "lines", []
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 0, 1, 2, 2)) + '{"step": 1, "to')
    assert end_before(path, "step", 2, kept.append) == len('{"step": 0}\n') * 3 and kept == [{"step": 0}, {"step": 0}, {"step": 1}]
    assert end_before(path, "step", 9) == len('{"step": 0}\n') * 5
    assert end_before(path, "step", 0) == end_before(path, "other", 5) == end_before(tmp_path / "none", "step", 5) == 0
    file = ContinuedFile(path, end_before(path, "step", 1))
    file.append(b"x\n")
    assert path.read_text() == '{"step": 0}\n{"step": 0}\nx\n'
