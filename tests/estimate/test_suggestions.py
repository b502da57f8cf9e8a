"""Suggested changes for a plan that does not fit: real plans of changed flags, cheapest first."""

import pytest

from arguments.tokens import drop_flags
from moe_trainer.estimate.dry_run import run_dry_run
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import make_plan, validated_args
from moe_trainer.estimate.plan_text import plan_json
from moe_trainer.estimate.suggestions import changes, cheapest_fixes

LINE = "--preset mixtral_8x7b --mock-data --bf16 --use-distributed-optimizer --expert-model-parallel-size 8 --global-batch-size 256".split()


def make_plan_of(argv, gpus, machine="h100"):
    return make_plan(validated_args(argv, gpus), gpus, find_hardware(machine))


@pytest.mark.parametrize(
    "flags, gpus, kinds",
    [
        ("--micro-batch-size 4", 64, {1}),
        ("--micro-batch-size 8 --seq-length 8192 --max-position-embeddings 32768", 16, {1, 2}),
        ("--micro-batch-size 4 --num-layers 64", 16, {2, 3, 4, 5, 6}),
    ],
)
def test_suggested_changes_fit_and_are_ordered_by_cost(flags, gpus, kinds):
    argv = [*LINE, *flags.split()]
    plan = make_plan_of(argv, gpus)
    assert plan.margin < 0 and plan_json(plan)["fits"] is False
    fixes = cheapest_fixes(argv, plan)
    assert fixes and {len(fix.changes) for fix in fixes} <= kinds
    assert [fix.slower for fix in fixes] == sorted(fix.slower for fix in fixes)
    for fix in fixes:
        dests = frozenset().union(*(change.dests for change in fix.changes))
        again = make_plan_of([*drop_flags(argv, dests), *fix.words], gpus)
        assert again.margin >= 0 and again.margin == fix.plan.margin
        assert f"fits with {again.margin / 2**30:.1f} GiB left" in fix.text
        assert fix.slower == pytest.approx(plan.tokens_per_second / again.tokens_per_second - 1)


def test_suggested_changes_keep_what_a_checkpoint_adds(capsys):
    """The model's flags are not on the command line, and every changed line needs them too."""
    recorded = validated_args("--preset qwen3_30b_a3b --mock-data".split(), 16).as_dict()
    line = (
        "--load x --use-checkpoint-args --mock-data --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-4 "
        "--seq-length 4096 --world-size 16 --expert-model-parallel-size 8 --bf16 --dry-run --hardware h100"
    ).split()
    assert run_dry_run(line, recorded) == 3
    text = capsys.readouterr().out
    assert "cheapest changes that fit:" in text and "  --use-distributed-optimizer: fits with" in text


def test_suggested_changes_respect_the_headroom():
    argv = [*LINE, "--micro-batch-size", "4"]
    plan = make_plan_of(argv, 64)
    assert all(fix.plan.headroom >= 2 for fix in cheapest_fixes(argv, plan, headroom=2.0))


def test_suggestions_exclude_searched_flags():
    args = validated_args([*LINE, "--micro-batch-size", "4"], 64)
    kinds = {change.kind for change in changes(args, find_hardware("h100"), 64, searched=False)}
    assert kinds == {"optimizer", "offload"}


def test_suggestions_without_searched_flags_keep_the_world_size():
    argv = "--preset deepseek_v3 --mock-data --bf16 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512".split()
    plan = make_plan_of(argv, 32)
    assert not [fix for fix in cheapest_fixes(argv, plan, searched=False) if "--world-size" in fix.words]


def test_dry_run_prints_suggested_changes(capsys, tmp_path):
    line = [
        *LINE,
        "--micro-batch-size",
        "4",
        "--world-size",
        "64",
        "--dry-run",
        "--report",
        str(tmp_path / "plan.json"),
    ]
    assert run_dry_run(line) == 3
    text = capsys.readouterr().out
    assert "does not fit: stage 0" in text and "cheapest changes that fit:\n  --micro-batch-size" in text
    assert '"fixes": [\n' in (tmp_path / "plan.json").read_text()
    assert run_dry_run([*LINE, "--micro-batch-size", "1", "--world-size", "64", "--dry-run"]) == 0
    assert "cheapest" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--skip-train", "--freeze-all-layers"])
def test_frozen_models_get_no_training_suggestions(flag):
    line = [*LINE, "--micro-batch-size", "4"]
    kinds = [
        {change.kind for change in changes(validated_args(changed_line, 64), find_hardware("h100"), 64)}
        for changed_line in (line, [*line, flag])
    ]
    training = {"optimizer", "offload", "recompute"}
    assert kinds[0] & training == training and not kinds[1] & training and kinds[1]
