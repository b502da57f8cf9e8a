import io
import json
import math
import shutil
import time
from dataclasses import fields, replace

import pytest
import torch
from commands import read_ends, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arguments.output import OutputArgs
from moe_trainer.errors import UserError
from moe_trainer.metrics import logger as logger_module
from moe_trainer.metrics.energy import Energy
from moe_trainer.metrics.iteration import IterationRecord, StepResult
from moe_trainer.metrics.logger import LogOptions, MetricsLogger, TaskMetric
from moe_trainer.metrics.metrics_file import append_end, open_metrics_file
from moe_trainer.metrics.run_state import RunEnd

OF_LOG = {field.name for field in fields(LogOptions)} - {"output"}


def record(iteration, loss, skipped=False, **changes):
    in_step = {field.name for field in fields(StepResult)} - {"skipped"}
    values = {"losses": {"lm loss": loss}, "grad_norm": 1.5, "dropped_tokens": 2}
    values |= {name: changes.pop(name) for name in in_step & changes.keys()}
    one = IterationRecord(
        StepResult(**values),
        iteration=iteration,
        consumed_samples=iteration * 4,
        learning_rate=iteration * 0.1,
        next_learning_rate=(iteration + 1) * 0.1,
        loss_scale=1.0,
        global_batch_size=4,
        skipped=skipped,
        elapsed_s=0.5,
        tokens=100,
        flops=3e12,
        max_memory_mb=10.0,
    )
    return replace(one, **changes)


def open_log(path=None, world_size=1, start=0, **options):
    """A logger of ten iterations, with the fields of OutputArgs and of LogOptions."""
    of_log = {name: options.pop(name) for name in OF_LOG & options.keys()}
    output = OutputArgs(**{"log_interval": 1} | options)
    return MetricsLogger(LogOptions(output, 10, path and str(path), **of_log), world_size, start, {})


def run(tmp_path, records, capsys, **options):
    """Log on two ranks; returns the records of the file and the lines of the console."""
    log = open_log(tmp_path / "metrics.jsonl", 2, **options)
    for one in records:
        log.record(one)
    log.close()
    return read_metrics(tmp_path / "metrics.jsonl"), capsys.readouterr().out.splitlines()


