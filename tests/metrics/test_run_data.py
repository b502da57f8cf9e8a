"""Figures of a run that the page shows as they are: status, progress, times, tokens, rounding, and what changes within a run."""

import time

import pytest

from moe_trainer.metrics import run_data
from moe_trainer.metrics.run_data import RunData
from moe_trainer.metrics.run_state import RunEnd, clock


def make_run(records, **head):
    run = RunData("run", "path")
    for at, record in enumerate(records, 1):
        run.take({"iteration": at, **record, **({"run": head} if at == 1 else {})})
    return run


def routing(layers, experts, load=3):
    names = ("load_max_over_mean", "load_entropy", "dead_experts", "rank_max_over_mean")
    return {
        "layers": list(range(layers)),
        "straggler_cost": 0.1,
        "tokens_per_expert": [[load] * experts] * layers,
        **{name: [1.0] * layers for name in names},
    }


@pytest.mark.parametrize(
    ("interval_s", "age_s", "status"),
    [(1, 119, "running"), (1, 121, "silent"), (60, 299, "running"), (60, 301, "silent")],
)
def test_run_that_recorded_no_end_is_running_or_gives_no_sign_of_life(monkeypatch, interval_s, age_s, status):
    monkeypatch.setattr(run_data.time, "time", lambda: 5000.0)
    for iterations in (2, 1):  # also one that was killed after its last iteration
        run = make_run([{"interval_s": interval_s, "elapsed_ms": 1000.0}], train_iters=iterations)
        page = run.as_page(updated=5000.0 - age_s)
        assert page["status"] == status and ("eta_s" in page["progress"]) == (status == "running")
        said = f"no sign of life since {clock(5000.0 - age_s)}"
        worst = page["findings"][0]["severity"]
        assert (page["state"], worst) == (
            ("running", "ok") if status == "running" else (said, "bad" if iterations == 2 else "warn")
        )
        assert said in page["findings"][0]["text"] or status == "running"
    assert make_run([{}]).as_page()["state"] == "no sign of life"


def test_recorded_end_is_the_state_until_later_iterations():
    failed = RunEnd("failed", 1, 16, "iteration 2: the loss is nan")
    run = make_run([{"time": 7.0}], train_iters=3)
    run.take(failed.as_record())
    run.take({"iteration": 1, "lm loss": 2.0})  # of a rank that had not noticed yet
    page = run.as_page(updated=8.0, is_alive=False)  # the lock's file may outlive the run
    assert (page["status"], page["state"], page["silent_at"]) == ("failed", "failed", None)
    (finding,) = page["findings"]
    assert finding == {
        "severity": "bad",
        "card": "events",
        "text": "the run failed after iteration 1, exit code 16: iteration 2: the loss is nan",
    }
    run.take({"iteration": 2, "resumed_from": 1})
    assert run.as_page(updated=time.time())["status"] == "running"
    for _ in range(2):  # started again when it was done
        run.take(RunEnd("finished", 3, 0, "all 3 iterations are done").as_record())
    page = run.as_page(updated=8.0)
    assert page["status"] == "finished" and page["findings"][0]["severity"] == "ok"
    assert [each["text"] for each in page["events"] if each["kind"] == "end"] == [
        str(failed),
        "all 3 iterations are done",
    ]


def test_run_that_ends_before_its_first_record_is_described():
    run = RunData("run", "path")
    run.take(RunEnd("failed", 0, 1, "RuntimeError: no").as_record() | {"run": {"train_iters": 5, "started": 3.0}})
    page = run.as_page(updated=4.0)
    assert page["status"] == "failed" and page["progress"]["train_iters"] == 5 and len(page["head"]["starts"]) == 1
    run.take({"ended": "running", "iteration": 3, "reason": "of another program"})
    assert run.as_page(updated=4.0)["status"] == "failed"


