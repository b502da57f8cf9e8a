"""Folders that not all nodes share. Two nodes are two working directories and a relative path."""

import errno
import os
from functools import partial

import pytest
from checkpoint.fake import RECORD, FakeModel
from harness import run_ranks

from moe_trainer.checkpoint import manager, shared_folder
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.manager import CheckpointState, LoadOptions, SaveOptions, check_writable, load, save
from moe_trainer.parallel.state import ParallelState

ITERATION = "iter_0000003"


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "LOOK_TIMEOUT_S", 0.0)
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    return tmp_path


def save_on(folder):
    save(folder, CheckpointState(3, RECORD), [FakeModel(seed=1)], None, ParallelState.single(), SaveOptions())


def _attempt(rank, n, nodes, step, folder):
    """The type and message of what a rank raises on its node."""
    os.chdir(nodes / f"node{rank}")
    try:
        step(folder, ParallelState.create(n, rank))
    except CheckpointError as error:
        return type(error), str(error)
    return None


def _load(folder, ps):
    assert load(folder, [FakeModel(seed=1)], None, ps, LoadOptions(RECORD)) is not None


def _load_without_permission(step, blind, folder, ps):
    def fail(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if ps.world.rank == blind:
        setattr(manager, step, fail)  # in a separate process
    _load(folder, ps)


def test_save_folder_that_a_node_does_not_see_is_an_error_at_the_start(nodes):
    (first, text), second = run_ranks(_attempt, 2, nodes, check_writable, "ck")
    assert first is CheckpointError and second == (first, text)
    assert text.startswith("--save ck: 1 of 2 ranks do not see what rank 0 sees in this folder: rank 1 on node ")
    assert f"({nodes / 'node1' / 'ck'})" in text and "absolute path of a folder that all nodes share" in text
    assert list((nodes / "node0" / "ck").iterdir()) == [], "the token and the lock are removed"
    assert not (nodes / "node1" / "ck").exists()
    assert run_ranks(_attempt, 2, nodes, check_writable, str(nodes / "shared")) == [None, None]


def test_path_that_a_node_sees_late_is_waited_for(tmp_path, monkeypatch, caplog):
    late = tmp_path / "late"
    monkeypatch.setattr(shared_folder, "NOTE_AFTER_S", 0.0)
    monkeypatch.setattr(shared_folder.time, "sleep", lambda seconds: late.touch())
    shared_folder.check_seen_by_all(tmp_path, late, "", ParallelState.single())
    assert [record.getMessage().partition(" on node ")[0] for record in caplog.records] == ["rank 0"]
    assert "does not see late yet, which rank 0 sees; it looks for up to 90 s" in caplog.text


def test_own_folders_of_the_same_name_are_not_taken_for_one(nodes):
    for number in range(2):
        save_on(nodes / f"node{number}" / "ck")
    (kind, text), _ = run_ranks(_attempt, 2, nodes, check_writable, "ck")
    assert kind is CheckpointError and "rank 1 on node" in text
    assert run_ranks(_attempt, 2, nodes, _load, "ck") == [None, None], "a copy on every node can be loaded"


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (0, "do not see what rank 0 sees in this folder: rank 1 on node "),
        (1, "rank 0 sees no checkpoint in this folder"),
    ],
)
def test_checkpoint_that_only_one_node_has_is_not_damaged(nodes, owner, words):
    """A damaged one would be skipped, and a run could start from scratch."""
    save_on(nodes / f"node{owner}" / "ck")
    (kind, text), second = run_ranks(_attempt, 2, nodes, _load, "ck")
    assert not issubclass(kind, DamagedError) and second == (kind, text) and words in text
    assert f"({nodes / 'node1' / 'ck'})" in text
    assert (nodes / f"node{owner}" / "ck" / ITERATION / "metadata.json").exists()


@pytest.mark.parametrize(("step", "rank"), [("complete_iterations", 1), ("resolve_checkpoint", 0)])
def test_folder_that_one_node_cannot_read_ends_all_ranks(nodes, step, rank):
    for own in range(2):
        (nodes / f"node{own}" / "ck").mkdir()
    first, second = run_ranks(_attempt, 2, nodes, partial(_load_without_permission, step, rank), "ck")
    assert first == second and first[0] is CheckpointError
    assert "on node " in first[1] and "Permission denied: 'ck'" in first[1]
