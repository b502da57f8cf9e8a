"""Tests of scripts/roofline.py: a step of several pipeline stages, and errors."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from emulated_cuda import build

SCRIPT = Path(__file__).parents[2] / "scripts" / "roofline.py"
TINY = (
    "--preset mixtral_tiny --mock-data --bf16 --world-size 4 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32 --micro-batch-size 1 "
    "--seq-length 512"
)


@pytest.fixture
def roofline():
    spec = importlib.util.spec_from_file_location("roofline", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_estimates_a_step_of_two_stages(roofline, capsys, tmp_path):
    try:
        build.library()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    assert roofline.main([*TINY.split(), "--hardware", "gb200", "--report", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "4 x gb200; executed: pipeline stages 0 1 of 2, of 16 microbatches 3" in out
    assert "the 10 most expensive lines" in out and "nearest published run" in out and "why the two differ" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["step_s"] == pytest.approx(sum(report["step"].values()))
    last = report["stages"]["1"]
    # one wait per layer and microbatch, and three per iteration
    assert last["host_waits"] == 2 * 16 + 3
    # nothing is faster than the device's peaks, and the device waits for most launches of so small a model
    assert last["at_peaks_s"] < last["operators_s"] - last["idle_s"] < 0.5 * last["operators_s"]
    lines = {line.split(":")[0] for line in last["lines"]}
    assert {"ops/grouped_gemm.py", "optim/update_rules/adam.py", "layers/linear.py"} <= lines
    assert {"decoder.layers.2", "backward of decoder.layers.3"} <= set(last["layers_s"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--hardware q100", "--hardware q100: there are a100"),
        ("--hardware cpu", "--hardware cpu: "),
        ("--micro-batch-size 3", "--global-batch-size"),
        ("--skip-train", "--skip-train"),
        ("--report-html plan.html", "--report-html draws plans"),
        ("--moe-router-topk 9 --moe-rooter", "--moe-rooter"),
    ],
)
def test_roofline_errors_name_the_flag(roofline, capsys, flags, named):
    assert roofline.main([*TINY.split(), *flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_a_missing_device_is_an_error(roofline, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(roofline, "DEVICE", tmp_path)
    assert roofline.main(TINY.split()) == 2
    assert f"{tmp_path} is missing" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("g++") is None and roofline.main(TINY.split()) == 2
    assert "the emulated device " in capsys.readouterr().err
