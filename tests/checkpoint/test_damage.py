"""Damaged, incomplete, foreign and unwritable checkpoints: named, refused, and nothing else is harmed."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
OPTIONS = LoadOptions(RECORD)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A directory with complete checkpoints of iterations 3 and 6."""
    for iteration in (3, 6):
        save(
            tmp_path,
            CheckpointState(iteration, RECORD),
            [FakeModel(seed=iteration)],
            None,
            SINGLE,
            SaveOptions(verify_integrity=True),
        )
    return tmp_path


def load_error(folder, **options) -> str:
    model = FakeModel(seed=1)
    with pytest.raises(CheckpointError) as caught:
        load(folder, [model], None, SINGLE, replace(OPTIONS, **options))
    return str(caught.value)


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize("file", ["metadata.json", ".metadata", "__0_0.distcp"])
def test_a_missing_file_is_named_with_advice(saved, file):
    (saved / "iter_0000006" / file).unlink()
    text = load_error(saved)
    assert f"iter_0000006/{file} is missing" in text and "iteration 3" in text and "--ckpt-step 3" in text
    assert "--ckpt-step 6" not in text


@pytest.mark.parametrize("file", ["metadata.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(saved, file, share):
    path = saved / "iter_0000006" / file
    cut(path, int(path.stat().st_size * share))
    text = load_error(saved)
    assert f"iter_0000006/{file}" in text and "incomplete or damaged" in text and "--ckpt-step 3" in text
    assert load(saved, [FakeModel()], None, SINGLE, replace(OPTIONS, ckpt_step=3)).iteration == 3


@pytest.mark.parametrize("place", [0.1, 0.3, 0.6, 0.97])
@pytest.mark.parametrize("count", [1, 4096])
def test_changed_bytes_are_detected_while_reading(saved, place, count):
    path = saved / "iter_0000006/__0_0.distcp"
    content = bytearray(path.read_bytes())
    start = int(len(content) * place)
    content[start : start + count] = bytes(byte ^ 0xFF for byte in content[start : start + count])
    path.write_bytes(content)
    text = load_error(saved)
    assert "iter_0000006/__0_0.distcp is damaged" in text and "--ckpt-step 3" in text


def test_changed_bytes_are_detected_by_hash(saved):
    path = saved / "iter_0000006/__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "its SHA-256 differs" in load_error(saved, verify_integrity=True)
    (saved / "iter_0000003/integrity.json").unlink()
    assert "save with --verify-integrity" in load_error(saved, verify_integrity=True, ckpt_step=3)


def test_random_index_damage_always_gives_a_checkpoint_error(saved):
    path = saved / "iter_0000006/.metadata"
    content_before = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        content = bytearray(content_before)
        for place in torch.randint(len(content), (3,), generator=generator).tolist():
            content[place] ^= 0xFF
        path.write_bytes(content)
        check(saved / "iter_0000006")  # raises nothing


def test_damaged_tracker_is_reported(saved):
    (saved / directory.TRACKER).write_text("six")
    text = load_error(saved)
    assert "'six'" in text and "--ckpt-step 6" in text
    (saved / directory.TRACKER).write_text("9")
    assert "which does not exist" in load_error(saved)
    (saved / directory.TRACKER).write_bytes(b"\xff\xfe")
    assert "cannot read" in load_error(saved)


def test_missing_tracker_with_complete_checkpoints_is_reported(saved, caplog):
    (saved / directory.TRACKER).unlink()
    assert load(saved, [FakeModel()], None, SINGLE, OPTIONS).iteration == 6
    assert "is missing, but there are complete checkpoints" in caplog.text


def test_the_folder_of_one_iteration_is_not_the_directory(saved):
    assert "give its parent" in load_error(saved / "iter_0000006")


def test_other_formats_are_refused_by_name(saved, shared):
    (saved / "iter_0000006/metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    )
    assert "the zarr format" in load_error(saved)
    (saved / "iter_0000006/metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    assert "Megatron-FSDP" in load_error(saved)


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
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", folder], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _fill_disk(rank, size, folder):
    ps = ParallelState.create(size, rank)
    model = FakeModel(layers=[], vocab=128)
    record = RECORD | {"num_layers": 0}
    save(folder, CheckpointState(1, record), [model], None, ps, SaveOptions())
    big = FakeModel()
    for saver in (save, AsyncSaver()):
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            if isinstance(saver, AsyncSaver):
                saver.start(folder, CheckpointState(2, RECORD), [big], FakeOptimizer(big, ps, True), ps, SaveOptions())
                saver.finish()
            else:
                saver(folder, CheckpointState(2, RECORD), [big], FakeOptimizer(big, ps, True), ps, SaveOptions())
        text = str(caught.value)
        assert str(folder) in text and "MiB are free" in text and "iteration 1 there is complete and remains" in text
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
        save(saved, CheckpointState(9, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    assert sorted(path.name for path in saved.iterdir()) == before


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
    for path in (stale / "__0_0.distcp", stale):
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
        save(
            tmp_path / "timed",
            CheckpointState(iteration, RECORD),
            [model],
            FakeOptimizer(model, SINGLE),
            SINGLE,
            SaveOptions(),
        )
    delays = torch.rand(20, generator=torch.Generator().manual_seed(3)).mul(10 * (time.monotonic() - began)).tolist()
    seen, delay = [], 0.0
    while (
        delays or len(set(seen)) < 3
    ):  # more of them, and longer, where the machine has slowed down since it was timed
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
