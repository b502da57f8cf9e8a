"""pretrain_moe.py --dry-run: what it prints, writes and returns, without torch."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from arguments.parse import resolve_command_line
from moe_trainer.commands import plan, train_process
from moe_trainer.estimate.dry_run import plan_of_flags, run_dry_run

ROOT = Path(__file__).parents[2]
LINE = "--preset mixtral_8x7b --mock-data --expert-model-parallel-size 8 --world-size 64".split()


def test_dry_run_plans_without_torch(tmp_path):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy'))); from moe_trainer.commands import train_process; "
        "sys.exit(train_process.main(sys.argv[1:]))"
    )
    report = tmp_path / "plan.json"
    done = subprocess.run(
        [sys.executable, "-c", code, *LINE, "--dry-run", "--hardware", "h100", "--report", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s/GPU" in done.stdout and "stage" in done.stdout
    assert json.loads(report.read_text())["hardware"] == "h100"


@pytest.mark.parametrize(
    "flags, code, expected_text",
    [
        ((), 0, "fits: the fullest device has"),
        (("--fake-process-group",), 0, "--fake-process-group"),
        (
            (
                "--hardware",
                "a100",
                "--recompute-granularity",
                "full",
                "--recompute-method",
                "uniform",
                "--recompute-num-layers",
                "1",
            ),
            0,
            "a100",
        ),
        (("--micro-batch-size", "4"), 3, "does not fit: stage 0 needs"),
        (("--help",), 0, "--dry-run"),
        (("--hardware", "abacus"), 2, "abacus"),
        (("--moe-flex-dispatcher-num-sms", "132", "--moe-token-dispatcher-type", "flex"), 2, "132 multiprocessors"),
        (("--world-size", "63"), 2, "63 ranks"),
        (("--world-size", "0"), 2, "--world-size 0"),
        (("--num-layers", "31", "--pipeline-model-parallel-size", "2"), 2, "--num-layers"),
        (("--no-such-flag",), 2, "--no-such-flag"),
        (
            (
                "--global-batch-size",
                "128",
                "--pipeline-model-parallel-size",
                "8",
                "--num-virtual-stages-per-pipeline-rank",
                "2",
                "--micro-batch-size",
                "1",
                "--global-batch-size",
                "40",
            ),
            2,
            "microbatches",
        ),
        (("--report", "/nowhere/plan.json"), 2, "--report /nowhere/plan.json"),
    ],
)
def test_dry_run_exit_codes(capsys, flags, code, expected_text):
    assert run_dry_run([*LINE, "--dry-run", *flags]) == code
    out, err = capsys.readouterr()
    assert expected_text in (err if code == 2 else out), (out, err)


@pytest.mark.parametrize("spelling", ["--fake-init-process-group", "--fake-process-group", "--dry-run=true"])
def test_every_spelling_of_a_plan_plans(spelling, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert train_process.main([*LINE, spelling]) == 0
    assert "fits: the fullest device has" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["--validate-only", "--dry-run", "--fake-init-process-group"])
@pytest.mark.parametrize(
    "env", [{"RANK": "0", "WORLD_SIZE": "64"}, {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "64"}]
)
def test_first_rank_alone_answers_under_a_launcher(mode, env, monkeypatch, capsys):
    """Without the variables of a rendezvous: nothing meets."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    line = LINE[:-2]
    assert train_process.main([*line, mode]) == 0 and "64" in capsys.readouterr().out
    assert train_process.main([*line, mode, "--no-such-flag"]) == 2 and "--no-such-flag" in capsys.readouterr().err
    name = "RANK" if "RANK" in env else "SLURM_PROCID"
    monkeypatch.setenv(name, "3")
    assert train_process.main([*line, mode, "--no-such-flag"]) == 0 and capsys.readouterr() == ("", "")
    monkeypatch.setenv(name, "64")
    assert (
        train_process.main([*line, mode]) == 2 and "rank 64 is not valid for world size 64" in capsys.readouterr().err
    )


GRAPHS = "--cuda-graph-impl local --cuda-graph-modules attn --use-torch-fsdp2"


