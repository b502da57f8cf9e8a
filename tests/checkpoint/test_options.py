"""Flags of saving and loading set their options; state after a failed save."""

import errno
import os
from dataclasses import replace

import pytest
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import run_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from training.tiny import MOCK, TINY

import arguments
from moe_trainer.checkpoint import directory
from moe_trainer.checkpoint.manager import (
    CheckpointError,
    CheckpointState,
    LoadOptions,
    SaveOptions,
    latest_iteration,
    load,
    save,
)
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
SAVE_FLAGS = [
    ("--no-save-optim", {"save_optim": False}),
    ("--no-save-rng", {"save_rng": False}),
    ("--save-retain-interval 20", {"retain_interval": 20}),
    ("--save-total-limit 3", {"total_limit": 3}),
    ("--verify-integrity", {"verify_integrity": True}),
    ("--log-progress", {"log_progress": True}),
    ("--no-ckpt-fully-parallel-save", {"fully_parallel": False}),
]
LOAD_FLAGS = [
    ("--no-load-optim", {"load_optim": False}),
    ("--no-load-rng", {"load_rng": False}),
    ("--ckpt-step 7", {"ckpt_step": 7}),
    ("--finetune", {"finetune": True}),
    ("--verify-integrity", {"verify_integrity": True}),
    ("--dist-ckpt-strictness raise_all", {"strictness": "raise_all"}),
    ("--dist-ckpt-strictness assume_ok_unexpected", {"strictness": "assume_ok_unexpected"}),
    ("--exit-on-missing-checkpoint", {"exit_on_missing": True}),
]


def parse(flags):
    argv = [*TINY, *MOCK, "--train-iters", "10", "--save", "s", "--load", "s", "--save-interval", "5", *flags.split()]
    return arguments.parse_args(argv, 1)


def output_args(flags):
    return parse(flags).output


@pytest.mark.parametrize("flags, fields", SAVE_FLAGS)
def test_save_flag_changes_only_its_option(flags, fields):
    plain = SaveOptions.from_args(output_args(""))
    changed = SaveOptions.from_args(output_args(flags))
    assert changed == replace(plain, **fields) != plain


@pytest.mark.parametrize("flags, fields", LOAD_FLAGS)
def test_load_flag_changes_only_its_option(flags, fields):
    plain = LoadOptions.from_args(parse(""), 120)
    changed = replace(LoadOptions.from_args(parse(flags), 120), args=plain.args)
    assert changed == replace(plain, **fields) != plain


def test_retention_follows_the_flags(tmp_path):
    options = SaveOptions.from_args(output_args("--save-retain-interval 10 --no-save-optim"))
    for iteration in (5, 10, 15, 20, 25):
        save(tmp_path, CheckpointState(iteration, RECORD), [FakeModel()], None, SINGLE, options)
        assert directory.complete_iterations(tmp_path)[-1] == iteration
    assert directory.complete_iterations(tmp_path) == [10, 20, 25]


# ---- failures


@pytest.fixture
def saved(tmp_path):
    """A directory with complete checkpoints of iterations 3 and 6."""
    for iteration in (3, 6):
        save(tmp_path, CheckpointState(iteration, RECORD), [FakeModel(seed=iteration)], None, SINGLE, SaveOptions())
    return tmp_path


def test_failed_rename_leaves_the_tracker_unchanged(saved, monkeypatch):
    """The tracker is updated only after the folder is renamed."""
    rename = os.rename

    def broken(source, target, **options):
        if os.path.basename(target) == "iter_0000009":  # torch's own writer renames inside the folder
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(CheckpointError, match="Input/output error.*iteration 6 there is complete and remains"):
            save(saved, CheckpointState(9, RECORD), [FakeModel()], None, SINGLE, SaveOptions())
    assert sorted(path.name for path in saved.iterdir()) == ["iter_0000003", "iter_0000006", directory.TRACKER]
    assert (saved / directory.TRACKER).read_text() == "6"
    assert load(saved, [FakeModel()], None, SINGLE, LoadOptions(RECORD)).iteration == 6


@pytest.mark.parametrize("file", [directory.COMPLETE, directory.INDEX])
def test_incomplete_folder_without_tracker_is_ignored(saved, file):
    (saved / directory.TRACKER).unlink()
    (saved / "iter_0000006" / file).unlink()
    assert latest_iteration(saved) == 3
    assert load(saved, [FakeModel()], None, SINGLE, LoadOptions(RECORD)).iteration == 3
    (saved / directory.TRACKER).write_text("9")
    with pytest.raises(CheckpointError, match=r"Complete checkpoints in .*: iteration 3\. .*--ckpt-step 3"):
        load(saved, [FakeModel()], None, SINGLE, LoadOptions(RECORD))


def _one_rank_cannot_write(rank, n, folder, broken_rank):
    ps = ParallelState.create(n, rank)
    if rank == broken_rank:

        def broken(self, plan, planner):
            raise OSError(errno.EIO, "Input/output error")

        FileSystemWriter.write_data = broken
    model = FakeModel()
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(folder, CheckpointState(9, RECORD), [model], FakeOptimizer(model, ps, True), ps, SaveOptions())
    return True


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_one_rank_that_cannot_write_fails_the_save_on_all(saved, broken_rank):
    assert run_ranks(_one_rank_cannot_write, 2, saved, broken_rank) == [True, True]
    assert sorted(path.name for path in saved.iterdir()) == ["iter_0000003", "iter_0000006", directory.TRACKER]
    assert latest_iteration(saved) == 6
