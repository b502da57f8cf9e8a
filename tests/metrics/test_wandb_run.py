"""Weights & Biases with a fake package: logged values, resumed runs, and failures."""

import json
import sys
from types import SimpleNamespace

import pytest
from metrics.test_logger import open_log, record

from arguments.output import OutputArgs
from moe_trainer.metrics.logger import LogOptions, MetricsLogger, TaskMetric


class FakeRun:
    """A run on the fake server: rows by step. Like the real one, it rejects steps below the last one."""

    def __init__(self, number, init_args):
        self.id, self.init_args = init_args.get("id") or f"run{number}", init_args
        self.rows, self.step, self.finished, self.refused = {}, 0, False, []

    def log(self, values, step):
        assert not self.finished
        if step < self.step:
            self.refused.append(step)
            return
        self.step = step
        self.rows.setdefault(step, {}).update(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def server(monkeypatch):
    runs = {}

    def init(**init_args):
        run = FakeRun(len(runs), init_args)
        if init_args.get("resume") == "allow" and run.id in runs:
            run.rows = runs[run.id].rows
            run.step = max(run.rows, default=-1) + 1
        runs[run.id] = run
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return runs


def log_job(folder, start, stop, resumes_own_run=False, killed=False, **flags):
    """Iterations start + 1 to stop, with a validation at the end unless it is killed."""
    output = OutputArgs(log_interval=1, save=str(folder), wandb_project="moe", wandb_exp_name="one", **flags)
    options = LogOptions(output, 10, str(folder / "metrics.jsonl"), resumes_own_run=resumes_own_run)
    log = MetricsLogger(options, 1, start, {"lr": 0.1})
    for iteration in range(start + 1, stop + 1):
        log.record(record(iteration, 10.0 - iteration))
    if not killed:
        log.validation(f"iteration {stop}", "validation", {"lm loss": 3.5}, stop, 8)
        log.tasks(stop, 8, [TaskMetric("arc_easy", "acc", 0.25, 0.01)])
        log.close()


def test_wandb_values_equal_those_of_tensorboard(tmp_path, server):
    log_job(tmp_path, 0, 2)
    (run,) = server.values()
    asked = {name: run.init_args[name] for name in ("project", "name", "config", "entity", "dir")}
    names = {"project": "moe", "name": "one", "config": {"lr": 0.1}, "entity": None}
    assert asked == {**names, "dir": f"{tmp_path}/wandb"} and "id" not in run.init_args and run.finished
    assert [(step, row["lm loss"]) for step, row in run.rows.items()] == [(1, 9.0), (2, 8.0)]
    assert run.rows[2]["tasks/arc_easy/acc"] == 0.25 and run.rows[2]["lm loss validation"] == 3.5
    assert {"learning-rate", "grad-norm", "samples vs steps", "iteration-time"} <= set(run.rows[1])


def test_resumed_job_continues_its_wandb_run_without_repeated_steps(tmp_path, server):
    log_job(tmp_path, 0, 5, killed=True)  # its last checkpoint is of iteration 3
    log_job(tmp_path, 3, 8, resumes_own_run=True)
    (run,) = server.values()
    assert run.init_args["id"] == "run0" and run.init_args["resume"] == "allow" and run.refused == []
    assert [(step, row["lm loss"]) for step, row in run.rows.items()] == [(step, 10.0 - step) for step in range(1, 9)]
    assert json.loads((tmp_path / "wandb_run.json").read_text()) == {"id": "run0", "project": "moe", "entity": None}


def test_jobs_without_own_checkpoint_start_a_new_wandb_run(tmp_path, server):
    log_job(tmp_path, 0, 2)
    log_job(tmp_path, 2, 3)  # weights from elsewhere: not its own checkpoints
    assert list(server) == ["run0", "run1"]
    log_job(tmp_path, 3, 4, resumes_own_run=True, wandb_entity="team")  # another place
    assert list(server) == ["run0", "run1", "run2"] and "resume" not in server["run2"].init_args
    log_job(tmp_path, 0, 1, resumes_own_run=True)  # asked to resume, without a checkpoint yet
    assert list(server)[-1] == "run3"
    (tmp_path / "wandb_run.json").write_text("{torn")
    log_job(tmp_path, 1, 2, resumes_own_run=True)
    assert list(server)[-1] == "run4" and server["run4"].rows[2]["lm loss"] == 8.0


def test_wandb_failures_do_not_end_the_run(tmp_path, server, caplog):
    log = open_log(wandb_project="moe")
    server["run0"].log = None  # not callable
    for iteration in (1, 2):
        log.record(record(iteration, 4.0))
    log.close()
    assert caplog.text.count("W&B logging failed") == 1 and not server["run0"].finished


def test_wandb_start_failure_is_reported(tmp_path, monkeypatch):
    def init(**init_args):
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match="--wandb-project moe: Weights & Biases cannot start a run: no API key"):
        log_job(tmp_path, 0, 1)
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises
    with pytest.raises(ValueError, match="--wandb-project: the package wandb is not installed"):
        log_job(tmp_path, 0, 1)