@pytest.mark.parametrize(
    "flags",
    [
        GRAPHS,
        "--moe-n-hash-layers 9999",
        "--overlap-moe-expert-parallel-comm --moe-shared-expert-overlap",
        "--replication",
    ],
)
def test_invalid_flags_are_rejected_with_the_messages_of_the_trainer(capsys, flags):
    """The planner runs the trainer's rules."""
    argv = [*LINE, *flags.split()]
    _, violations = resolve_command_line(argv, 64)
    assert violations and run_dry_run([*argv, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "the trainer rejects this" in err and all(violation.message in err for violation in violations)


def test_dry_run_requires_the_world_size(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_dry_run([*LINE[:-2], "--dry-run"]) == 2 and "--world-size" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert run_dry_run([*LINE[:-2], "--dry-run"]) == 0


def test_dry_run_report_has_its_documented_keys(tmp_path):
    """The keys that other programs read."""
    path = tmp_path / "plan.json"
    assert run_dry_run([*LINE, "--dry-run", "--hardware", "gb300", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"params", "memory", "step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "nearest_published"} <= set(
        report
    )
    assert {f"{part}_gb" for part in ("weights", "grads", "optimizer", "activations", "dispatch", "total")} <= set(
        report["memory"]
    )
    assert report["memory"]["margin_gb"] == pytest.approx(
        report["memory"]["device_gb"] - report["memory"]["reserve_gb"] - report["memory"]["total_gb"]
    )


def test_dry_run_plans_for_a_small_device(tmp_path):
    """A device with fewer multiprocessors than the dispatcher uses by default."""
    path = tmp_path / "small.yaml"
    path.write_text("like: h100\nnum_sms: 16\n")
    assert run_dry_run([*LINE, "--dry-run", "--hardware", str(path), "--overlap-moe-expert-parallel-comm"]) == 0


@pytest.mark.parametrize("flags", ["--skip-train", "--freeze-all-layers"])
def test_frozen_weights_need_no_optimizer_memory(tmp_path, flags):
    path = tmp_path / "report.json"
    assert run_dry_run([*LINE, "--dry-run", "--report", str(path), *flags.split()]) == 0
    report = json.loads(path.read_text())
    memory = report["memory"]
    assert memory["grads_gb"] == memory["optimizer_gb"] == 0 < memory["weights_gb"]


NAMED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--num-experts 4 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --eval-iters 0 --mock-data --world-size 2 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3"
).split()


TINY_PRESET = "--preset mixtral_tiny --mock-data --world-size 2 --micro-batch-size 1".split()


def test_validate_only_takes_the_vocabulary_from_the_tokenizers_name_as_dry_run_does(capsys):
    assert train_process.main([*NAMED, "--validate-only"]) == 0
    validated = capsys.readouterr().out
    assert train_process.main([*NAMED, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    note = "vocabulary: 129,280 rows, taken from the tokenizer's name (deepseek-ai/DeepSeek-V3)"
    assert note in validated and note in planned
    assert "memory per rank" in validated and "not counted" not in validated
    train_process.main([*NAMED, "--vocab-size", "129280", "--validate-only"])
    counted = capsys.readouterr().out
    parameters = [
        next(line for line in out.splitlines() if line.startswith("parameters")) for out in (validated, counted)
    ]
    assert parameters[0] == parameters[1] and "taken from" not in counted


def test_the_vocabulary_of_a_preset_is_not_that_of_a_named_tokenizer(capsys):
    """A run has the tokenizer's rows; where only the tokenizer tells them, plan and --validate-only say so."""

    def vocabulary(*flags):
        for mode in ("--validate-only", "--dry-run"):
            train_process.main([*TINY_PRESET, *flags, mode])
        return [line for line in capsys.readouterr().out.splitlines() if "vocabulary: " in line]

    unknown = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "own.model"]
    lines = vocabulary(*unknown)
    assert len(lines) == 2 and all(
        "those of the preset; a run takes the tokenizer's (own.model)" in line for line in lines
    )
    named = vocabulary("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "deepseek-ai/DeepSeek-V3")
    assert len(named) == 2 and all("129,280 rows, taken from the tokenizer's name" in line for line in named)
    for flags in ((), (*unknown, "--vocab-size", "800"), (*unknown, "--padded-vocab-size", "896")):
        assert vocabulary(*flags) == [], flags
    assert vocabulary("--tokenizer-type", "NullTokenizer") == []


def test_a_vocabulary_of_the_flags_is_not_replaced_in_validate_only(capsys):
    sizes = []
    for rows in ("256", "512"):
        assert train_process.main([*NAMED, "--padded-vocab-size", rows, "--validate-only"]) == 0
        sizes.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters")))
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("script", "mode", "options"),
    [
        ("moe_trainer.commands.plan", (), "--world-size 8"),
        ("moe_trainer.commands.plan", ("pieces",), "--world-size 8"),
        ("moe_trainer.commands.plan", ("search",), "--gpus 8 --best 1"),
        ("moe_trainer.commands.prove", (), "--world-size 8 --shrink-only"),
        ("scripts.roofline", (), "--world-size 8"),
    ],
)
def test_planning_scripts_keep_variables_that_only_a_run_needs(tmp_path, monkeypatch, script, mode, options):
    monkeypatch.delenv("WEIGHTS", raising=False)
    text = (ROOT / "model_zoo" / "mixtral_tiny.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("MODEL_ARGS:", "MODEL_ARGS:\n  --load: ${WEIGHTS}", 1))
    module = importlib.import_module(script)
    if script == "scripts.roofline":  # nothing is executed
        monkeypatch.setattr(module, "plan_and_roofline", lambda flags: (plan_of_flags(flags), None))
        monkeypatch.setattr(module, "roofline_lines", lambda plan, roofline: [])
    line = [*mode, "--preset", str(recipe), "--mock-data", "--expert-model-parallel-size", "2", *options.split()]
    assert module.main(line) == 0


SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-aux-loss-coeff 0.01 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 512 --mock-data"
).split()


@pytest.mark.parametrize("mode", [["--world-size", "2"], ["search", "--gpus", "2"], ["pieces", "--world-size", "2"]])
def test_a_plan_needs_neither_a_learning_rate_nor_a_training_length(mode, capsys):
    """These flags do not change the plan; a run without them is still rejected."""
    plans = []
    for training in ([], ["--lr", "0.01", "--train-samples", "8000"]):
        assert plan.main([*mode, *SHAPE, *training]) == 0
        output = capsys.readouterr()
        plans.append([text for text in output.out.splitlines() if "planned in" not in text and "torchrun" not in text])
        assert ("planned with --lr 0.0001 --train-iters" in output.err) == (not training)
    assert plans[0] == plans[1]
    for partial in (["--min-lr", "0.001"], ["--lr-warmup-iters", "2000000"], ["--lr-decay-samples", "100"]):
        assert plan.main([*mode, *SHAPE, *partial]) == 0, capsys.readouterr().err
    assert train_process.main([*SHAPE, "--world-size", "2", "--dry-run"]) == 2
