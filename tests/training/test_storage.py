"""Disks that are full, slow, unmounted or corrupt data: the run continues or exits with 2, and the last valid checkpoint loads."""

import errno
import functools
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from commands import REPOSITORY, environment, read_ends, read_metrics, run
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.checkpoint import directory, format_writer, saving
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.manager import AsyncSaver
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.errors import UserError
from moe_trainer.io import BestEffortStream
from moe_trainer.training import pretrain

ITERATIONS = 8
LINE = [*TINY, *MOCK, "--train-iters", str(ITERATIONS), "--save", "ckpt", "--save-interval", "2", "--auto-resume"]
ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]  # else it saves synchronously


def disk_full_error():
    return OSError(errno.ENOSPC, "No space left on device")


def fail_saves(monkeypatch, *iterations):
    """Raise a full-disk error when these iterations' checkpoints are completed; the ranks are forked from here."""
    flush_file = format_writer.flush_file

    def flush(path):
        if any(f"iter_{iteration:07d}." in str(path) for iteration in iterations):
            raise disk_full_error()
        flush_file(path)

    monkeypatch.setattr(format_writer, "flush_file", flush)


def curve(folder):
    return [
        (r["iteration"], r["lm loss"], r["grad_norm"])
        for r in read_metrics(folder / "ckpt" / "metrics.jsonl")
        if "validation" not in r
    ]


def saved(folder):
    return directory.complete_iterations(folder / "ckpt")


def test_lock_does_not_outlive_a_refused_run(tmp_path, monkeypatch):
    def refuse(*_):
        assert (tmp_path / "ckpt" / directory.LOCK).exists()
        raise UserError("no data")

    monkeypatch.setattr(pretrain, "build_inputs", refuse)
    finished = run(LINE, tmp_path)
    assert finished.returncode == 2 and "no data" in finished.stderr, finished.stderr
    assert not (tmp_path / "ckpt" / directory.LOCK).exists()


def test_lock_does_not_outlive_a_run_that_ends_without_its_main_thread(tmp_path, monkeypatch):
    args, codes = parse_args([*LINE, "--save", str(tmp_path)], 1), []
    monkeypatch.setattr(os, "_exit", codes.append)
    directory.acquire_lock(tmp_path)
    pretrain.end_process(args, 1, 3)
    assert (tmp_path / directory.LOCK).exists(), "it is that of rank 0"
    pretrain.end_process(args, 0, 143)
    assert not (tmp_path / directory.LOCK).exists() and codes == [3, 143]


@pytest.mark.parametrize("how", [[], ASYNC], ids=["sync", "async"])
def test_two_failed_saves_do_not_stop_the_run(tmp_path, monkeypatch, how):
    fail_saves(monkeypatch, 2, 4, 8)
    monkeypatch.setattr(AsyncSaver, "writing", True)  # until the next save is due
    finished = run([*LINE, *how, "--train-iters", "10"], tmp_path, 2)
    assert finished.returncode == 0, finished.stderr
    assert (
        "cannot save the checkpoint of iteration 4 to ckpt" in finished.stderr
        and "failure 2 in a row" in finished.stderr
    )
    assert len(curve(tmp_path)) == 10 and saved(tmp_path) == [6, 10]
    page = (tmp_path / "ckpt" / "dashboard.html").read_text()
    assert re.findall(r"saved a checkpoint at iteration (\d+)", page) == ["6", "10"]
    assert [path.name for path in (tmp_path / "ckpt").glob("iter_*") if "." in path.name] == []


@pytest.mark.parametrize("how", [[], ASYNC], ids=["sync", "async"])
def test_third_consecutive_failed_save_ends_the_run(tmp_path, monkeypatch, how):
    fail_saves(monkeypatch, 4, 6, 8)
    finished = run([*LINE, *how, "--train-iters", "100", "--lr-decay-iters", "100"], tmp_path, 2)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert "to ckpt: " in finished.stderr and "No space left on device" in finished.stderr
    assert "The checkpoint of iteration 2 there is complete" in finished.stderr and "ending the run" in finished.stderr
    assert saved(tmp_path) == [2] and verify_checkpoint(tmp_path / "ckpt" / "iter_0000002").problems == []