def test_progress_is_of_the_newest_records():
    records = [{"elapsed_ms": 9000.0 if at < 50 else 2000.0, "interval_s": 1.5, "time": 102.0 + 2 * at, "consumed_samples": 4 * at + 4} for at in range(100)]  # fmt: skip
    page = make_run(records, train_iters=110, started=100.0, model={"seq_length": 8}).as_page(updated=time.time())
    progress = page["progress"]
    assert progress == {"iteration": 100, "train_iters": 110, "wall_s": 200.0, "tokens": 3200, "eta_s": 20.0, "goodput": 0.75}  # fmt: skip
    fast = make_run([{"interval_s": 9.0, "time": 104.0}], started=100.0)
    assert fast.as_page()["progress"]["goodput"] == 1.0


def test_time_and_tokens_are_left_out_where_they_are_unknown():
    records = [{"time": 50.0 + at, "elapsed_ms": 500.0, "consumed_samples": at + 1} for at in range(3)]
    page = make_run(records, model={"seq_length": 8}).as_page()
    assert page["records"]["wall_s"] == [0.5, 1.5, 2.5] and page["records"]["tokens"] == [8, 16, 24]
    for more, settings in (([{}], {}), ([], {"sft": True}), ([], {"use_varlen_dataset": True})):
        page = make_run([*records, *more], model={"seq_length": 8}, settings=settings).as_page()
        assert "tokens" not in page["records"] and "tokens" not in page["progress"]
        assert ("wall_s" in page["records"]) == (not more)


def test_losses_keep_more_digits_and_one_record_has_no_constants():
    series = make_run([{"lm loss": 2.12345678, "grad_norm": 1.12345678}]).as_page()["records"]["series"]
    assert series == {"lm loss": [2.1234568], "grad_norm": [1.1235]}


def test_validation_after_the_last_iteration_replaces_the_one_that_was_due():
    run = make_run([{}] * 4)
    assert run.as_page()["newest_validation"] is None
    losses = (("validation", 2, 3.0), ("validation", 4, 2.5), ("validation", 4, 2.4), ("test", 4, 9.0))
    for kind, at, loss in losses:
        run.take({"validation": kind, "iteration": at, "lm loss": loss})
    page = run.as_page()
    assert [tuple(each.values()) for each in page["validations"]] == [
        (kind, at, loss) for kind, at, loss in losses if loss != 2.5
    ]
    assert page["newest_validation"] == {"set": "validation", "iteration": 4, "lm loss": 2.4}


def test_throughput_is_the_median_without_the_first_records():
    speeds = [{}, *({"tokens_per_s": each} for each in (1.0, 100.0, 100.0, *[200.0] * 7, 300.0))]
    assert make_run(speeds).as_page()["throughput"] == 200.0
    assert make_run([{"tokens_per_s": 7.0}] * 5).as_page()["throughput"] == 7.0  # also where it never changed
    assert make_run([{}]).as_page()["throughput"] is None


def test_slow_rank_is_an_event_when_it_becomes_slow():
    times = [{"own_time_ms": {"stragglers": each, "ranks": [1.0, 2.0]}} for each in ([1], [1], [], [0, 1])]
    events = make_run(times).as_page()["events"]
    assert [(each["iteration"], each["text"][:6]) for each in events] == [(1, "rank 1"), (4, "rank 0"), (4, "rank 1")]


def test_other_numbers_of_layers_experts_and_ranks_are_those_of_the_newest_records():
    """A run was resumed on other ranks and, by another program, with another model."""
    records = [{"routing": routing(2, 4), "own_time_ms": {"ranks": [1.0] * 4}}] * 2
    records += [{"routing": routing(2, 8), "own_time_ms": {"ranks": [1.0] * 2, "memory_mb": [5, 6]}}] * 2
    page = make_run(records).as_page()
    assert page["routing"]["loads"] == {"iteration": [3, 4], "tokens_per_expert": [[[3] * 8] * 2] * 2}
    assert page["ranks"]["iteration"] == [3, 4] and page["ranks"]["memory_mb"] == [[5, 6]] * 2
    page = make_run([*records, {"own_time_ms": {"ranks": [1.0] * 2}}]).as_page()
    assert page["ranks"]["iteration"] == [3, 4, 5] and "memory_mb" not in page["ranks"]


def test_loads_of_a_large_model_are_bounded():
    run = make_run([{"routing": routing(40, 256)}] * 200)
    assert len(run.as_page()["routing"]["loads"]["iteration"]) <= run_data.MAX_LOADS // (40 * 256) + 1