def read_board(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalar(events, name):
    (found,) = events.Scalars(name)
    return found.value


def test_records_hold_their_own_iteration_while_the_line_averages(tmp_path, capsys):
    records, lines = run(tmp_path, [record(1, 4.0), record(2, 2.0), record(3, 1.0)], capsys)
    assert [r["lm loss"] for r in records] == [4.0, 2.0, 1.0]
    assert [r["learning_rate"] for r in records] == pytest.approx([0.1, 0.2, 0.3])
    # the line after the first iteration keeps its sums, as Megatron-LM's does
    assert "lm loss: 4.000000E+00" in lines[0]
    assert "lm loss: 3.000000E+00" in lines[1]
    assert "lm loss: 1.000000E+00" in lines[2]
    assert "learning rate: 2.000000E-01" in lines[0]


def test_skipped_and_nan_iterations_are_counted_since_the_last_record(tmp_path, capsys):
    reported = [record(1, 4.0), record(2, math.nan, skipped=True), record(3, 2.0), record(4, 1.0)]
    records, lines = run(tmp_path, reported, capsys, log_interval=4)
    assert [r["iteration"] for r in records] == [1, 4]
    assert [r["skipped_iterations"] for r in records] == [0, 1]
    assert [r["nan_iterations"] for r in records] == [0, 1]
    assert [r["dropped_tokens"] for r in records] == [2, 6]
    assert "number of skipped iterations:   1" in lines[1] and "number of nan iterations:   1" in lines[1]
    assert "lm loss: 2.333333E+00" in lines[1]


def test_repeated_iterations_are_counted_since_the_last_record(tmp_path, capsys):
    reported = [record(1, 4.0), record(2, 3.0, num_repeats=2), record(3, 2.0), record(4, 1.0)]
    records, lines = run(tmp_path, reported, capsys, log_interval=2)
    assert [r["repeated_iterations"] for r in records] == [0, 1, 0]
    assert lines[1].endswith("| number of repeated iterations:   1 |")
    assert "repeated" not in lines[0] + lines[2], "a line without one is Megatron-LM's"


def test_rejected_iteration_appears_in_one_record(tmp_path, capsys):
    skipped = [{"iteration": number, "samples": [0, 4], "because": "the loss is nan"} for number in (1, 3, 5)]
    reported = [
        record(number, 1.0, rejected=[each for each in skipped if each["iteration"] <= number])
        for number in (1, 2, 3, 5, 6)
    ]
    records, _ = run(tmp_path, reported, capsys, log_interval=2)  # 4 is skipped without a record
    assert [[each["iteration"] for each in r.get("rejected", [])] for r in records] == [[1], [], [3, 5]]


def test_logged_throughput_counts_all_ranks(tmp_path, capsys):
    records, lines = run(tmp_path, [record(1, 4.0)], capsys, log_throughput=True)
    assert records[0]["tflops_per_gpu"] == pytest.approx(3.0)
    assert records[0]["tokens_per_s"] == pytest.approx(200.0)
    assert "throughput per GPU (TFLOP/s/GPU): 3.0 |" in lines[0]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_resuming_drops_repeated_and_torn_records_and_names_damaged_ones(tmp_path, caplog, is_damaged):
    path = tmp_path / "metrics.jsonl"
    second = '{"iteration": 2, "lm l\n' if is_damaged else '{"iteration": 2}\n'
    path.write_text('{"iteration": 1}\n' + second + '{"iteration": 3}\n{"iteration": 4}\n{"iteration": 5, "l')
    open_metrics_file(str(path), 3).close()
    assert [line["iteration"] for line in read_metrics(path)] == ([1, 3] if is_damaged else [1, 2, 3])
    named = f"{path}: dropping damaged records: line 2" in caplog.text  # iteration 5 comes again
    assert named == is_damaged


def test_new_run_renames_the_old_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n')
    open_metrics_file(str(path), 0).close()
    assert (tmp_path / "metrics-1.jsonl").read_text() == '{"iteration": 1}\n' and path.read_text() == ""


def test_validation_record_and_line(tmp_path, capsys):
    log = open_log(tmp_path / "metrics.jsonl")
    log.validation("iteration 200 on test set", "test", {"lm loss": 2.0}, 200, 800)
    log.validation("iteration 200", "validation-code", {"lm loss": 2.0}, 200, 800)
    log.close()
    record = {"iteration": 200, "lm loss": 2.0, "ppl": math.exp(2.0)}
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"validation": "test"} | record,
        {"validation": "validation-code"} | record,
    ]
    printed = capsys.readouterr().out
    assert " validation loss at iteration 200 on test set | lm loss value: 2.000000E+00" in printed
    assert " validation-code loss at iteration 200 | lm loss value: 2.000000E+00" in printed


def test_end_of_a_run_is_a_record_that_stays_when_it_resumes(tmp_path, capsys):
    path, failed = tmp_path / "metrics.jsonl", RunEnd("failed", 1, 16, "iteration 2: the loss is nan")
    log = open_log(path)
    log.record(record(1, 4.0))
    log.end(failed, [])
    assert (
        "  ended:       failed after iteration 1, exit code 16: iteration 2: the loss is nan" in capsys.readouterr().out
    )
    expected = {"ended": "failed", "iteration": 1, "exit_code": 16, "reason": "iteration 2: the loss is nan"}
    assert read_ends(path) == [expected] and len(read_metrics(path)) == 1
    assert "the run failed after iteration 1, exit code 16" in path.with_name("dashboard.html").read_text()
    log = open_log(path, start=1)
    log.record(record(2, 4.0))
    log.close()
    assert [each["iteration"] for each in read_metrics(path)] == [1, 2] and read_ends(path) == [expected]


