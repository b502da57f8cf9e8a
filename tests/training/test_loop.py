"""Flags of the training loop, tested through the command line."""

import json
import signal
import socket
import time

import pytest
from commands import environment, golden_workspace, read_metrics, run, start
from training.tiny import MOCK, TINY

from arguments.container import from_values
from moe_trainer import version

METRICS = ["--metrics-file", "metrics.jsonl"]


def train(cwd, *flags):
    finished = run([*TINY, *MOCK, *METRICS, *flags], cwd)
    assert finished.returncode == 0, finished.stderr
    return finished


def validations(cwd):
    return [(r["validation"], r["iteration"]) for r in read_metrics(cwd / "metrics.jsonl") if "validation" in r]


def test_a_signal_saves_and_ends_the_run(tmp_path):
    argv = [
        *TINY,
        *MOCK,
        *METRICS,
        "--train-iters",
        "100000",
        "--lr-decay-iters",
        "100",
        "--exit-signal-handler",
        "--save",
        "ckpt",
        "--save-interval",
        "100000",
    ]
    process = start(argv, tmp_path, environment())
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert "[exiting program after receiving SIGTERM.] datetime:" in stdout
    last = read_metrics(metrics)[-1]["iteration"]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == str(last)


def test_exit_duration_saves_and_ends_the_run(tmp_path):
    finished = train(
        tmp_path,
        "--train-iters",
        "100000",
        "--lr-decay-iters",
        "100",
        "--exit-duration-in-mins",
        "0",
        "--save",
        "ckpt",
        "--save-interval",
        "100000",
    )
    assert "[exiting program after 0." in finished.stdout
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").exists()


def test_skipped_iterations_consume_their_samples(tmp_path):
    train(tmp_path, "--train-iters", "4", "--iterations-to-skip", "2", "3")
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["iteration"] for r in records] == [1, 4]
    ran = records[0]["run"]  # what `plan.py calibrate --from` reads; said once
    assert (ran["world_size"], ran["device"]) == (1, "cpu") and ran["threads"] >= 1 and "run" not in records[1]
    assert ran["mapping"]["nodes"] == 1 and ran["hardware"]["hostnames"] == [socket.gethostname()]
    assert ran["versions"]["moe_trainer"] == version.__version__
    assert from_values(ran["settings"], 1).training.iterations_to_skip == [2, 3] and ran["padded_vocab_size"] > 0
    assert records[1]["consumed_samples"] == 16
    # the schedule does not advance with them
    assert records[1]["learning_rate"] == pytest.approx(records[0]["learning_rate"], rel=0.2)


def test_start_eval_at_iter_and_skip_train(tmp_path):
    train(tmp_path, "--train-iters", "6", "--eval-interval", "2", "--eval-iters", "1", "--start-eval-at-iter", "4")
    assert validations(tmp_path) == [("validation", 4), ("validation", 6), ("validation", 6), ("test", 6)]
    (tmp_path / "metrics.jsonl").unlink()
    finished = train(tmp_path, "--train-iters", "6", "--eval-interval", "2", "--eval-iters", "1", "--skip-train")
    assert "skipping training" in finished.stdout
    assert validations(tmp_path) == [("validation", 0), ("test", 0)]


def test_full_validation_of_multiple_validation_sets(shared, tmp_path):
    cwd = golden_workspace(shared, tmp_path)
    data = (
        "--train-data-path golden/dataset/A_text_document --valid-data-path golden/dataset/A_text_document "
        "golden/dataset/B_text_document --multiple-validation-sets --validation-set-names first second --full-validation "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model golden/dataset/tokenizer --data-cache-path cache"
    ).split()
    batches = [
        "--micro-batch-size",
        "16",
        "--global-batch-size",
        "32",
    ]  # a validation reads more than a thousand samples
    finished = run(
        [*TINY, *data, *batches, *METRICS, "--train-iters", "2", "--eval-interval", "1", "--eval-iters", "1"], cwd
    )
    assert finished.returncode == 0, finished.stderr
    kinds = [kind for kind, _ in validations(cwd)]
    assert kinds[:4] == ["validation-first", "validation-second"] * 2
    losses = {r["validation"]: r["lm loss"] for r in read_metrics(cwd / "metrics.jsonl") if "validation" in r}
    assert losses["validation-first"] != losses["validation-second"]


def test_timers_profile_and_per_layer_scalars_are_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = train(
        tmp_path,
        "--train-iters",
        "4",
        "--timing-log-level",
        "2",
        "--timing-log-option",
        "all",
        "--log-timers-to-tensorboard",
        "--log-throughput",
        "--tensorboard-dir",
        "tb",
        "--moe-per-layer-logging",
        "--profile",
        "--use-pytorch-profiler",
        "--profile-step-start",
        "1",
        "--profile-step-end",
        "2",
        "--profile-ranks",
        "0",
        "--log-params-norm",
        "--log-num-zeros-in-grad",
    )
    assert "forward-compute" in finished.stderr and "optimizer-inner-step" in finished.stderr
    (trace,) = (tmp_path / "tb" / "profile").glob("*.json")
    assert json.loads(trace.read_text())["traceEvents"]
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "throughput",
        "forward-backward-time",
        "moe/load_balancing_loss_layer_0",
        "moe/load_balancing_loss_layer_1",
        "load_balancing_loss",
        "params-norm",
        "num-zeros",
    } <= tags
    assert "params norm:" in finished.stdout and "num zeros:" in finished.stdout
