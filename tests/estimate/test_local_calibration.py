"""Constants fitted to own runs: planted ones are found again, files are read with care, and a real run predicts another one."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from arguments import parse_args
from arguments.container import OPTIONS, SECTIONS, from_values
from moe_trainer.commands import plan
from moe_trainer.estimate import local_calibration
from moe_trainer.estimate.hardware import Constants, HardwareError, find_hardware
from moe_trainer.estimate.local_calibration import calibrate, hardware_yaml, predicted_seconds, read_runs
from moe_trainer.estimate.plan import PlanError, make_plan
from moe_trainer.estimate.uncertainty import error_bar

ROOT = Path(__file__).parents[2]
TOY = "--preset mixtral_tiny --mock-data"
LINES = (
    f"{TOY} --micro-batch-size 2 --global-batch-size 8",
    f"{TOY} --micro-batch-size 4 --global-batch-size 16 --hidden-size 384",
    f"{TOY} --micro-batch-size 2 --global-batch-size 8 --num-layers 8",
    f"{TOY} --micro-batch-size 1 --global-batch-size 8 --seq-length 512",
)
PLANTED = Constants(gemm_bf16=1.1, fill=16, iteration=0.02, memory=0.9, launch=1.2e-5, latency=3e-4, update=0.3)


def run_record(argv, world_size=1, device="cpu", threads=1):
    """The trainer's first record (training/metrics.py)."""
    args = parse_args(argv.split(), world_size)
    settings = {name: value for name, value in args.as_dict().items() if value != OPTIONS[name].default}
    return {
        "world_size": world_size,
        "device": device,
        "threads": threads,
        "padded_vocab_size": 4096,
        "settings": json.loads(json.dumps(settings, default=str)),
    }


def write(path, argv, seconds, world_size=1, **described_as):
    """A metrics file of iterations that take about `seconds`, the first ones longer."""
    records = [
        {"iteration": number + 1, "elapsed_ms": 1e3 * seconds * (3 if number < 2 else 1 + 0.01 * (number % 3 - 1))}
        for number in range(12)
    ]
    records[0]["run"] = run_record(argv, world_size, **described_as)
    records.append({"validation": "test", "iteration": 12, "elapsed_ms": 9e9})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def planted_seconds(argv, world_size=1):
    machine = replace(find_hardware("cpu"), constants=PLANTED)
    return make_plan(parse_args(argv.split(), world_size), world_size, machine).time.step


def test_run_record_restores_the_arguments():
    for argv in (
        LINES[0],
        "--preset deepseek_v3_tiny --mock-data",
        "--preset gpt_oss_tiny --mock-data",
        "--preset qwen3_next_tiny --mock-data --bf16",
    ):
        args = parse_args(argv.split(), 1)
        again = from_values(run_record(argv)["settings"], 1)
        assert all(getattr(args, name) == getattr(again, name) for name, _ in SECTIONS)


def test_calibration_recovers_known_constants_and_predicts_unseen_runs(tmp_path):
    machine = find_hardware("cpu")
    runs = [
        run
        for number, argv in enumerate(LINES)
        for run in read_runs(write(tmp_path / f"{number}.jsonl", argv, planted_seconds(argv)), machine)
    ]
    assert [run.iterations for run in runs] == [9] * 4
    fitted = calibrate(runs[:3], machine, "mine")
    assert abs(predicted_seconds(runs[3], fitted) / runs[3].seconds - 1) < 0.05
    assert abs(predicted_seconds(runs[3], machine) / runs[3].seconds - 1) > 0.3  # which the constants were not before
    one = calibrate(runs[:1], machine, "one")
    assert abs(predicted_seconds(runs[1], one) / runs[1].seconds - 1) < 0.15
    path = tmp_path / "mine.yaml"
    path.write_text(hardware_yaml(fitted, "cpu"))
    again = find_hardware(str(path))
    for each in fields(Constants):
        assert getattr(again.constants, each.name) == pytest.approx(getattr(fitted.constants, each.name), rel=1e-3)
    assert [run.features for run in again.calibration] == [run.features for run in fitted.calibration]

    def bar(flags, world_size=1):
        return error_bar(make_plan(parse_args([*LINES[0].split(), *flags.split()], world_size), world_size, again))

    assert bar("").relative < bar("--num-layers 64").relative and bar("").relative < 0.15
    assert any(
        "TP 2: in none" in name for name, _ in bar("--tensor-model-parallel-size 2 --sequence-parallel", 2).reasons
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no record says what ran"),
        ("{\n", "line 1 is no JSON"),
        ("[1]\n", "line 1 is no record"),
        ("{" * 5000 + "\n", "line 1 is no JSON"),
        ('{"iteration": 1, "elapsed_ms": 3}\n', "no record says what ran"),
        ('{"iteration": 1, "run": {"world_size": 1}}\n', "timed iterations"),
        (
            '{"iteration": 1, "elapsed_ms": 3, "run": {"world_size": "8"}}\n' + '{"elapsed_ms": 3}\n' * 9,
            "lacks world_size",
        ),
        (
            '{"iteration": 1, "elapsed_ms": 3, "run": {"world_size": 1, "padded_vocab_size": 9, "settings": {"num_layers": "x"}}}\n'
            + '{"elapsed_ms": 3}\n' * 9,
            "cannot be planned",
        ),
        ("\xff", "no record"),
    ],
)
def test_invalid_metrics_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_runs(path, find_hardware("cpu"))