def test_first_rank_that_records_an_end_of_a_start_knows_the_cause(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    cause, consequence = (RunEnd("failed", 1, code, text) for code, text in ((1, "boom"), (3, "another rank failed")))
    for start, first, second in ((0, cause, consequence), (1, consequence, cause)):
        log, began = open_log(path, start=start), time.time()
        log.record(record(start + 1, 4.0))
        assert append_end(path, first, began) == first
        log.end(second, [])
        assert append_end(path, second, began) == first
        assert f"exit code {first.exit_code}: {first.reason}" in capsys.readouterr().out
        log.close()
    assert [each["reason"] for each in read_ends(path)] == ["boom", "another rank failed"]


def test_end_before_the_first_record_describes_the_run(tmp_path):
    log = open_log(tmp_path / "metrics.jsonl", run={"train_iters": 7})
    log.end(RunEnd("failed", 0, 1, "RuntimeError: boom"), [])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["run"] == {"train_iters": 7}


def test_finished_run_that_is_started_again_repeats_no_validation(tmp_path):
    for _ in range(2):
        log = open_log(tmp_path / "metrics.jsonl", start=2)
        log.validation("iteration 2", "validation", {"lm loss": 2.0}, 2, 8)
        log.end(RunEnd("finished", 2, 0, "all 2 iterations are done"), [])
        log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_evaluation_prints_how_far_it_is(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logger_module.time, "monotonic", lambda: now[0])
    log = open_log()
    for batch in log.evaluating("validation", iter(range(5)), 5):
        now[0] += 20.0
        assert batch < 5
    assert capsys.readouterr().out.splitlines() == [f"evaluating validation: {at} of 5 microbatches" for at in (2, 4)]


def test_figures_of_tasks_are_recorded_and_dropped_where_iterations_repeat(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    figures = [TaskMetric("arc_easy", "acc", 0.25, 0.01), TaskMetric("pile", "bits_per_byte", 1.5, None)]
    for start, iterations in ((0, (1, 2)), (1, (2,))):
        log = open_log(path, start=start)
        for iteration in iterations:
            log.record(record(iteration, 2.0))
            log.tasks(iteration, 8, figures)
        log.close()
    records = read_metrics(path)
    assert [(r["iteration"], r.get("task")) for r in records] == [
        (iteration, task) for iteration in (1, 2) for task in (None, "arc_easy", "pile")
    ]
    assert records[1].pop("time") > 0
    assert records[1] == {"task": "arc_easy", "iteration": 1, "metric": "acc", "value": 0.25, "stderr": 0.01}
    assert " tasks at iteration 2 | arc_easy acc: 0.2500 | pile bits_per_byte: 1.5000 | " in capsys.readouterr().out
    assert "bits_per_byte" in path.with_name("dashboard.html").read_text()


def test_tensorboard_scalars_have_the_names_of_megatron(tmp_path, capsys):
    one = record(1, 4.0, num_zeros=3, params_norm=2.0, per_layer={"z_loss": [0.5, 0.7]}, energy=Energy(150.0, 300.0))
    flags = {"moe_per_layer_logging": True, "log_world_size_to_tensorboard": True}
    (found,), (line,) = run(tmp_path, [one], capsys, tensorboard_dir=str(tmp_path / "tb"), **flags)
    events = read_board(tmp_path / "tb")
    tags = set(events.Tags()["scalars"])
    names = "learning-rate batch-size loss-scale world-size grad-norm num-zeros params-norm".split()
    for name in (*names, "lm loss"):
        assert {name, f"{name} vs samples"} <= tags, name
    assert {"moe/z_loss_layer_0", "moe/z_loss_layer_1", "iteration-time"} <= tags
    assert events.Scalars("lm loss vs samples")[0].step == 4
    assert (scalar(events, "iter-energy/gpu"), scalar(events, "power/gpu")) == (150.0, 300.0)
    assert (found["energy_per_gpu_j"], found["power_per_gpu_w"]) == (150.0, 300.0)
    assert " energy per GPU (J/iter/GPU): 150.0 | power per GPU (W/GPU): 300.0 |" in line


def test_tensorboard_shows_routing_health_and_expert_loads(tmp_path, capsys):
    loads = torch.tensor([[0] * 7, [6, 2, 0, 0, 0.5, 1, 8]], dtype=torch.float64)
    (found,), _ = run(tmp_path, [record(1, 4.0, loads=loads)], capsys, tensorboard_dir=str(tmp_path / "tb"))
    events = read_board(tmp_path / "tb")
    assert scalar(events, "moe/load_max_over_mean_layer_1") == found["routing"]["load_max_over_mean"][0] == 1.5
    assert events.Scalars("moe/straggler_cost")[0].step == 1
    (image,) = events.Images("moe/load")
    assert (image.step, image.height, image.width) == (1, 8, 16) and image.encoded_image_string[:4] == b"\x89PNG"


def test_iteration_line_shows_the_overload_factors(tmp_path, capsys):
    """--log-moe-overload-factor; two ranks of two experts each, three layers, of which the first has no experts."""
    rows = [[0] * 10, [5, 1, 1, 1, 0, 0, 0, 1, 6, 2], [2, 2, 2, 2, 0, 0, 0, 1, 4, 4]]
    reported = record(1, 4.0, loads=torch.tensor(rows, dtype=torch.float64))
    _, lines = run(tmp_path, [reported], capsys, expert_ranks=2, tensorboard_dir=str(tmp_path / "tb"))
    assert " avg overload factor: 1.250 | max overload factor: 1.500 |" in lines[0]
    events = read_board(tmp_path / "tb")
    assert [scalar(events, f"moe/{kind}_overload_factor") for kind in ("avg", "max")] == [1.25, 1.5]
    reported = record(1, 4.0, loads=torch.tensor([[5, 1, 1, 1, 0, 0, 0, 1, 8]], dtype=torch.float64))
    assert "overload" not in run(tmp_path, [reported], capsys)[1][0]


def test_tensorboard_scalars_are_flushed_without_close(tmp_path):
    """After a crash, the file has the scalars of the last line and of the validation."""
    log = open_log(log_interval=2, tensorboard_dir=str(tmp_path))
    for iteration in (1, 2):
        log.record(record(iteration, 4.0))
    events = read_board(tmp_path)
    assert [found.step for found in events.Scalars("lm loss")] == [1, 2]
    log.validation("iteration 2", "validation", {"lm loss": 3.5}, 2, 8)
    events.Reload()
    assert scalar(events, "lm loss validation") == 3.5
    log.close()


def test_unwritable_metrics_file_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="metrics-file.*file"):
        open_metrics_file(str(blocked / "metrics.jsonl"), 0)


def test_full_disk_error_names_the_metrics_file_flag():
    log = open_log("/dev/full")
    log.record(record(1, 4.0))
    with pytest.raises(UserError, match="--metrics-file: cannot write /dev/full: No space left on device"):
        log.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_samples_are_texts_in_tensorboard(tmp_path):
    """Each prompt has its own tag; the metrics file has the same texts."""
    log = open_log(tmp_path / "metrics.jsonl", tensorboard_dir=str(tmp_path / "tb"))
    log.samples(3, [("The cat", " sat"), ("A dog", " ran")])
    log.close()
    events = read_board(tmp_path / "tb")
    found = {tag: events.Tensors(tag)[0] for tag in events.Tags()["tensors"]}
    assert {tag: (each.step, each.tensor_proto.string_val[0]) for tag, each in found.items()} == {
        "samples/The cat/text_summary": (3, b" sat"),
        "samples/A dog/text_summary": (3, b" ran"),
    }


def test_failed_tensorboard_write_is_reported_and_opens_a_new_file(tmp_path, caplog):
    folder = tmp_path / "tb"
    log = open_log(tensorboard_dir=str(folder))
    shutil.rmtree(folder)  # its next flush finds no folder
    for iteration in range(1, 20):
        log.record(record(iteration, 4.0))
    log.close()
    assert "--tensorboard-dir: cannot write" in caplog.text and str(folder) in caplog.text
    assert list(folder.iterdir()), "written again, in a new file"


def test_progress_bar_appears_only_on_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        log = open_log(start=4)
        log.record(record(5, 3.5))
        log._bar.refresh()
        log.close()
        assert ("5/10" in stream.getvalue() and "loss=3.5" in stream.getvalue()) == stream.isatty()
