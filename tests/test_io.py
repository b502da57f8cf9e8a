"""Files: replaced at once, devices never; append-only files recover from a failed append and resume an older file."""

import json
import os

import pytest

from moe_trainer import io
from moe_trainer.io import ResumableFile, atomic_write, resume_offset


def test_a_file_is_replaced_only_when_the_block_ends_well(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write("new")
        1 / 0  # noqa: B018
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as file:
        file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_device_is_written_and_not_replaced(tmp_path):
    """A run as root would otherwise put a file in the place of /dev/stdout."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(path) as file:
        file.write("text")
    assert os.read(reader, 10) == b"text" and path.is_fifo()
    os.close(reader)
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path) as file:
        file.write("text")


def test_partial_data_of_a_failed_append_is_overwritten(tmp_path, monkeypatch):
    file = ResumableFile(tmp_path / "file")
    assert file.append(b"first\n") == 0
    real = os.open

    def half(path, flags, mode):
        with open(path, "ab") as target:
            target.write(b"half of a long record that the disk")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io.os, "open", half)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"a record\n")
    monkeypatch.setattr(io.os, "open", real)
    assert file.append(b"next\n") == 6 and file.end == 11
    assert (tmp_path / "file").read_bytes() == b"first\nnext\n"


def test_resume_truncates_records_of_repeated_steps(tmp_path):
    path, kept = tmp_path / "lines", []
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 0, 1, 2, 2)) + '{"step": 1, "to')
    assert resume_offset(path, "step", 2, kept.append) == len('{"step": 0}\n') * 3 and kept == [
        {"step": 0},
        {"step": 0},
        {"step": 1},
    ]
    assert resume_offset(path, "step", 9) == len('{"step": 0}\n') * 5
    assert (
        resume_offset(path, "step", 0)
        == resume_offset(path, "other", 5)
        == resume_offset(tmp_path / "none", "step", 5)
        == 0
    )
    file = ResumableFile(path, resume_offset(path, "step", 1))
    file.append(b"x\n")
    assert path.read_text() == '{"step": 0}\n{"step": 0}\nx\n'
