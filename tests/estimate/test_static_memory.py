"""The memory line of --validate-only: weights in 8 bits of every rank against built runs, and the text of the line."""

import json
import re

import pytest
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run

from arguments import parse_args
from arguments.stage_layout import chunk_layouts
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.commands import train_process
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.parameters import ParamsPerRank
from moe_trainer.estimate.static_memory import matrices_only, quantized_params_on_rank, stage_states, state_report
from moe_trainer.parallel.params import get_param_info, is_quantized_param, unique_params

STORED = "--bf16 --use-distributed-optimizer --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CASES = (
    ("plain", f"--tensor-model-parallel-size 2 --qk-layernorm --qk-layernorm-all-heads {STORED}"),
    ("biases, tied head", f"--pipeline-model-parallel-size 2 --qk-layernorm {STORED} --expert-model-parallel-size 2"),
    (
        "deepseek",
        f"{TP2} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tt|mL --expert-tensor-parallel-size 1 {STORED}",
    ),
    (
        "plain",
        f"{TP2} --pipeline-model-parallel-size 2 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate {STORED} "
        "--first-last-layers-bf16 --num-layers-at-end-in-bf16 0 --group-query-attention --num-query-groups 2 --window-size 5,0 "
        "--window-attn-skip-freq 2 --window-num-query-groups 4 --window-softmax-type learnable --value-channels 2",
    ),
)


def _stored(rank, n):
    found = []
    for kind, flags in CASES:
        argv = [*make_argv(kind), *flags.split()]
        ps = create_groups(argv, rank, n)
        params = unique_params(param for chunk in make_run(argv, rank, ps, 1).chunks for param in chunk.parameters())
        found.append(
            (
                ps.pp.rank,
                ParamsPerRank(
                    *(
                        sum(
                            param.numel()
                            for param in params
                            if is_quantized_param(param) and get_param_info(param).kind == kind
                        )
                        for kind in ("dense", "expert")
                    )
                ),
            )
        )
    return found


def test_fp8_weights_of_every_rank_equal_the_built_run():
    for results in run_ranks(_stored, 4):
        for (kind, flags), (stage, held) in zip(CASES, results, strict=True):
            args = parse_args([*make_argv(kind), *flags.split()], 4)
            plain = matrices_only(args, padded_vocab_size_from_flags(args))
            assert quantized_params_on_rank(plain, chunk_layouts(args.model, args.parallel)[stage]) == held, (
                kind,
                flags,
                stage,
            )


def _line(capsys, *words):
    assert train_process.main([*words, "--validate-only"]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory per rank"))


def test_memory_line_of_a_large_job(capsys):
    """DeepSeek-V3 on 1024 ranks: the last stage holds head, fewer layers and multi-token prediction."""
    words = (
        "--preset deepseek_v3 --world-size 1024 --mock-data --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2 "
        "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --use-distributed-optimizer"
    ).split()
    line = _line(capsys, *words)
    most, stage, least = re.search(
        r"rank: ([\d.]+) GiB .* on pipeline stage (\d+) of 16, where it is most \(least: ([\d.]+)\)", line
    ).groups()
    args = parse_args(words, 1024)
    totals = [state.total / 2**30 for state in stage_states(args, 1024, padded_vocab_size_from_flags(args))]
    assert (
        float(most) == round(max(totals), 2)
        and float(least) == round(min(totals), 2)
        and totals[int(stage)] == max(totals)
    )


def test_memory_line_lists_equal_stages_once(capsys):
    line = _line(capsys, *make_argv("plain"), "--world-size", "2", *TP2.split())
    assert "pipeline stage" not in line and "moments" in line


def test_memory_without_world_size_is_that_of_one_replica():
    words = [
        "--preset",
        "mixtral_8x7b",
        "--mock-data",
        "--bf16",
        "--use-distributed-optimizer",
        "--expert-tensor-parallel-size",
        "1",
        *TP2.split(),
    ]
    assert state_report(parse_args(words, None), None) == state_report(parse_args(words, 2), 2)
    assert state_report(parse_args(words, 2), 2) != state_report(parse_args(words, 4), 4)


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise --fp8-param-gather", "tensorwise"])
@pytest.mark.parametrize("hardware", ["h100", "gb200"])
def test_memory_line_counts_quantized_casts_as_the_plan_does(capsys, recipe, hardware):
    words = (
        "--preset qwen3_30b_a3b --mock-data --bf16 --expert-model-parallel-size 8 --fp8-format e4m3 --world-size 64 "
        f"--fp8-recipe {recipe} --hardware {hardware}"
    ).split()
    line, stage = _line(capsys, *words), plan_of_flags(words).peak
    states = [float(number) for number in re.findall(r" ([\d.]+)[,)]", line)]
    expected = [stage.weights, stage.gradients, stage.optimizer]
    assert [*states[:2], sum(states[2:])] == pytest.approx([each / 2**30 for each in expected], abs=0.011)
    plain = _line(capsys, *words, "--transformer-impl", "local")
    assert plain != line  # this program's own layers keep no casts


def test_validate_only_report_equals_dry_run_memory(tmp_path):
    """With valid flags and a known number of ranks, the report equals that of --dry-run."""
    words = "--preset mixtral_8x7b --mock-data --bf16 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer".split()
    found = {}
    for mode in ("--validate-only", "--dry-run"):
        assert (
            train_process.main(
                [*words, mode, "--world-size", "64", "--hardware", "h200", "--report", str(tmp_path / mode)]
            )
            == 0
        )
        found[mode] = json.loads((tmp_path / mode).read_text())
    assert (
        found["--validate-only"]["memory"] == found["--dry-run"]["memory"]
        and found["--dry-run"]["memory"]["total_gb"] > 10
    )
    assert found["--validate-only"]["params"] == found["--dry-run"]["params"]
    assert train_process.main([*words, "--validate-only", "--world-size", "63", "--report", str(tmp_path / "bad")]) == 2
    assert train_process.main([*words, "--validate-only", "--report", str(tmp_path / "unknown")]) == 0
    assert all("memory" not in json.loads((tmp_path / name).read_text()) for name in ("bad", "unknown"))
