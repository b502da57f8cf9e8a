"""--validate-only: what it prints, writes and returns."""

import json
import re

import pytest

from arguments.container import OPTIONS
from moe_trainer.commands.validate_only import run_validate_only
from tests.arguments.test_tokens import TOY

COUNTS = {"total": 110336, "mtp": 0, "active": 110336, "active_no_embedding": 108288}


@pytest.fixture(autouse=True)
def no_world_size(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def run(tmp_path, *argv):
    path = tmp_path / "report.json"
    code = run_validate_only([*TOY, "--validate-only", "--report", str(path), *argv])
    return code, json.loads(path.read_text())


def test_report_of_a_valid_line(tmp_path, capsys):
    code, report = run(tmp_path, "--world-size", "4", "--use-flash-attn", "--layernorm-epsilon", "1e-6")
    assert code == 0 and report["violations"] == [] and report["params"] == COUNTS and report["world_size"] == 4
    assert set(OPTIONS) < set(report["settings"])
    assert report["settings"]["data_parallel_size"] == {"value": 4, "source": "derived"}
    assert report["settings"]["num_layers"] == {"value": 2, "source": "command line"}
    assert report["settings"]["adam_beta1"] == {"value": 0.9, "source": "default"}
    assert report["settings"]["global_batch_size"]["value"] == 8
    assert report["settings"]["global_batch_size"]["source"] == "derived"
    assert [item["flag"] for item in report["renamed"]] == ["--layernorm-epsilon 1e-6"]
    assert [item["flag"] for item in report["idle"]] == ["--use-flash-attn"]
    shown = capsys.readouterr().out
    assert shown.startswith("valid for 4 ranks\nparameters: 110,336 ")
    run(tmp_path, "--world-size", "1")
    assert capsys.readouterr().out.startswith("valid for 1 rank\n")
    assert "num_layers" in shown and "(command line)" in shown and "(derived" in shown
    assert "adam_beta1" not in shown and "settings are at their defaults (--log-all-arguments prints them too)" in shown
    run(tmp_path, "--world-size", "4", "--log-all-arguments")
    assert re.search(r"  adam_beta1 \.+ 0\.9  \(default\)", capsys.readouterr().out)


def test_violations_are_written_to_the_report(tmp_path, capsys):
    code, report = run(tmp_path, "--tensor-parallel-num-weight-shards", "2", "--bogus", "--world-size", "2")
    assert code == 2
    assert {violation["kind"] for violation in report["violations"]} == {"unknown", "later"}
    assert all(violation["flags"] and violation["message"] for violation in report["violations"])
    assert report["settings"]["tensor_parallel_num_weight_shards"]["value"] == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("not valid: 2 problems")
    assert (
        captured.err.startswith("pretrain_moe.py: 2 problems with the arguments:\n  - ")
        and captured.err.count("\n") == 3
    )
    assert "--bogus" in captured.err and "--tensor-parallel-num-weight-shards" in captured.err


def test_parameters_are_counted_despite_a_missing_feature(tmp_path):
    _, report = run(tmp_path, "--recompute-activations")
    assert report["params"] == COUNTS
    _, report = run(tmp_path, "--num-attention-heads", "0")
    assert report["params"]["total"] is None


def test_world_size_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, report = run(tmp_path, "--global-batch-size", "8")
    assert code == 2 and report["world_size"] == 3
    assert "--global-batch-size 8" in report["violations"][0]["message"]
    code, report = run(tmp_path, "--global-batch-size", "8", "--world-size", "2")
    assert code == 0 and report["world_size"] == 2


def test_without_a_world_size_its_rules_are_skipped_with_a_note(tmp_path, capsys):
    code, report = run(tmp_path, "--global-batch-size", "7")
    assert code == 0 and report["world_size"] is None
    assert any("number of ranks" in line for line in report["notes"])
    assert "number of ranks" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["0", "-2"])
def test_impossible_world_sizes(tmp_path, size):
    code, report = run(tmp_path, "--world-size", size)
    assert code == 2 and "--world-size" in report["violations"][0]["message"]


def test_unwritable_report_is_an_error(tmp_path, capsys):
    code = run_validate_only([*TOY, "--report", str(tmp_path / "none" / "x.json")])
    assert code == 2 and "--report" in capsys.readouterr().err


def test_errors_name_only_flags_that_were_given(tmp_path, capsys):
    """A rule may concern flags that were not given; the reasons say what is wrong, and no list of flags follows them."""
    code, _ = run(tmp_path, "--num-exprts", "4", "--moe-router-topk", "9", "--num-experts", "8", "--world-size", "2")
    captured = capsys.readouterr()
    assert code == 2 and "refused because of" not in captured.err + captured.out
    assert "--pipeline-model-parallel-size" not in captured.err and "did you mean --num-experts" in captured.err


@pytest.mark.parametrize(
    ("flags", "shown"), [("", True), ("--freeze-all-layers", False), ("--skip-train --eval-iters 1", False)]
)
def test_optimizer_state_is_described_only_for_training_runs(flags, shown, capsys):
    assert run_validate_only([*TOY, *flags.split()]) == 0
    assert ("GiB of weights, gradients and optimizer state" in capsys.readouterr().out) == shown
