"""Damaged, incomplete, foreign and unwritable checkpoints: named, refused, and nothing else is harmed."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bad_input import cut, error_of, flip
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import run_ranks

from moe_trainer.checkpoint import directory
from moe_trainer.checkpoint.index import check
from moe_trainer.checkpoint.manager import (
    AsyncSaver,
    CheckpointError,
    CheckpointState,
    LoadOptions,
    SaveOptions,
    check_writable,
    latest_iteration,
    load,
    save,
)
from moe_trainer.checkpoint.resolve import latest_valid, resolve_checkpoint
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
OPTIONS = LoadOptions(RECORD)


NEWEST, NAMES = "iter_0000006", ("metadata.json", ".metadata", "__0_0.distcp")


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """A directory with complete checkpoints of iterations 3 and 6."""
    folder = tmp_path_factory.mktemp("complete")
    for iteration in (3, 6):
        model, options = FakeModel(seed=iteration), SaveOptions(verify_integrity=True)
        save(folder, CheckpointState(iteration, RECORD), [model], None, SINGLE, options)
    return folder


@pytest.fixture
def saved(complete, tmp_path) -> Path:
    return Path(shutil.copytree(complete, tmp_path, dirs_exist_ok=True))


def load_error(folder: Path, *words: str, **options) -> str:
    options = replace(OPTIONS, **options)
    return error_of(CheckpointError, load, folder, [FakeModel(seed=1)], None, SINGLE, options, words=words)


DAMAGES = (
    *((name, lambda path, share=share: cut(path, share), "incomplete or damaged") for name in NAMES for share in (0.0, 0.5, 0.99)),
    *((name, Path.unlink, f"{NEWEST}/{name} is missing") for name in NAMES),
    *(("__0_0.distcp", lambda path, place=place, count=count: flip(path, place, count), f"{NEWEST}/__0_0.distcp is damaged")
      for place in (0.1, 0.3, 0.6, 0.97) for count in (1, 4096)),
)  # fmt: skip


def test_a_damaged_file_is_named_with_advice(saved):
    """Files that are cut off, missing, or hold other bytes; the checkpoint before them can be loaded."""
    for name, damage, words in DAMAGES:
        path = saved / NEWEST / name
        content = path.read_bytes()
        damage(path)
        text = load_error(saved, f"{NEWEST}/{name}", words, "iteration 3", "--ckpt-step 3")
        assert "--ckpt-step 6" not in text
        path.write_bytes(content)
    path.unlink()
    assert load(saved, [FakeModel()], None, SINGLE, replace(OPTIONS, ckpt_step=3)).iteration == 3


def test_changed_bytes_are_detected_by_hash(saved):
    flip(saved / NEWEST / "__0_0.distcp", mask=1)
    load_error(saved, "its SHA-256 differs", verify_integrity=True)
    assert (latest_valid(saved), latest_valid(saved, hashes=True)) == (6, 3)
    (saved / "iter_0000003/integrity.json").unlink()
    load_error(saved, "save with --verify-integrity", verify_integrity=True, ckpt_step=3)


def test_random_index_damage_always_gives_a_checkpoint_error(saved):
    path = saved / NEWEST / ".metadata"
    content_before = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        path.write_bytes(content_before)
        for place in torch.rand(3, generator=generator).tolist():
            flip(path, place)
        check(saved / NEWEST)  # raises nothing


def test_damaged_trackers_wrong_folders_and_other_formats_are_reported(saved):
    load_error(saved / NEWEST, "give its parent")
    for tracker, *words in (
        (b"six", "'six'", "--ckpt-step 6"),
        (b"9", "which does not exist"),
        (b"\xff\xfe", "cannot read"),
    ):
        (saved / directory.TRACKER).write_bytes(tracker)
        load_error(saved, *words)
    (saved / directory.TRACKER).write_text("6")
    for backend, words in (("zarr", "the zarr format"), ("fsdp_dtensor", "Megatron-FSDP")):
        (saved / NEWEST / "metadata.json").write_text(
            json.dumps({"sharded_backend": backend, "sharded_backend_version": 1})
        )
        load_error(saved, words)


def test_missing_tracker_with_complete_checkpoints_is_reported(saved, caplog):
    (saved / directory.TRACKER).unlink()
    assert load(saved, [FakeModel()], None, SINGLE, OPTIONS).iteration == 6
    assert "is missing, but there are complete checkpoints" in caplog.text


def test_release_checkpoint_starts_at_iteration_zero(saved):
    os.rename(saved / "iter_0000006", saved / "release")
    (saved / directory.TRACKER).write_text("release\n")
    assert load(saved, [FakeModel()], None, SINGLE, OPTIONS).iteration == 0
    assert latest_iteration(saved) == 0


def test_a_folder_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot save the checkpoint of iteration 3 to {tmp_path}/file/save"):
        save(tmp_path / "file/save", CheckpointState(3, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    with pytest.raises(CheckpointError, match="--save .*cannot write there"):
        check_writable(tmp_path / "file/save", SINGLE)
    check_writable(tmp_path / "new/save", SINGLE)
    assert [path.name for path in (tmp_path / "new/save").iterdir()] == [directory.LOCK]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MiB with a small checkpoint of iteration 1 in it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _fill_disk(rank, size, folder):
    ps = ParallelState.create(size, rank)
    model = FakeModel(layers=[], vocab=128)
    record = RECORD | {"num_layers": 0}
    save(folder, CheckpointState(1, record), [model], None, ps, SaveOptions())
    big, saver = FakeModel(), AsyncSaver()

    def save_in_background(*what):
        saver.start(*what)
        saver.finish()

    what = folder, CheckpointState(2, RECORD), [big], FakeOptimizer(big, ps, True), ps, SaveOptions()
    words = "No space left on device", str(folder), "MiB are free", "iteration 1 there is complete and remains"
    for write in (save, save_in_background):
        error_of(CheckpointError, write, *what, words=words)
    assert load(folder, [model], None, ps, LoadOptions(record)).iteration == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_leaves_the_last_checkpoint_and_no_debris(small_disk, ranks):
    run_ranks(_fill_disk, ranks, small_disk)
    assert sorted(path.name for path in small_disk.iterdir()) == ["iter_0000001", directory.TRACKER]


def test_simulated_full_disk_leaves_the_last_checkpoint(saved, monkeypatch):
    """The same with a failing fsync, for users other than root."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(path.name for path in saved.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device.*iteration 6 there is complete and remains"):
        save(saved, CheckpointState(9, RECORD), [FakeModel()], None, SINGLE, SaveOptions(total_limit=1))
    assert sorted(path.name for path in saved.iterdir()) == before


