"""What a report does when its disk refuses: metrics.jsonl holds back and misses nothing, TensorBoard begins a new file."""

import errno
import json
import os

import pytest

from moe_trainer.errors import InputError
from moe_trainer.report import metrics_file
from moe_trainer.report.board import Board
from moe_trainer.report.metrics_file import open_metrics_file


class Disk:
    """os.write that takes `room` bytes."""

    def __init__(self, monkeypatch):
        self.room, self._write = 10**9, os.write
        monkeypatch.setattr(metrics_file.os, "write", self.write)

    def write(self, descriptor, content):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, content[:self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_held_back_until_there_is_room(tmp_path, disk, caplog):
    path = tmp_path / "metrics.jsonl"
    file = open_metrics_file(str(path), 0)
    file.append('{"iteration": 1}')
    disk.room = 7  # the next record is torn
    for iteration in (2, 3):
        file.append(f'{{"iteration": {iteration}}}')
    assert path.read_text() == '{"iteration": 1}\n{"itera'
    assert caplog.text.count("cannot write") == 1 and str(path) in caplog.text
    disk.room = 10**9
    file.append('{"iteration": 4}')
    file.close()
    assert lines(path) == [{"iteration": number} for number in (1, 2, 3, 4)]
    assert "nothing is missing" in caplog.text


def test_what_is_held_back_at_the_end_is_an_error(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    file = open_metrics_file(str(path), 0)
    disk.room = 0
    file.append('{"iteration": 1}')
    with pytest.raises(InputError, match=f"--metrics-file: cannot write {path}: No space left on device"):
        file.close()
    file.close()


def test_memory_is_no_disk(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(metrics_file, "MOST_HELD_BACK", 40)
    file = open_metrics_file(str(tmp_path / "metrics.jsonl"), 0)
    disk.room = 0
    file.append("x" * 20)
    with pytest.raises(InputError, match="cannot write"):
        file.append("x" * 20)


class Writer:
    """A SummaryWriter as far as Board sees it; `broken` is the disk."""

    def __init__(self, log, broken):
        if broken:
            raise full()
        self.log, self.broken = log, broken

    def add_scalar(self, name, value, step):
        if self.broken:
            raise full()
        self.log.append(step)

    def flush(self):
        if self.broken:
            raise full()

    close = flush


def full():
    return OSError(errno.ENOSPC, "No space left on device")


def test_a_board_goes_on_in_a_new_file(caplog):
    broken, files = [], []

    def open_writer():
        files.append([])
        return Writer(files[-1], broken)

    board = Board("tb", open_writer)
    board.add_scalar("lm loss", 1.0, 1)
    broken.append(True)
    for step in (2, 3):
        board.add_scalar("lm loss", 1.0, step)
        board.flush()
    broken.clear()
    board.flush()
    board.add_scalar("lm loss", 1.0, 4)
    board.close()
    assert files[0] == [1] and files[-1] == [4]
    assert caplog.text.count("cannot write tb (No space left on device)") == 1 and "is written again, in a new file" in caplog.text
    with pytest.raises(OSError, match="No space"):
        Board("tb", lambda: Writer([], [True]))