@pytest.mark.parametrize("name", ["num_layers", "mtp_num_layers", "pipeline_model_parallel_size"])
def test_oversized_settings_are_rejected_before_planning(tmp_path, monkeypatch, name):
    """The value is checked before anything is planned."""
    path = write(tmp_path / "metrics.jsonl", LINES[0], 0.1)
    record = json.loads(path.read_text().splitlines()[0])
    record["run"]["settings"][name] = 10**9
    path.write_text("\n".join([json.dumps(record), *path.read_text().splitlines()[1:], ""]))
    monkeypatch.setattr(local_calibration, "make_plan", lambda *_: pytest.fail("it was planned"))
    with pytest.raises(PlanError, match=f"{name}: 1000000000 is more than 4096"):
        read_runs(path, find_hardware("cpu"))


def test_unreadable_metrics_files_are_rejected(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "binary"):
        with pytest.raises(PlanError, match="cannot be read"):
            read_runs(path, find_hardware("cpu"))


def test_runs_of_different_devices_are_kept_apart(tmp_path):
    machine = find_hardware("cpu")
    runs = [
        *read_runs(write(tmp_path / "a.jsonl", LINES[0], 1.0), machine),
        *read_runs(write(tmp_path / "b.jsonl", LINES[0], 1.0, threads=2), machine),
    ]
    with pytest.raises(PlanError, match="cpu with 1 threads a rank, cpu with 2 threads"):
        calibrate(runs, machine, "mine")


@pytest.mark.parametrize(
    "text, message",
    [
        ("constants: 3", "is no table"),
        ("constants: {speed: 3}", "unknown speed"),
        ("constants: {memory: -1}", "memory"),
        ("calibration: 3", "no list"),
        ("calibration: [3]", "every run is a table"),
        ("synchronous: 3", "neither true nor false"),
        ("constants: {launch: .inf}", "launch"),
    ],
)
def test_invalid_calibrated_hardware_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"like: cpu\n{text}\n")
    with pytest.raises(HardwareError, match=message):
        find_hardware(str(path))


def run_script(*words, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "plan.py"), *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "WORLD_SIZE"},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_calibration_refuses_output_over_inputs_pipes_and_folders(tmp_path, capsys):
    """A pipe cannot be replaced, and an input file must not be overwritten."""
    path = write(tmp_path / "metrics.jsonl", LINES[0], 0.1)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to("metrics.jsonl")
    os.mkfifo(tmp_path / "pipe")
    for output in (path, tmp_path / "link", tmp_path / "pipe", tmp_path, Path("..")):
        assert plan.main(["calibrate", "--from", str(path), "--hardware", "cpu", "--output", str(output)]) == 2
        captured = capsys.readouterr()
        assert (
            captured.err
            == f"plan.py: --output {output}: the name of a new file is needed, or of an older hardware file\n"
            and captured.out == ""
        )
    assert path.read_bytes() == before and (tmp_path / "pipe").is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "metrics.jsonl", "pipe"]


def test_calibrate_command(tmp_path):
    files = [write(tmp_path / f"{number}.jsonl", argv, planted_seconds(argv)) for number, argv in enumerate(LINES[:2])]
    code, text = run_script("calibrate", "--from", *files, "--output", tmp_path / "own.yaml")
    assert code == 0 and "written:" in text and "gemm_bf16 0.5 ->" in text
    code, text = run_script("calibrate", "--from", files[0], "--output", tmp_path / "own.yaml")
    assert code == 0 and "one run cannot determine" in text and (tmp_path / "own-1.yaml").exists()
    code, text = run_script(*LINES[0].split(), "--world-size", "1", "--hardware", tmp_path / "own-1.yaml")
    assert code == 0 and "fitted to 2 own runs" in text and "nearest published run" not in text
    code, text = run_script("calibrate", "--from", tmp_path / "none.jsonl")
    assert code == 2 and "cannot be read" in text
    code, text = run_script("calibrate", "--output", "x")
    assert code == 2 and "belong to --from" in text


@pytest.mark.slow
def test_calibration_to_a_real_run_predicts_a_larger_run(tmp_path):
    """On this machine's CPU: the smaller run is calibrated to, one of twice the batch and the width is predicted within 15 %."""

    def train(name, argv):
        words = f"{argv} --train-iters 12 --eval-iters 0 --log-interval 1 --metrics-file {tmp_path / name}".split()
        subprocess.run(
            [sys.executable, "pretrain_moe.py", *words],
            cwd=ROOT,
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return read_runs(tmp_path / name, find_hardware("cpu"))[0]

    small, large = (
        train("small.jsonl", LINES[0]),
        train("large.jsonl", f"{TOY} --micro-batch-size 4 --global-batch-size 16 --hidden-size 384"),
    )
    fitted = calibrate([small], find_hardware("cpu"), "mine")
    assert abs(predicted_seconds(large, fitted) / large.seconds - 1) < 0.15
