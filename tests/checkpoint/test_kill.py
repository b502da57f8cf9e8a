"""A rank killed at any point of a save of several ranks, and two runs that save into one folder."""

import multiprocessing
import os
import re
import signal

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import RanksFailedError, run_ranks

from moe_trainer.checkpoint import directory, format_writer, ownership, saving
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
from moe_trainer.checkpoint.save_planner import ShardSavePlanner
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.parallel.state import ParallelState

SIZES = dict(ep=2)
# where a rank ends: (rank, module or class, name of the function at whose call number it dies)
POINTS = {
    "planning": (1, ownership, "digest_shards", 1),
    "first bytes": (0, ShardSavePlanner, "resolve_data", 1),
    "writing": (1, ShardSavePlanner, "resolve_data", 9),
    "committing": (1, saving.PendingSave, "commit", 1),
    "index": (0, saving.FileSystemWriter, "finish", 1),
    "mark": (0, format_writer, "flush_file", 1),
    "rename": (0, saving, "publish", 1),
    "tracker": (0, directory, "write_tracker", 1),
}


def _die_at(owner, name, call):
    original, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


def _content(ps, iteration):
    model = FakeModel(ps=ps, seed=iteration, expert_bias=True)
    return CheckpointState(iteration, RECORD), [model], FakeOptimizer(model, ps, True, seed=iteration)


def _save_and_die(rank, n, folder, point, asynchronous):
    ps = ParallelState.create(n, rank, **SIZES)
    save(folder, *_content(ps, 3), ps, SaveOptions())
    victim, *where = POINTS[point]
    if rank == victim:
        _die_at(*where)
    if asynchronous:
        saver = AsyncSaver()
        saver.start(folder, *_content(ps, 6), ps, SaveOptions())
        saver.finish()
    else:
        save(folder, *_content(ps, 6), ps, SaveOptions())


def _resume(rank, n, folder, expected):
    ps = ParallelState.create(n, rank, **SIZES)
    _, chunks, optimizer = _content(ps, 9)
    assert load(folder, chunks, optimizer, ps, LoadOptions(RECORD)).iteration == expected
    _, wanted, wanted_optimizer = _content(ps, expected)
    assert all(torch.equal(value, wanted[0].tensors()[name]) for name, value in chunks[0].tensors().items())
    assert all(torch.equal(a, b) for a, b in zip(optimizer.values(), wanted_optimizer.values(), strict=True))
    save(folder, *_content(ps, 9), ps, SaveOptions())


@pytest.mark.parametrize(
    ("point", "asynchronous"),
    [*((point, False) for point in POINTS), ("writing", True), ("committing", True), ("tracker", True)],
)
def test_a_rank_killed_in_a_save_leaves_the_previous_checkpoint(tmp_path, point, asynchronous):
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(_save_and_die, 2, tmp_path, point, asynchronous)
    text, victim = str(failed.value), POINTS[point][0]
    assert f"--- rank {victim}: died with exit code -9" in text
    assert "did not finish" not in text, "the other ranks must end by themselves"
    assert latest_iteration(tmp_path) == 3
    assert verify_checkpoint(tmp_path / "iter_0000003").problems == []
    run_ranks(_resume, 2, tmp_path, 3)
    left = {path.name for path in tmp_path.iterdir()} - {"iter_0000006"}
    assert left == {"iter_0000003", "iter_0000009", directory.TRACKER}, "what the killed save left is gone"


# ---- two runs, one folder


def _hold(folder, held, release, pid=None):
    if pid is not None:
        os.getpid = lambda: pid  # in a separate process
    check_writable(folder, ParallelState.single())
    held.set()
    release.wait(60)


def test_two_runs_cannot_save_into_one_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held, release))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(
            CheckpointError, match=f"--save {tmp_path}: another run is saving there .host .*process {other.pid}, since"
        ):
            check_writable(tmp_path, ParallelState.single())
        check_writable(tmp_path / "another", ParallelState.single())
    finally:
        other.kill()
        other.join()
    for _ in range(2):  # a killed run leaves no lock behind, and one run may look twice
        check_writable(tmp_path, ParallelState.single())


def test_refused_run_of_the_same_host_and_pid_leaves_the_lock(tmp_path):
    """Containers of one node may share its host name and have the same process numbers."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held, release, os.getpid()))
    other.start()
    try:
        assert held.wait(60)
        for _ in range(2):  # the second is a third run, which must not get the lock
            with pytest.raises(CheckpointError, match=f"another run is saving there .host .*process {os.getpid()},"):
                check_writable(tmp_path, ParallelState.single())
            assert not directory.holds_lock(tmp_path), "its end would go into the other run's metrics"
            directory.release_lock(tmp_path)  # as every run does when it ends
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_name_of_the_lock_is_that_of_a_file(tmp_path, kind):
    """A link's target would be overwritten, and who reads a pipe waits."""
    target, folder = tmp_path / "target", tmp_path / "ckpt"
    folder.mkdir()
    target.write_text("precious")
    if kind == "link":
        (folder / directory.LOCK).symlink_to(target)
    else:
        os.mkfifo(folder / directory.LOCK)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        check_writable(folder, ParallelState.single())
    directory.release_lock(folder)
    assert target.read_text() == "precious" and os.path.lexists(folder / directory.LOCK)


def test_a_child_of_a_killed_run_does_not_keep_the_folder(tmp_path):
    """Data workers outlive a killed trainer for some seconds; a requeued job must not wait for them."""
    context = multiprocessing.get_context("fork")
    read, write = os.pipe()
    trainer = context.Process(target=_with_worker, args=(tmp_path, write))
    trainer.start()
    worker = int(os.read(read, 20))
    trainer.kill()
    trainer.join()
    try:
        check_writable(tmp_path, ParallelState.single())
    finally:
        os.kill(worker, signal.SIGKILL)


def _with_worker(folder, write):
    check_writable(folder, ParallelState.single())
    child = os.fork()
    if child:
        os.write(write, str(child).encode())
    signal.pause()