@pytest.mark.parametrize("how", [[], ASYNC], ids=["sync", "async"])
def test_failed_last_save_ends_the_run_after_evaluation_and_export(tmp_path, monkeypatch, how):
    fail_saves(monkeypatch, 8)
    monkeypatch.setattr(pretrain, "close_metrics", lambda _: print("metrics closed"))
    finished = run([*LINE, *how, "--eval-iters", "1", "--export-weights", "w.safetensors"], tmp_path)
    assert finished.returncode == 2 and "This was the last save of the run" in finished.stderr
    assert "metrics closed" in finished.stdout
    (end,) = read_ends(tmp_path / "ckpt" / "metrics.jsonl")
    assert (end["ended"], end["exit_code"]) == ("failed", 2) and "the last save of the run" in end["reason"]
    assert "validation loss at iteration 8" in finished.stdout and (tmp_path / "w.safetensors").exists()
    assert len(curve(tmp_path)) == ITERATIONS and saved(tmp_path) == [2, 4, 6]


def test_changed_model_structure_ends_the_run_at_the_next_save(tmp_path, monkeypatch):
    digests = iter(range(100))
    monkeypatch.setattr(saving, "digest_shards", lambda shards: str(next(digests)))
    finished = run([*LINE, "--ckpt-assume-constant-structure"], tmp_path)
    assert finished.returncode == 2 and "is not what it was at the first save" in finished.stderr
    assert len(curve(tmp_path)) == 4


def test_save_slower_than_the_distributed_timeout_completes(tmp_path, monkeypatch):
    flush_file = format_writer.flush_file

    def slow(path):
        time.sleep(7)
        flush_file(path)

    monkeypatch.setattr(format_writer, "flush_file", slow)
    finished = run([*LINE, "--train-iters", "2", "--distributed-timeout-seconds-after-init", "4"], tmp_path, 2)
    assert finished.returncode == 0, finished.stderr
    assert saved(tmp_path) == [2]


def test_an_older_checkpoint_is_deleted_only_after_a_valid_one(tmp_path, monkeypatch):
    """The disk loses data: the checkpoint of iteration 4 is truncated after it was written."""
    publish = saving.publish

    def losing(temporary, *args):
        if "iter_0000004" in str(temporary):
            os.truncate(next(temporary.glob("*.distcp")), 100)
        publish(temporary, *args)

    monkeypatch.setattr(saving, "publish", losing)
    finished = run([*LINE, "--exit-interval", "4", "--save-retain-interval", "100"], tmp_path)
    assert finished.returncode == 0 and "older checkpoints are kept (iteration 2)" in finished.stderr
    again = run([*LINE, "--save-retain-interval", "100"], tmp_path)
    assert again.returncode == 0 and "going on from iteration 2" in again.stderr
    assert [row[0] for row in curve(tmp_path)] == list(range(1, ITERATIONS + 1))


def test_total_limit_spares_what_the_run_started_from(tmp_path, monkeypatch):
    """One rank deletes. A run that does not continue the one in its folder is refused: later it could not tell them apart."""
    delete_checkpoint = saving.delete_checkpoint

    def delete(*args):
        delete_checkpoint(*args)
        with open(tmp_path / "deleted", "a") as file:
            file.write(f"{args[1]} ")

    monkeypatch.setattr(saving, "delete_checkpoint", delete)
    limited = [*LINE, "--save-total-limit", "1"]
    assert run([*limited, "--exit-interval", "4"], tmp_path, 2).returncode == 0
    assert saved(tmp_path) == [4] and (tmp_path / "deleted").read_text() == "2 "
    assert run([*limited, "--save", "./ckpt"], tmp_path).returncode == 0
    assert saved(tmp_path) == [4, 8] and (tmp_path / "deleted").read_text() == "2 6 "
    other = [part for part in limited if part != "--auto-resume"]
    shutil.copytree(tmp_path / "ckpt", tmp_path / "elsewhere")
    for words in ("--seed 7", "--load ckpt --finetune", "--load elsewhere --train-iters 12"):
        refused = run([*other, "--save-interval", "3", *words.split()], tmp_path)
        problem = "checkpoints that this run does not continue (iteration 4, 8)"
        assert refused.returncode == 2 and problem in refused.stderr, (words, refused.stderr)
        assert saved(tmp_path) == [4, 8] and (tmp_path / "deleted").read_text() == "2 6 "


