"""scripts/doctor.py: what is there, what is not and what that costs; ranks that talk, that give wrong results, that never come."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment, rank_variables

from moe_trainer.guard import self_test
from moe_trainer.parallel import collectives

SCRIPT = Path(__file__).parents[2] / "scripts" / "doctor.py"


@pytest.fixture
def doctor(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("doctor", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module  # its records' annotations are looked up there
    spec.loader.exec_module(module)
    return module


def package(tmp_path, monkeypatch, name, text, *folders):
    """An installed package of that name, for this test only."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(text)
    for folder in folders:
        (tmp_path / name / folder).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


def finding(doctor, name):
    return next(each for each in doctor.look_around() if each.name == name)


def test_alone_it_forks_two_ranks_that_talk(doctor, capsys):
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["missing"] == [] and [each["name"] for each in told["findings"]] == list(doctor.NAMES)
    test = told["self_test"]
    assert (test["backend"], test["world_size"], test["problems"]) == ("gloo", 2, []) and test["gb_s"] > 0
    assert test["passed"] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_and_receive"]


def test_a_wrong_result_is_named(doctor, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "reduce_scatter_flat", lambda out, x, group: out.fill_(7.0))
    assert doctor.main([]) == 1
    assert "rank 0: reduce_scatter over gloo gave a wrong result" in capsys.readouterr().out


def test_a_rank_that_hangs_is_named(doctor, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "PATIENCE_S", 4.0)
    monkeypatch.setattr(collectives, "broadcast", lambda x, group, src: self_test.time.sleep(60))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "has not ended after 4 s" in out and out.endswith("the self-test failed\n")


def test_what_is_required_and_absent_makes_the_exit_code(doctor, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("deep_ep", "wandb") else real(name, *rest))
    assert doctor.main(["--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert "absent   deepep " in out and "falls back to alltoall" in out and "everything that is needed is here" in out
    assert doctor.main(["--no-self-test", "--require", "deepep", "wandb"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  deepep " in out and out.endswith("missing: deepep, wandb\n")


def test_the_apex_of_the_package_index_is_not_nvidias(doctor, tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "apex", "raise RuntimeError('must not be imported')")
    assert "another program of the same name" in finding(doctor, "apex").problem
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    found = finding(doctor, "apex")
    assert found.problem is None and found.version == "without its CUDA extensions"


def test_three_products_in_one_package_name(doctor, tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "deep_ep", "class Buffer: pass\nclass HybridEPBuffer: pass\n")
    problems = {each.name: each.problem for each in doctor.find_deep_ep()}
    assert problems == {"deepep": None, "deepep_v2": "the installed deep_ep has no ElasticBuffer", "hybridep": None}


def test_a_broken_library_is_told_not_raised(doctor, tmp_path, monkeypatch):
    package(tmp_path, monkeypatch, "deep_ep", "raise OSError('libnvshmem.so: cannot open')")
    assert finding(doctor, "hybridep").problem == "the installed deep_ep cannot be imported (OSError: libnvshmem.so: cannot open)"


def test_an_environment_that_makes_no_sense(doctor, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert doctor.main([]) == 2
    assert "WORLD_SIZE must be an integer" in capsys.readouterr().err


def test_the_ranks_of_a_launcher_test_each_other_and_compare_what_they_have(tmp_path):
    """Rank 1's node has a DeepEP that rank 0's has not."""
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text("class Buffer: pass\n")
    with rank_variables(2) as variables:
        ranks = [subprocess.Popen([sys.executable, str(SCRIPT), "--json"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=environment(**each, **more))
                 for each, more in zip(variables, ({}, {"PYTHONPATH": str(tmp_path)}), strict=True)]
        (out, err), (other, _) = [process.communicate(timeout=600) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], err
    told = json.loads(out)
    assert other == "" and told["self_test"]["world_size"] == 2 and told["self_test"]["problems"] == []
    assert any("rank 1 on " in line and ": deepep is there, on rank 0 the package deep_ep is not installed" in line for line in told["differences"])
