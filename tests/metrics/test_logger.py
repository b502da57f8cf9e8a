import io
import json
import math
from dataclasses import fields, replace

import pytest
import torch

from arguments.output import OutputArgs
from moe_trainer.errors import UserError
from moe_trainer.metrics.iteration import IterationRecord, StepResult
from moe_trainer.metrics.logger import LogOptions, MetricsLogger, TaskMetric
from moe_trainer.metrics.metrics_file import open_metrics_file


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


def run(tmp_path, records, capsys, **options):
    path = tmp_path / "metrics.jsonl"
    per_layer, expert_ranks = options.pop("moe_per_layer_logging", False), options.pop("expert_ranks", 1)
    log = MetricsLogger(
        LogOptions(OutputArgs(**options), 10, str(path), per_layer, expert_ranks=expert_ranks), 2, 0, {}
    )
    for one in records:
        log.record(one)
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()], capsys.readouterr().out.splitlines()


def test_records_hold_their_own_iteration_while_the_line_averages(tmp_path, capsys):
    records, lines = run(tmp_path, [record(1, 4.0), record(2, 2.0), record(3, 1.0)], capsys, log_interval=1)
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
    records, lines = run(tmp_path, [record(1, 4.0)], capsys, log_interval=1, log_throughput=True)
    assert records[0]["tflops_per_gpu"] == pytest.approx(3.0)
    assert records[0]["tokens_per_s"] == pytest.approx(200.0)
    assert "throughput per GPU (TFLOP/s/GPU): 3.0 |" in lines[0]


def test_resuming_drops_repeated_records_and_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3}\n{"iterat')
    open_metrics_file(str(path), 2).close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_damaged_metrics_line_is_dropped_and_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"iteration": 1, "lm loss": 2.0}\n{"iteration": 2, "lm l\n{"iteration": 3, "lm loss": 2.0}\n{"iteration": 5, "l'
    )
    open_metrics_file(str(path), 3).close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 3]
    assert f"{path}: dropping damaged records: line 2" in caplog.text  # iteration 5 comes again


def test_new_run_renames_the_old_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n')
    open_metrics_file(str(path), 0).close()
    assert (tmp_path / "metrics-1.jsonl").read_text() == '{"iteration": 1}\n'
    assert path.read_text() == ""