@pytest.mark.parametrize(
    ("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.EACCES, False)]
)
def test_free_space_is_named_only_where_it_is_the_cause(saved, monkeypatch, code, is_full):
    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as raised:
        save(saved, CheckpointState(9, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    assert os.strerror(code) in str(raised.value) and ("MiB are free" in str(raised.value)) == is_full


def test_unexpected_error_in_background_save_is_raised(tmp_path, monkeypatch):
    saver = AsyncSaver()
    monkeypatch.setattr("moe_trainer.checkpoint.saving.PendingSave.write", lambda self: {}["gone"])
    saver.start(tmp_path, CheckpointState(3, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    with pytest.raises(CheckpointError, match="KeyError.*gone"):
        saver.finish()
    assert not saver.in_progress and list(tmp_path.iterdir()) == []


def test_partial_saves_are_removed_only_if_their_run_is_dead(saved):
    host, live = os.uname().nodename, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    fresh, stale = saved / "iter_0000008.tmp-otherhost-1", saved / "iter_0000007.tmp-otherhost-1"
    kept = [saved / f"iter_0000009.tmp-{host}-{live.pid}", fresh]
    gone = [saved / f"iter_0000009.tmp-{host}-{dead.pid}", saved / f"iter_0000003.old-{host}-{dead.pid}", stale]
    for folder in kept + gone:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"x")
    tracker = saved / f"{directory.TRACKER}.tmp-{host}-{dead.pid}"
    tracker.write_text("9")
    gone.append(tracker)
    past = time.time() - 3600
    for path in (stale / "__0_0.distcp", stale, fresh):  # a file that grows does not change the time of its folder
        os.utime(path, (past, past))
    try:
        save(saved, CheckpointState(12, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
        assert all(folder.exists() for folder in kept) and not any(folder.exists() for folder in gone)
    finally:
        live.communicate(b"\n")


@pytest.mark.parametrize("by", ["load", "save"])
def test_checkpoint_interrupted_during_replacement_is_restored(saved, by):
    """A kill between the two renames of publish()."""
    os.rename(saved / "iter_0000006", saved / f"iter_0000006.old-{os.uname().nodename}-999999999")
    if by == "load":
        assert load(saved, [FakeModel()], None, SINGLE, OPTIONS).iteration == 6
    else:
        save(saved, CheckpointState(9, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    assert check(saved / "iter_0000006") == []


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_kill_while_an_older_checkpoint_is_deleted(saved, monkeypatch, ckpt_format):
    """What is left of it is no checkpoint, in the legacy format without a completion mark too."""

    def delete_one_file_and_die(folder):
        if "iter_0000009" not in folder.name:  # that of a conversion to the legacy format
            return delete_all(folder)
        next(path for path in sorted(folder.rglob("*")) if path.is_file()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def save_next(iteration, limit=2):
        content, options = CheckpointState(iteration, RECORD), SaveOptions(total_limit=limit, ckpt_format=ckpt_format)
        save(saved, content, [FakeModel(seed=iteration)], None, SINGLE, options)

    delete_all = shutil.rmtree
    save_next(9)
    assert directory.complete_iterations(saved) == [6, 9]
    save_next(12)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_one_file_and_die)
        process = multiprocessing.get_context("fork").Process(target=save_next, args=(15,))
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL and list(saved.glob("iter_0000009.*"))
    assert directory.complete_iterations(saved) == [12, 15] and latest_valid(saved) == 15
    error_of(CheckpointError, resolve_checkpoint, saved, 9, words=("iter_0000009, which does not exist",))
    save_next(18, limit=None)
    assert sorted(path.name for path in saved.glob("iter_*")) == ["iter_0000012", "iter_0000015", "iter_0000018"]


def test_tracker_is_replaced_after_the_folder_has_its_name(tmp_path):
    with pytest.raises(FileNotFoundError):
        directory.publish(tmp_path / "lost", tmp_path, 6)
    assert directory.read_tracker(tmp_path) is None


def _save_repeatedly(folder, ready):
    torch.set_num_threads(1)
    model = FakeModel()
    optimizer = FakeOptimizer(model, SINGLE)
    saver = AsyncSaver()
    iteration = latest_iteration(folder) or 0
    ready.set()
    while True:
        iteration += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(iteration)
        content, options = CheckpointState(iteration, RECORD), SaveOptions(retain_interval=4)
        if iteration % 3:
            saver.finish()
            save(folder, content, [model], optimizer, SINGLE, options)
            save(folder, content, [model], optimizer, SINGLE, options)  # replaces what is there
        else:
            saver.start(folder, content, [model], optimizer, SINGLE, options)


def test_kill_at_random_moments_leaves_a_complete_checkpoint(tmp_path):
    """Whatever the moment, the tracker's checkpoint is complete and holds one iteration's values throughout."""
    context = multiprocessing.get_context("fork")
    model = FakeModel()
    for iteration in range(3):
        began = time.monotonic()
        state, optimizer = CheckpointState(iteration, RECORD), FakeOptimizer(model, SINGLE)
        save(tmp_path / "timed", state, [model], optimizer, SINGLE, SaveOptions())
    delays = torch.rand(20, generator=torch.Generator().manual_seed(3)).mul(10 * (time.monotonic() - began)).tolist()
    seen, delay = [], 0.0
    # more of them, and longer, where the machine has slowed down since it was timed
    while delays or len(set(seen)) < 3:
        delay = delays.pop(0) if delays else (delay or 0.1) * 1.5
        assert delay < 60, seen
        ready = context.Event()
        process = context.Process(target=_save_repeatedly, args=(tmp_path, ready))
        process.start()
        assert ready.wait(60)
        time.sleep(delay)
        process.kill()
        process.join()
        iteration = latest_iteration(tmp_path)
        if iteration is None:
            continue
        model = FakeModel(seed=1)
        assert load(tmp_path, [model], FakeOptimizer(model, SINGLE), SINGLE, OPTIONS).iteration == iteration
        assert all(bool((param == iteration).all()) for param in model.parameters())
        assert check(tmp_path / directory.folder_name(iteration)) == []
        seen.append(iteration)
    assert seen == sorted(seen) and len(set(seen)) >= 3, seen
    save(tmp_path, CheckpointState(10**6, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    assert not list(tmp_path.glob("*.tmp-*")) and not list(tmp_path.glob("*.old-*"))
