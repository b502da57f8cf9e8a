"""Tests of scripts/doctor.py: libraries that are installed, missing or broken; ranks that work, are wrong, or hang."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, rank_variables

from moe_trainer.commands import doctor as doctor_command
from moe_trainer.parallel import collectives
from moe_trainer.resilience import self_test

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "doctor.py"


@pytest.fixture
def doctor(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return doctor_command


def install_package(tmp_path, monkeypatch, name, text, *folders):
    """Make a package importable for this test only."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    for folder in folders:
        (tmp_path / name / folder).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


def get_finding(doctor, name):
    return next(finding for finding in doctor.collect_environment() if finding.name == name)


def test_a_single_process_forks_two_ranks(doctor, capsys):
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["missing"] == []
    assert [finding["name"] for finding in report["findings"]] == list(doctor.NAMES)
    test = report["self_test"]
    assert (test["backend"], test["world_size"], test["problems"]) == ("gloo", 2, []) and test["gb_s"] > 0
    assert test["passed"] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send_and_receive",
    ]


def test_a_wrong_result_is_reported(doctor, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "reduce_scatter_flat", lambda out, x, group: out.fill_(7.0))
    assert doctor.main([]) == 1
    assert "rank 0: reduce_scatter over gloo gave a wrong result" in capsys.readouterr().out


def test_a_hanging_rank_is_reported(doctor, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "STEP_TIMEOUT_S", 4.0)
    monkeypatch.setattr(collectives, "broadcast", lambda x, group, src: self_test.time.sleep(60))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "did not finish within 4 s" in out and out.endswith("the self-test failed\n")


def test_a_missing_required_library_sets_the_exit_code(doctor, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in ("deep_ep", "wandb") else real(name, *rest)
    )
    assert doctor.main(["--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert "absent   deepep " in out and "falls back to alltoall" in out
    assert out.endswith("all required libraries are installed\n")
    assert doctor.main(["--no-self-test", "--require", "deepep", "wandb"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  deepep " in out and out.endswith("missing: deepep, wandb\n")


def test_versions_are_compared_with_those_of_the_tested_range(doctor, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "TESTED", {**doctor.TESTED, "torch": ((1, 0), (1, 13))})
    assert doctor.main(["--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ok +torch .* \(newer than 1\.13, the newest that the test suite was run with\)", out)
    monkeypatch.setattr(doctor, "TESTED", {**doctor.TESTED, "torch": ((99, 1), (99, 2))})
    assert doctor.main(["--no-self-test"]) == 1
    assert re.search(r"MISSING +torch +older than 99\.1", capsys.readouterr().out)


def test_the_promised_range_of_versions_is_the_one_that_was_run(doctor):
    manual = (ROOT / "docs" / "test_suite.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \d{4}-\d\d-\d\d \| (\d+\.\d+)\S* \| (\d+\.\d+)\S* \| (\d+\.\d+)\S* \|", manual, re.MULTILINE
    )
    run = {
        name: sorted(tuple(map(int, version.split("."))) for version in versions)
        for name, versions in zip(("python", "torch", "triton"), zip(*rows, strict=True), strict=True)
    }
    assert {name: (releases[0], releases[-1]) for name, releases in run.items()} == doctor.TESTED
    promised = dict(
        re.findall(r'(python|torch|triton)\S*?>=([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    )
    assert promised == {name: "{}.{}".format(*releases[0]) for name, releases in run.items()}


def test_apex_of_pypi_is_not_reported_as_nvidia_apex(doctor, tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "apex", "raise RuntimeError('must not be imported')")
    apex = get_finding(doctor, "apex")
    assert "another program of that name" in apex.problem and "git+https://github.com/NVIDIA/apex" in apex.install
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    assert "without its CUDA extensions" in get_finding(doctor, "apex").problem


def test_three_libraries_share_one_package_name(doctor, tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "deep_ep", "class Buffer: pass\nclass HybridEPBuffer: pass\n")
    problems = {finding.name: finding.problem for finding in doctor.find_dispatch_libraries()}
    assert [problems[name] for name in ("deepep", "hybridep")] == [None, None]
    assert problems["deepep_v2"] == "the installed deep_ep has no ElasticBuffer"


def test_an_old_nccl_is_a_finding(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_trainer.backends.nccl_version", lambda: (2, 28, 9))
    install_package(tmp_path, monkeypatch, "deep_ep", "class Buffer: pass\nclass ElasticBuffer: pass\n")
    problems = {finding.name: finding.problem for finding in doctor.find_dispatch_libraries()}
    old = "the library needs NCCL 2.30.4 or later, and this process has 2.28.9 (libnccl.so.2)"
    assert problems["deepep"] == problems["deepep_v2"] == old


def test_a_broken_library_is_a_finding(doctor, tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "deep_ep", "raise OSError('libnvshmem.so: cannot open')")
    assert (
        get_finding(doctor, "hybridep").problem
        == "the installed deep_ep cannot be imported (OSError: libnvshmem.so: cannot open)"
    )


def test_a_malformed_environment_is_a_user_error(doctor, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert doctor.main([]) == 2
    assert "WORLD_SIZE must be an integer" in capsys.readouterr().err


def test_launched_ranks_run_the_self_test_and_compare_environments(tmp_path):
    """Only the node of rank 1 has DeepEP."""
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("class Buffer: pass\n")
    with rank_variables(2) as variables:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "--json"],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(**of_rank, **extra),
            )
            for of_rank, extra in zip(variables, ({}, {"PYTHONPATH": str(tmp_path)}), strict=True)
        ]
        (out, err), (out_of_rank_1, _) = [process.communicate(timeout=600) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], err
    report = json.loads(out)
    assert out_of_rank_1 == "" and report["self_test"]["world_size"] == 2 and report["self_test"]["problems"] == []
    assert any(
        "rank 1 on " in line and ": deepep is installed, on rank 0 the package deep_ep is not installed" in line
        for line in report["differences"]
    )
