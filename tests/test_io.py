"""Files: replaced at once, devices never; append-only files recover from a failed append and resume an older file."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from commands import environment
from structure.source import ROOT

from moe_trainer import io
from moe_trainer.__main__ import COMMANDS, run
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


def unwritable_output(reader_left):
    """Return a stdout that is a full disk, or a pipe whose reader has ended."""
    if not reader_left:
        return open("/dev/full", "w", encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("reader_left", [False, True])
@pytest.mark.parametrize("length", [1, 100_000])  # noticed when stdout is flushed, and by print
@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"train"}))
def test_a_command_whose_output_cannot_be_written_ends_with_a_message(
    command, length, reader_left, monkeypatch, capsys
):
    def main(words):
        try:
            print("x" * length)
        except OSError:
            pytest.fail("a handler of another file's errors would take this one")
        return 0

    monkeypatch.setattr(importlib.import_module(f"moe_trainer.commands.{command.replace('-', '_')}"), "main", main)
    monkeypatch.setattr(sys, "argv", [f"moe-trainer {command}"])
    with unwritable_output(reader_left) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            run(command, [])
        assert sys.stdout is stream
        monkeypatch.undo()
    message = f"moe-trainer {command}: cannot write to the standard output: No space left on device\n"
    assert (ended.value.code, capsys.readouterr().err) == ((141, "") if reader_left else (2, message))


@pytest.mark.parametrize("reader_left", [False, True])
@pytest.mark.parametrize(
    "words",
    [["pretrain_moe.py", "--help"], ["-m", "moe_trainer", "--help"], ["-m", "moe_trainer", "train", "--help", "moe"]],
)
def test_help_that_cannot_be_written(words, reader_left):
    with unwritable_output(reader_left) as stream:
        argv = [sys.executable, *words]
        ended = subprocess.run(argv, stdout=stream, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
        stream.close()
    lines = ended.stderr.splitlines()
    assert (ended.returncode, len(lines)) == ((141, 0) if reader_left else (2, 1)), ended.stderr
    assert all("cannot write to the standard output: No space left on device" in line for line in lines)