def flip_bit(folder):
    """Flip a bit in the middle of the largest tensor, not in a header."""
    stored = max(read_index(folder).storage_data.values(), key=lambda stored: stored.length)
    path = folder / stored.relative_path
    content = bytearray(path.read_bytes())
    content[stored.offset + stored.length // 2] ^= 1
    path.write_bytes(content)


def test_checkpoint_with_a_flipped_bit_is_skipped_while_loading(tmp_path):
    """File sizes do not show it; the partly loaded model is loaded again from the previous checkpoint."""
    (tmp_path / "whole").mkdir()
    assert run(LINE, tmp_path / "whole").returncode == 0
    assert run([*LINE, "--exit-interval", "6"], tmp_path).returncode == 0
    flip_bit(tmp_path / "ckpt" / "iter_0000006")
    finished = run(LINE, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert (
        "skipping the checkpoint of iteration 6" in finished.stderr
        and "going on from iteration 4 instead" in finished.stderr
    )
    assert curve(tmp_path) == curve(tmp_path / "whole")


def test_run_without_a_valid_checkpoint_does_not_start_over(tmp_path):
    assert run([*LINE, "--train-iters", "2"], tmp_path).returncode == 0
    flip_bit(tmp_path / "ckpt" / "iter_0000002")
    finished = run(LINE, tmp_path)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert "the checksum of" in finished.stderr and "No other complete checkpoint is in ckpt." in finished.stderr
    (tmp_path / "ckpt" / "iter_0000002" / "metadata.json").unlink()
    finished = run(LINE, tmp_path)
    assert finished.returncode == 2 and "it holds no checkpoint, and the tracker names 2" in finished.stderr
    assert len(curve(tmp_path)) == 2


def test_unmounted_save_folder_is_an_error(tmp_path):
    point = tmp_path / "disk"
    point.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(point)], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting a tmpfs needs root")
    try:
        (point / "ckpt").mkdir()
        (point / "ckpt" / directory.LOCK).touch()
        number = directory.filesystem_id(point / "ckpt")
        directory.check_filesystem_mounted(point / "ckpt", number)
    finally:
        subprocess.run(["umount", str(point)], check=True)
    with pytest.raises(OSError, match="no longer mounted"):
        directory.check_filesystem_mounted(point / "ckpt", number)
    (point / "ckpt").mkdir()
    (point / "ckpt" / directory.LOCK).touch()  # it came back, under another number
    directory.check_filesystem_mounted(point / "ckpt", number)


def test_missing_save_folder_passes_the_mount_check(tmp_path):
    number = directory.filesystem_id(tmp_path / "ckpt")
    directory.check_filesystem_mounted(tmp_path / "ckpt", number)
    assert directory.filesystem_id(tmp_path) == number


def test_full_disk_for_stdout_and_stderr_does_not_end_the_run(tmp_path):
    with open("/dev/full", "w") as full:
        argv = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *LINE]
        ended = subprocess.run(
            argv, cwd=tmp_path, env=environment(), check=False, timeout=600, stdout=full, stderr=full
        )
    assert ended.returncode == 0
    assert saved(tmp_path) == [2, 4, 6, 8] and len(curve(tmp_path)) == ITERATIONS


def test_best_effort_stream_raises_broken_pipe():
    class Pipe:
        def write(self, text):
            raise BrokenPipeError

        flush = functools.partialmethod(write, "")

    for talk in (BestEffortStream(Pipe()).flush, lambda: BestEffortStream(Pipe()).write("no reader")):
        with pytest.raises(BrokenPipeError):
            talk()


def test_checkpoint_on_a_read_only_disk_loads(tmp_path):
    """--load from a read-only folder, --save to another one."""
    assert run([*LINE, "--exit-interval", "2"], tmp_path).returncode == 0
    base = tmp_path / "base"
    base.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "--bind", tmp_path / "ckpt", base], capture_output=True, check=False).returncode
    ):
        pytest.skip("a read-only mount needs root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", base], check=True)
        line = [part for part in LINE if part != "--auto-resume"]
        finished = run([*line, "--load", "base", "--save", "other"], tmp_path)
        assert finished.returncode == 0 and "from base [ t 1/1" in finished.stderr, finished.stderr
        refused = run([*line, "--load", "base", "--save", "base"], tmp_path)
        assert (
            refused.returncode == 2
            and "--save base: cannot write there" in refused.stderr
            and "Traceback" not in refused.stderr
        )
    finally:
        subprocess.run(["umount", base], check=True)