def test_validation_record_and_line(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLogger(LogOptions(OutputArgs(log_interval=1), 10, str(path)), 1, 0, {})
    log.validation("iteration 200 on test set", "test", {"lm loss": 2.0}, 200, 800)
    log.close()
    assert json.loads(path.read_text()) == {
        "validation": "test",
        "iteration": 200,
        "lm loss": 2.0,
        "ppl": math.exp(2.0),
    }
    assert "validation loss at iteration 200 on test set | lm loss value: 2.000000E+00" in capsys.readouterr().out


def test_figures_of_tasks_are_recorded_and_dropped_where_iterations_repeat(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    figures = [TaskMetric("arc_easy", "acc", 0.25, 0.01), TaskMetric("pile", "bits_per_byte", 1.5, None)]

    def log_tasks(start, *iterations):
        log = MetricsLogger(LogOptions(OutputArgs(log_interval=1), 10, str(path)), 1, start, {})
        for iteration in iterations:
            log.record(record(iteration, 2.0))
            log.tasks(iteration, 8, figures)
        log.close()

    log_tasks(0, 1, 2)
    log_tasks(1, 2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["iteration"], r.get("task")) for r in records] == [
        (iteration, task) for iteration in (1, 2) for task in (None, "arc_easy", "pile")
    ]
    assert records[1].pop("time") > 0
    assert records[1] == {"task": "arc_easy", "iteration": 1, "metric": "acc", "value": 0.25, "stderr": 0.01}
    assert " tasks at iteration 2 | arc_easy acc: 0.2500 | pile bits_per_byte: 1.5000 | " in capsys.readouterr().out
    assert "bits_per_byte" in path.with_name("dashboard.html").read_text()


def test_tensorboard_scalars_have_the_names_of_megatron(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tb"
    run(
        tmp_path,
        [record(1, 4.0, num_zeros=3, params_norm=2.0, per_layer={"z_loss": [0.5, 0.7]})],
        capsys,
        log_interval=1,
        tensorboard_dir=str(folder),
        moe_per_layer_logging=True,
        log_world_size_to_tensorboard=True,
    )
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "learning-rate",
        "learning-rate vs samples",
        "batch-size",
        "batch-size vs samples",
        "lm loss",
        "lm loss vs samples",
        "loss-scale",
        "loss-scale vs samples",
        "world-size",
        "world-size vs samples",
        "grad-norm",
        "grad-norm vs samples",
        "num-zeros",
        "num-zeros vs samples",
        "params-norm",
        "params-norm vs samples",
        "moe/z_loss_layer_0",
        "moe/z_loss_layer_1",
        "iteration-time",
    } <= tags
    assert events.Scalars("lm loss vs samples")[0].step == 4


def test_tensorboard_shows_routing_health_and_expert_loads(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, loads = tmp_path / "tb", torch.tensor([[0] * 7, [6, 2, 0, 0, 0.5, 1, 8]], dtype=torch.float64)
    records, _ = run(tmp_path, [record(1, 4.0, loads=loads)], capsys, log_interval=1, tensorboard_dir=str(folder))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert (
        events.Scalars("moe/load_max_over_mean_layer_1")[0].value
        == records[0]["routing"]["load_max_over_mean"][0]
        == 1.5
    )
    assert events.Scalars("moe/straggler_cost")[0].step == 1
    (image,) = events.Images("moe/load")
    assert (image.step, image.height, image.width) == (1, 8, 16) and image.encoded_image_string[:4] == b"\x89PNG"


def test_iteration_line_shows_the_overload_factors(tmp_path, capsys):
    """--log-moe-overload-factor; two ranks of two experts each, three layers, of which the first has no experts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, rows = tmp_path / "tb", [[0] * 10, [5, 1, 1, 1, 0, 0, 0, 1, 6, 2], [2, 2, 2, 2, 0, 0, 0, 1, 4, 4]]
    reported = record(1, 4.0, loads=torch.tensor(rows, dtype=torch.float64))
    _, lines = run(tmp_path, [reported], capsys, log_interval=1, expert_ranks=2, tensorboard_dir=str(folder))
    assert " avg overload factor: 1.250 | max overload factor: 1.500 |" in lines[0]
    events = EventAccumulator(str(folder))
    events.Reload()
    assert (
        events.Scalars("moe/avg_overload_factor")[0].value == 1.25
        and events.Scalars("moe/max_overload_factor")[0].value == 1.5
    )
    reported = record(1, 4.0, loads=torch.tensor([[5, 1, 1, 1, 0, 0, 0, 1, 8]], dtype=torch.float64))
    assert "overload" not in run(tmp_path, [reported], capsys, log_interval=1)[1][0]


def test_tensorboard_scalars_are_flushed_without_close(tmp_path):
    """After a crash, the file has the scalars of the last line and of the validation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLogger(LogOptions(OutputArgs(log_interval=2, tensorboard_dir=str(tmp_path)), 10), 1, 0, {})
    for iteration in (1, 2):
        log.record(record(iteration, 4.0))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("lm loss")] == [1, 2]
    log.validation("iteration 2", "validation", {"lm loss": 3.5}, 2, 8)
    events.Reload()
    assert [scalar.value for scalar in events.Scalars("lm loss validation")] == [3.5]
    log.close()


def test_unwritable_metrics_file_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="metrics-file.*file"):
        open_metrics_file(str(blocked / "metrics.jsonl"), 0)


def test_full_disk_error_names_the_metrics_file_flag(tmp_path):
    log = MetricsLogger(LogOptions(OutputArgs(log_interval=1), 10, "/dev/full"), 1, 0, {})
    log.record(record(1, 4.0))
    with pytest.raises(UserError, match="--metrics-file: cannot write /dev/full: No space left on device"):
        log.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_samples_are_texts_in_tensorboard(tmp_path):
    """Each prompt has its own tag; the metrics file has the same texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = OutputArgs(log_interval=1, tensorboard_dir=str(tmp_path / "tb"))
    log = MetricsLogger(LogOptions(output, 10, str(tmp_path / "metrics.jsonl")), 1, 0, {})
    log.samples(3, [("The cat", " sat"), ("A dog", " ran")])
    log.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = {tag: events.Tensors(tag)[0] for tag in events.Tags()["tensors"]}
    assert {tag: (each.step, each.tensor_proto.string_val[0]) for tag, each in found.items()} == {
        "samples/The cat/text_summary": (3, b" sat"),
        "samples/A dog/text_summary": (3, b" ran"),
    }


def test_failed_tensorboard_write_is_reported_and_opens_a_new_file(tmp_path, caplog):
    log = MetricsLogger(LogOptions(OutputArgs(log_interval=1, tensorboard_dir=str(tmp_path / "tb")), 10), 1, 0, {})
    for path in (tmp_path / "tb").iterdir():
        path.unlink()
    (tmp_path / "tb").rmdir()  # its next flush finds no folder
    for iteration in range(1, 20):
        log.record(record(iteration, 4.0))
    log.close()
    assert "--tensorboard-dir: cannot write" in caplog.text and str(tmp_path / "tb") in caplog.text
    assert list((tmp_path / "tb").iterdir()), "written again, in a new file"


def test_progress_bar_appears_only_on_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        log = MetricsLogger(LogOptions(OutputArgs(log_interval=1), 10), 1, 4, {})
        log.record(record(5, 3.5))
        log._bar.refresh()
        log.close()
        assert ("5/10" in stream.getvalue() and "loss=3.5" in stream.getvalue()) == stream.isatty()
