"""Full disks: metrics.jsonl buffers its records and loses none, TensorBoard starts a new file."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
from commands import read_metrics as read_json_lines

from moe_trainer.errors import UserError
from moe_trainer.metrics import metrics_file
from moe_trainer.metrics.metrics_file import open_metrics_file
from moe_trainer.metrics.tensorboard_writer import TensorBoardWriter, report_thread_error


class Disk:
    """A replacement of os.write that accepts `free` bytes."""

    def __init__(self, monkeypatch):
        self.free, self._write = 10**9, os.write
        monkeypatch.setattr(metrics_file.os, "write", self.write)

    def write(self, descriptor, content):
        if self.free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, content[: self.free])
        self.free -= written
        return written


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_records_are_buffered_on_a_full_disk(tmp_path, disk, caplog):
    path = tmp_path / "metrics.jsonl"
    file = open_metrics_file(str(path), 0)
    file.append('{"iteration": 1}')
    disk.free = 7  # the next record is torn
    for iteration in (2, 3):
        file.append(f'{{"iteration": {iteration}}}')
    assert path.read_text() == '{"iteration": 1}\n{"itera'
    assert caplog.text.count("cannot write") == 1 and str(path) in caplog.text
    disk.free = 10**9
    file.append('{"iteration": 4}')
    file.close()
    assert read_json_lines(path) == [{"iteration": number} for number in (1, 2, 3, 4)]
    assert "no record is missing" in caplog.text


def test_buffered_records_at_the_end_are_an_error(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    file = open_metrics_file(str(path), 0)
    disk.free = 0
    file.append('{"iteration": 1}')
    with pytest.raises(UserError, match=f"--metrics-file: cannot write {path}: No space left on device"):
        file.close()
    file.close()


def test_metrics_buffer_is_bounded(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_BUFFERED_BYTES", 40)
    file = open_metrics_file(str(tmp_path / "metrics.jsonl"), 0)
    disk.free = 0
    file.append("x" * 20)
    with pytest.raises(UserError, match="cannot write"):
        file.append("x" * 20)


class Writer:
    """The part of SummaryWriter that TensorBoardWriter uses; `broken` is the disk."""

    def __init__(self, log, broken):
        if broken:
            raise disk_full_error()
        self.log, self.broken = log, broken

    def add_scalar(self, name, value, step):
        if self.broken:
            raise disk_full_error()
        self.log.append(step)

    def flush(self):
        if self.broken:
            raise disk_full_error()

    close = flush


def test_disk_errors_of_tensorboards_thread_print_no_traceback(monkeypatch, capsys):
    module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(threading, "excepthook", report_thread_error)

    def fail(kind):
        def write(_):
            raise kind("No space left on device")

        return write

    for kind, count in ((OSError, 0), (RuntimeError, 1)):
        writer = module._AsyncWriter(SimpleNamespace(write=fail(kind), flush=lambda: None, close=lambda: None))
        with pytest.raises(kind):
            writer.write(b"event")
            writer.flush()
        writer._worker.join()
        assert capsys.readouterr().err.count("Traceback") == count


def disk_full_error():
    return OSError(errno.ENOSPC, "No space left on device")


def test_tensorboard_continues_in_a_new_file_after_a_full_disk(caplog):
    broken, files = [], []

    def open_writer():
        files.append([])
        return Writer(files[-1], broken)

    writer = TensorBoardWriter("tb", open_writer)
    writer.add_scalar("lm loss", 1.0, 1)
    broken.append(True)
    for step in (2, 3):
        writer.add_scalar("lm loss", 1.0, step)
        writer.flush()
    broken.clear()
    writer.flush()
    writer.add_scalar("lm loss", 1.0, 4)
    writer.close()
    assert files[0] == [1] and files[-1] == [4]
    assert caplog.text.count("cannot write tb (No space left on device)") == 1 and "in a new file" in caplog.text
    with pytest.raises(OSError, match="No space"):
        TensorBoardWriter("tb", lambda: Writer([], [True]))
