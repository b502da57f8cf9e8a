"""How an error, an exit or a signal is recorded as the end of a run."""

import json
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from moe_trainer.metrics.run_state import RunEnd
from moe_trainer.parallel.trace import CommunicationError, Trace
from moe_trainer.resilience.heartbeat import HeartbeatStore
from moe_trainer.resilience.watchdog import Watchdog
from moe_trainer.training.run_end import EndRecorder, end_by


class Metrics:
    """Keeps the ends that the last rank records."""

    def __init__(self):
        self.ends = []

    def end(self, end, saved):
        self.ends.append(end)

    def flush(self):
        pass


def recorder(folder, metrics=None):
    args = SimpleNamespace(
        is_eval_only=False,
        training=SimpleNamespace(skip_train=False),
        output=SimpleNamespace(save=str(folder), tensorboard_dir=None, metrics_file=None),
    )
    run = SimpleNamespace(args=args, metrics=metrics, save_history=SimpleNamespace(saved=[]))
    return EndRecorder(run, SimpleNamespace(iteration=7))


def test_only_the_first_rank_that_fails_and_the_last_one_write_an_error_of_all(tmp_path, monkeypatch):
    path, metrics, opened = tmp_path / "metrics.jsonl", Metrics(), []
    path.touch()
    store = dist.HashStore()
    monkeypatch.setattr(
        "moe_trainer.training.run_end.append_end",
        lambda target, end, since: (opened.append(end), path.write_text(json.dumps(end.as_record()) + "\n")),
    )
    monkeypatch.setattr(Watchdog, "_wait_for_peers_to_read", lambda *_: None)
    for rank in range(4):
        with (
            suppress(ValueError),
            Watchdog(Trace(rank), 4, HeartbeatStore(store, rank), 60.0) as watchdog,
        ):
            watchdog.on_failure = recorder(tmp_path, metrics if rank == 3 else None).fail
            raise ValueError(f"rank {rank}")
    assert [end.reason for end in opened] == ["ValueError: rank 0"]
    assert [end.reason for end in metrics.ends] == ["ValueError: rank 3"]


def test_rank_that_loses_another_leaves_the_record_to_the_last(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    recorder(tmp_path).fail(CommunicationError("all_reduce: not done"), True)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("given", "state", "code", "reason"),
    [
        (1, "failed", 1, "SystemExit: 1"),
        (None, "failed", 0, "SystemExit: None"),
        ("no data", "failed", 1, "SystemExit: no data"),
        (250, "failed", 250, "SystemExit: 250"),
        (143, "interrupted", 143, "terminated by SIGTERM after iteration 7"),
    ],
)
def test_exit_of_user_code_is_a_failure_and_that_of_a_signal_is_not(given, state, code, reason):
    with pytest.raises(SystemExit) as ended:
        sys.exit(given)
    assert end_by(ended.value, 7) == RunEnd(state, 7, code, reason)
