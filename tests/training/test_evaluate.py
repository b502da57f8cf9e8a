"""--skip-train: one command evaluates a checkpoint, without anything that only training needs; and --no-load-optim restarts the schedule."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import read_metrics, run
from training.forked import pretrain
from training.tiny import MOCK, TINY

from arguments.mechanisms.selections import SELECTING
from moe_trainer.data.indexed import write_indexed_dataset
from moe_trainer.data.loader import Batch
from moe_trainer.metrics.evaluation_summary import EvaluationResult
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.training import evaluate as evaluation
from moe_trainer.training.evaluate import _ByteCount
from moe_trainer.training.run import TrainState

SETS = ("validation", "test", "validation-a", "validation-b", "test-a", "test-b")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 iterations on a blend of two files, which ends with a separate evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    generator = np.random.default_rng(3)
    for name, high in (("a", 40), ("b", 119)):
        with write_indexed_dataset(str(folder / f"{name}_text_document"), np.uint16) as builder:
            for _ in range(40):
                builder.add_document(generator.integers(0, high, 97), [97])
    data = "--data-path 0.7 a_text_document 0.3 b_text_document --split 60,20,20 --tokenizer-type NullTokenizer --vocab-size 120".split()
    finished = run(
        [
            *TINY,
            *data,
            "--train-iters",
            "4",
            "--eval-iters",
            "3",
            "--save",
            "ck",
            "--save-interval",
            "4",
            "--data-cache-path",
            "cache",
        ],
        folder,
    )
    assert finished.returncode == 0, finished.stderr
    (folder / "log").write_text(finished.stdout)
    return folder


def test_bytes_of_a_shared_batch_are_counted_once():
    """Ranks of a group (dynamic context parallelism) read the same batch; the first one counts it."""
    row = torch.tensor([[1, 2, 2]])
    batch = Batch(row, row, torch.tensor([[1.0, 1.0, 0.0]]), row, packed=PackedSequences((3,), (3,), 2))
    totals = []
    for rank in range(2):
        count = _ByteCount(np.array([0, 10, 100]), {2: Group("dynamic_cp_2", (0, 1), rank, 2)})
        assert list(count.through(iter([batch]))) == [batch]
        totals.append(count.total)
    assert totals == [110, 0]


@pytest.mark.parametrize(("dynamic", "expected"), [(False, 10), (True, 20)])
def test_bytes_are_summed_over_ranks_that_read_other_batches(monkeypatch, dynamic, expected):
    """Ranks of cp read the same batches; with dynamic context parallelism a batch is counted by one rank alone."""
    pair = Group("dp_cp", (0, 1), 0, 2)
    ps = replace(ParallelState.single(), dp_cp=pair, dynamic_cp={2: pair} if dynamic else {})
    monkeypatch.setattr(evaluation.collectives, "all_reduce", lambda total, group: total * group.size)
    run = SimpleNamespace(ps=ps, runtime=SimpleNamespace(device=torch.device("cpu")))
    assert evaluation._sum_bytes(run, 10) == expected


@pytest.mark.parametrize(("full", "begins"), [(False, [0, 0, 6, 6]), (True, [0, 0, 0, 0])])
def test_validations_continue_where_the_last_one_stopped(monkeypatch, full, begins):
    """Every set by as many samples, unless all of it is read."""
    begun = []
    monkeypatch.setattr(
        evaluation,
        "evaluate",
        lambda run, state, where, kind, dataset, consumed, *_: (
            begun.append(consumed) or EvaluationResult(kind, 6, 1.0, 1)
        ),
    )
    args = SimpleNamespace(training=SimpleNamespace(full_validation=full), is_eval_only=False)
    datasets, state = SimpleNamespace(valid_names=("a", "b"), valid=(None, None)), TrainState()
    for _ in range(2):
        evaluation.validate(SimpleNamespace(args=args, inputs=SimpleNamespace(datasets=datasets)), state, "iteration 1")
    assert begun == begins


def test_log_shows_settings_and_run_summary(trained):
    log = (trained / "log").read_text()
    assert f"dashboard: {trained}/ck/dashboard.html" in log and not (trained / "ck" / ".in_use").exists()
    settings = log[log.index("---- arguments") : log.index("end of arguments")]
    assert "  train_iters ..................................... 4\n" in settings and "adam_beta1" not in settings
    assert "settings are at their defaults (--log-all-arguments prints them too)" in log
    losses = [
        record["lm loss"] for record in read_metrics(trained / "ck" / "metrics.jsonl") if "validation" not in record
    ]
    summary = log[log.index("run summary") :].splitlines()
    assert summary[1] == "  ended:       all 4 iterations are done"
    assert (
        summary[2].startswith("  iterations:  4 of 4 (4 in this start, 0:00:")
        and summary[3] == "  tokens:      512 in this start"
    )
    assert summary[4].startswith("  throughput:  ") and " tokens/s, " in summary[4]
    assert summary[5] == f"  lm loss:     {losses[-1]:.4f} (the batch of iteration 4)"
    assert [line.split(":")[0].strip() for line in summary[6:10]] == ["validation", "test", "saved", "dashboard"]
    assert summary[8] == "  saved:       1 checkpoint saved to ck, the last at iteration 4"


def test_log_of_an_early_exit_shows_all_settings_and_summary(trained):
    data = [
        "--data-path",
        "a_text_document",
        "--split",
        "60,20,20",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "120",
    ]
    finished = run(
        [*TINY, *data, "--train-iters", "8", "--log-interval", "2", "--exit-interval", "2", "--log-all-arguments"],
        trained,
    )
    assert finished.returncode == 0, finished.stderr
    assert (
        "  adam_beta1 ...................................... 0.9\n" in finished.stdout
        and "prints them too" not in finished.stdout
    )
    assert "  ended:       early, after iteration 2: exiting program at iteration 2" in finished.stdout
    assert (
        "(the batch of iteration 2; mean of the last 2 iterations " in finished.stdout
        and "  saved:       nothing (no --save)" in finished.stdout
    )


@pytest.mark.parametrize("kind", SELECTING)
def test_experts_are_chosen_as_in_training(kind, tmp_path):
    """By plain top-k the same weights would be another function."""
    flags = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0 --train-iters 2 --eval-iters 2 --lr 1e-2"
    trained = run([*TINY, *MOCK, *flags.split(), "--save", "ck", "--save-interval", "2"], tmp_path)
    evaluated = run(["--use-checkpoint-args", "--load", "ck", "--skip-train"], tmp_path)
    assert (trained.returncode, evaluated.returncode) == (0, 0), trained.stderr + evaluated.stderr
    losses = [re.search(r"on test set \| lm loss value: (\S+)", done.stdout)[1] for done in (trained, evaluated)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def recorded(trained):
    """Results by set, with the flags that the checkpoint records."""
    return evaluate(trained, "--use-checkpoint-args", "--load", "ck")[1]


def evaluate(folder, *flags, ranks=1):
    metrics = folder / "evaluated.jsonl"
    metrics.unlink(missing_ok=True)
    finished = run(["--skip-train", "--metrics-file", metrics.name, *flags], folder, ranks)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, {record["validation"]: record for record in read_metrics(metrics)}


def test_skip_train_evaluates_a_checkpoint_at_its_iteration(trained, monkeypatch):
    for name in ("Optimizer", "build_lr_schedule", "build_weight_decay_schedule", "build_grad_buffers"):
        monkeypatch.setattr(
            f"moe_trainer.training.setup.{name}",
            lambda *args, **kwargs: pytest.fail("an evaluation builds nothing of the optimizer"),
        )
    before = (trained / "ck" / "metrics.jsonl").read_text()
    text, found = evaluate(trained, "--use-checkpoint-args", "--load", "ck", "--save", "ck", "--save-interval", "1")
    assert (trained / "ck" / "metrics.jsonl").read_text() == before  # the run's own record is not the evaluation's
    assert (
        "validation loss at iteration 4 on validation set" in text
        and "validation loss at iteration 4 on test set" in text
    )
    assert tuple(found) == SETS and {record["iteration"] for record in found.values()} == {4}
    own = [json.loads(line) for line in before.splitlines()]
    assert found["test"]["lm loss"] == next(each["lm loss"] for each in own if each.get("validation") == "test")
    assert found["test-a"]["lm loss"] != found["test-b"]["lm loss"]
    assert "evaluation of ck, iteration 4" in text
    assert (
        "per byte: not reported, because the ids of a NullTokenizer stand for no text" in text
        and "bytes" not in found["test"]
    )
    assert found["validation"]["tokens"] == found["validation"]["samples"] * 32 == 3 * 4 * 32


@pytest.mark.parametrize(
    "mapping",
    [
        "--expert-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --use-distributed-optimizer --context-parallel-size 1",
    ],
)
def test_evaluation_losses_are_equal_under_another_mapping(trained, recorded, mapping):
    _, other = evaluate(trained, "--use-checkpoint-args", "--load", "ck", *mapping.split(), ranks=2)
    for name in SETS:
        assert (
            other[name]["lm loss"] == pytest.approx(recorded[name]["lm loss"], rel=2e-6)
            and other[name]["tokens"] == recorded[name]["tokens"]
        )


def test_evaluation_with_explicit_flags_and_with_other_data(trained, recorded):
    flags = [word for word in " ".join(TINY).replace("--lr 1e-3", "").split()]
    same = [
        "--data-path",
        "0.7",
        "a_text_document",
        "0.3",
        "b_text_document",
        "--split",
        "60,20,20",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "120",
    ]
    _, typed = evaluate(trained, *flags, *same, "--load", "ck", "--eval-iters", "3")
    assert {name: typed[name]["lm loss"] for name in SETS} == {name: recorded[name]["lm loss"] for name in SETS}
    _, other = evaluate(
        trained, "--use-checkpoint-args", "--load", "ck", "--valid-data-path", "b_text_document", "--full-validation"
    )
    assert list(other) == ["validation"] and other["validation"]["samples"] == 40 * 97 // 32 // 2 * 2


def test_recorded_split_applies_to_the_data_path_of_the_command_line(trained, recorded):
    """The same files without --split: the recorded split applies. The default split would evaluate on trained text."""
    data = ["--data-path", "0.7", "a_text_document", "0.3", "b_text_document"]
    _, same = evaluate(trained, "--use-checkpoint-args", "--load", "ck", *data)
    assert {name: same[name]["lm loss"] for name in SETS} == {name: recorded[name]["lm loss"] for name in SETS}


def test_recorded_micro_batch_size_is_reduced_to_fit_the_ranks(trained, recorded):
    """Batches of 4 with a recorded micro-batch size of 2, on four ranks: one sample per rank, the same losses."""
    text, other = evaluate(trained, "--use-checkpoint-args", "--load", "ck", ranks=4)
    for name in SETS:
        assert (
            other[name]["lm loss"] == pytest.approx(recorded[name]["lm loss"], rel=2e-6)
            and other[name]["samples"] == recorded[name]["samples"]
        )
    assert "does not divide among" not in text


def test_evaluation_without_checkpoint_or_data_is_refused(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    shape = [word for word in " ".join(TINY).replace("--lr 1e-3", "").split()]
    finished = run([*shape, *MOCK, "--skip-train", "--eval-iters", "1", "--load", "empty"], tmp_path)
    assert (
        finished.returncode == 2
        and "--load empty: there is no checkpoint in this folder, so there is nothing to evaluate" in finished.stderr
    )
    finished = run(
        [
            *shape,
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "120",
            "--skip-train",
            "--eval-iters",
            "1",
            "--load",
            "empty",
        ],
        tmp_path,
    )
    assert finished.returncode == 2 and "--skip-train needs data to evaluate on: --valid-data-path" in finished.stderr


def test_no_load_optim_restarts_the_schedule(trained):
    """As in Megatron-LM (d98e8a64): load_checkpoint leaves the scheduler at 0 steps, iteration and data continue."""
    data = "--data-path 0.7 a_text_document 0.3 b_text_document --split 60,20,20 --tokenizer-type NullTokenizer --vocab-size 120".split()
    flags = [
        *TINY,
        *data,
        "--train-iters",
        "9",
        "--lr-warmup-iters",
        "2",
        "--load",
        "ck",
        "--no-load-optim",
        "--no-load-rng",
        "--metrics-file",
        "resumed.jsonl",
    ]
    finished = run(flags, trained)
    assert finished.returncode == 0, finished.stderr
    records = [record for record in read_metrics(trained / "resumed.jsonl") if "validation" not in record]
    assert [record["iteration"] for record in records] == [5, 6, 7, 8, 9] and records[0]["consumed_samples"] == 20
    assert [record["learning_rate"] for record in records][:3] == pytest.approx([0.0, 0.5e-3, 1e-3])
    refused = run([word for word in flags if word not in ("--no-load-optim", "--no-load-rng")], trained)
    assert refused.returncode == 2 and "the schedules differ from the checkpoint's" in refused.stderr


def test_packed_evaluation_needs_no_groups_of_microbatches(tmp_path):
    """A batch of evaluation has fewer packs than virtual stages take in training, and all of them are computed."""
    flags = "--num-layers 4 --use-varlen-dataset --max-seqlen-per-dp-cp-rank 40 --moe-token-dispatcher-type alltoall "
    flags += "--calculate-per-token-loss --micro-batch-size 1 --global-batch-size 16 --eval-global-batch-size 3 "
    flags += "--train-iters 1 --eval-iters 1 --eval-interval 1 --pipeline-model-parallel-size {} {}"
    stages = "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 4"
    losses = []
    for name, size, more in (("one", 1, ""), ("virtual", 2, stages)):
        records, _ = pretrain([*TINY, *MOCK, *flags.format(size, more).split()], tmp_path / name, world_size=size)
        losses.append([record["lm loss"] for record in records if "validation" in record])
    assert len(losses[0]) >= 1 and losses[1] == pytest.approx(losses[0], rel=1e-5)
