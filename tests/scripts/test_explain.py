"""Tests of scripts/explain.py: sources of values, what each rank holds, and all errors at once."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "explain.py"
V3 = (
    "--preset deepseek_v3 --mock-data --world-size 64 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-layout Et*4|(tttt|)*14tmL"
)


@pytest.fixture(scope="module")
def explain():
    spec = importlib.util.spec_from_file_location("explain", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prints_grids_stages_and_experts(explain, capsys):
    assert explain.main(V3.split()) == 0
    out = capsys.readouterr().out
    assert "attention  tp 2 x cp 1 x dp 8 x pp 4" in out and "experts    etp 1 x ep 8 x edp 2 x pp 4" in out
    assert "chunk 0: embedding, dense layers 0-2, MoE layers 3\n" in out
    assert "chunk 3: MoE layers 60, final norm, multi-token prediction (1), head and loss" in out
    assert "ep 7: experts 224-255" in out and "stage 1: 24,548,474,880 parameters per rank" in out
    assert "pipeline_model_parallel_size" in out and "(command line)" in out and "adam_eps" not in out
    assert "--world-size 64 has no effect" not in out and "  ep              8 x 8" in out


def test_describes_one_rank(explain, capsys):
    assert explain.main([*V3.split(), "--rank", "21", "--all"]) == 0
    out = capsys.readouterr().out
    assert "rank 21: tp 1, cp 0, dp 2, pp 1, etp 0, ep 5, edp 0" in out and "experts 160-191 of every MoE layer" in out
    assert "chunk 1: MoE layers 20-23" in out and "[16-23]" in out and "adam_eps" in out


def test_reports_all_errors(explain, capsys):
    assert explain.main([*V3.split(), "--num-layers", "60", "--expert-model-parallel-size", "7"]) == 2
    out = capsys.readouterr().out
    assert "problems:" in out and "--num-experts" in out and "--pipeline-model-parallel-layout" in out
    assert explain.main(["torchrun", "pretrain_moe.py", "--preset", "mixtral_tiny", "--mock-data"]) == 0
    assert "the number of ranks is not known" in capsys.readouterr().out
    pasted = "A=1 srun -N 2 torchrun --nnodes 2 --nproc-per-node 4 pretrain_moe.py --preset mixtral_tiny --mock-data"
    assert explain.main(pasted.split()) == 0 and "groups of 8 ranks" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        explain.main([*V3.split(), "--rank", "64"])
    assert exit_info.value.code == 2


def test_help_exits_with_0_and_no_arguments_with_2(explain, capsys):
    with pytest.raises(SystemExit) as exit_info:
        explain.main(["--help"])
    text = capsys.readouterr().out
    assert exit_info.value.code == 0 and "--rank R" in text and "Exit code: 0, or 2" in text
    assert explain.main([]) == 2


def test_report_draws_groups_over_nodes(explain, tmp_path, capsys):
    path = tmp_path / "ranks.html"
    assert explain.main([*V3.split(), "--report-html", str(path)]) == 0
    page, out = path.read_text(encoding="utf-8"), capsys.readouterr().out
    assert "expert parallel (ep 8): 8 groups" in page and "pipeline (pp 4): 16 groups" in page
    assert "context parallel (cp" not in page and "8 GPUs of h100" in page
    assert out.splitlines()[-1] in page
    assert explain.main([*V3.split(), "--hardware", "gb200", "--report-html", str(path)]) == 0
    assert "GPUs of gb200" in path.read_text(encoding="utf-8")
    one = "--preset mixtral_tiny --mock-data --world-size 1 --expert-model-parallel-size 1".split()
    assert explain.main([*one, "--report-html", str(path)]) == 0 and "<svg" not in path.read_text(encoding="utf-8")


def test_report_that_cannot_be_written(explain, tmp_path, capsys):
    assert explain.main([*V3.split(), "--report-html", "/no/such/folder/x.html"]) == 2
    assert "--report-html /no/such/folder/x.html: the file cannot be written" in capsys.readouterr().err
    assert explain.main([*V3.split(), "--hardware", "no_such", "--report-html", str(tmp_path / "x.html")]) == 2
    with pytest.raises(SystemExit) as stopped:
        explain.main(["--preset", "mixtral_tiny", "--mock-data", "--report-html", "x.html"])
    assert stopped.value.code == 2 and "give --world-size N" in capsys.readouterr().err
